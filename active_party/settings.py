"""The active party's settings."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from splitveil.active_party.defenses import DefenseContext, DefenseSettings
from splitveil.active_party.defenses.section import refusal_of_weights
from splitveil.active_party.ledger.account_book import SETTING, AccountBook, open_books
from splitveil.active_party.ledger.budget import EARLY_STOPPING, Limit, objection_to
from splitveil.common.data.source_settings import expand_path
from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import ModelSettings
from splitveil.common.party.party_settings import Address, IdLimit, KeyPair, PartySettings
from splitveil.common.privacy.attacks import SideInformation
from splitveil.common.privacy.charge import Adversary
from splitveil.common.privacy.settings import DEFAULT_ATTACKS, AuditSettings
from splitveil.common.run.contract import ACTIVE, Name
from splitveil.common.run.id_rules import rules_as_bytes
from splitveil.common.settings import Mark, Section, kind_by_key


class ServingTls(KeyPair):
    """The certificate that this party shows to the programs that ask for predictions.

    It carries the host name that programs connect to.
    """

    clients: Annotated[Path | None, Mark.PATH] = None
    """PEM file with the authorities of client certificates: a program without such a certificate is
    turned away. It is recorded under its certificate's common name. ``null`` to ask for none; a
    token is then needed."""


class ServingSettings(IdLimit):
    """Online predictions for other programs of this party: ``splitveil serve active.yaml``."""

    http: Address = "127.0.0.1:8080"
    """Host and port for HTTP."""

    tls: ServingTls | None = None
    """TLS 1.3; ``null`` for plain text, which stays on this machine."""

    token_file: Annotated[Path | None, Mark.PATH] = None
    """File with one line ``NAME TOKEN`` for each program that may ask, mode 0600; a token has at
    least 32 characters. Programs send ``Authorization: Bearer TOKEN``. The path is relative to this
    settings file. ``null`` for none."""

    max_ids: int = Field(default=1000, ge=1, le=100_000)
    """Largest number of ids in one request."""

    timeout_s: float = Field(default=1.0, gt=0, le=600)
    """Seconds after which a request without an answer from every passive party is given up."""

    fallback: bool = False
    """At the end of a run, train a model of only this party's own features, and answer with it,
    marked as such, while a passive party is away or where it has no row of an id.
    """


class PeersOfBudget(Section):
    """The peers for whom a budget has to hold."""

    adversary: Literal["anybody", "honest-but-curious", "knows class means only"] = "anybody"
    """The peers for whom the limit has to hold.

    ``anybody``: a peer that may choose its activations, and may know everything but one label.
    ``honest-but-curious``: one that sends its model's activations. ``knows class means only``: one
    that compares gradients with the class means of a batch, and looks at nothing else. A defense
    whose charges do not describe these peers is refused.
    """

    @property
    def peers(self) -> Adversary:
        """The peers for whom the limit has to hold."""
        return Adversary(self.adversary)


class LeakAucBudget(PeersOfBudget):
    """Limit on what a run may reveal, as an AUC."""

    leak_auc: float = Field(gt=0.5, lt=1)
    """Highest AUC that a score computed from all answers together may reach on any example.

    The limit is compared with the ledger's bound for these peers. Where all answers are a Gaussian
    mechanism, or follow from one noisy label, that is the exact figure; otherwise it is the bound
    for any distributions, or a smaller one where the defense has it.
    """

    @property
    def limit(self) -> Limit:
        """The limit as divergences."""
        return Limit.of_leak_auc(self.leak_auc, self.peers)


class SumKlBudget(PeersOfBudget):
    """Limit on what a run may reveal, as a symmetrised divergence."""

    sum_kl: float = Field(gt=0, le=1e6)
    """Largest divergence between the classes in all answers about one example together."""

    @property
    def limit(self) -> Limit:
        """The limit as divergences."""
        return Limit.of_sum_kl(self.sum_kl, self.peers)


RunBudget = Annotated[
    Annotated[LeakAucBudget, Tag("leak_auc")] | Annotated[SumKlBudget, Tag("sum_kl")],
    kind_by_key("leak_auc", "sum_kl", error_type="run_budget_key"),
]
"""Limit on what a run may reveal about each label; its key names the unit."""


class LeakMonitorSettings(AuditSettings):
    """Attacks that this party runs on the gradients it sends, to measure what they leak."""

    reference: Literal["clean", "sent"] = "clean"
    """The gradient of a positive example that the cosine attack is given.

    ``clean``, from before the defense, is the stricter choice: it is free of noise, so the figure
    holds for an attacker that knows more than this party ever sends. ``sent``, after the defense,
    is the gradient that the passive party's own adversary uses: both sides' figures are then equal.
    """

    @model_validator(mode="after")
    def _reads_gradients_alone(self) -> "LeakMonitorSettings":
        refused = [
            name
            for name, needs in self.batch_attack_needs.items()
            if SideInformation.ACTIVATIONS in needs
        ]
        if refused:
            raise ValueError(
                f"{', '.join(refused)}: the leak monitor looks at gradients alone; the passive "
                "party's adversary measures it"
            )
        return self


class ActiveReportSettings(Section):
    """The contents of the active party's report, and the target against which it judges the run."""

    target_leak_auc: float | None = Field(default=None, gt=0.5, lt=1)
    """Largest accepted leak AUC of the whole run. The report says whether the bound for anybody and
    the measured attacks stay below it, which setting to change if not, and at what price. By
    default the target is the ``leak_auc`` of ``run_budget``; without either, no run passes."""

    min_test_auc: float | None = Field(default=None, gt=0.5, lt=1)
    """Smallest accepted test AUC; ``null`` accepts any."""

    group_column: str | None = None
    """Column of this party's own table by whose entries the report divides the test rows, to show
    whether the model is as good, as well calibrated and as selective for every group. It is sent to
    nobody, and need not be a feature: a pattern such as ``*`` in ``data.features`` makes it one
    unless ``exclude`` names it. Only for two classes; ``null`` for no such table."""


class RefitSettings(Section):
    """A new top model for this party's own predictions, fitted after the last gradient.

    It learns the true labels from the last activation of each row, which stay in the ``checkpoint``
    folder for ``splitveil refit``. Nothing of it is sent, and no later run begins with it. A
    tenth of the training rows is held out: if the trained model predicts them better, it stays.
    """

    epochs: int = Field(default=20, ge=1, le=100_000)
    """Most passes over the training rows, through which the contract's schedule of the learning
    rate runs once; five without a smaller loss on the held-out rows are the last."""

    boosting: bool = False
    """Try the mean of its outputs and those of scikit-learn's gradient boosting, on the activation
    and the own numbers and categories, at most 1,024 columns together and 262,144 rows. It is used
    if it predicts the held-out rows better."""


class InferenceSettings(Section):
    """Predictions with the trained model; this party calls the passive parties for them."""

    connect: dict[Name, Address] = Field(default_factory=dict)
    """Host and port of each passive party's ``splitveil serve``, by its name in the
    contract."""

    proxy: Literal["environment"] | None = None
    """``environment``: connect through the HTTP proxy that the environment names, as the passive
    party's ``proxy`` does."""

    model: Literal["best", "trained", "refitted"] = "best"
    """The top model that predicts: ``trained`` is the model that the run has trained, ``refitted``
    the one that was fitted to the true labels after the last gradient (``refit``), which only this
    party sees. ``best`` takes the refitted one if the run has left one, and the trained model
    otherwise."""


class ActiveSettings(PartySettings):
    """The label owner's settings, which stay private."""

    listen: Annotated[Address, Mark.MAY_CHANGE, Mark.PER_RUN] = "127.0.0.1:50051"
    """Host and port at which the passive party reaches this one."""

    top_model: ModelSettings
    """The half of the network above the cut layer."""

    defense: DefenseSettings
    """The defense of each gradient, or of the release of a one-shot run, before it is sent. It is
    private: neither a message nor the transcript names it, though the noise in what arrives says
    something about its strength, and noisy sums come with the deviation of theirs."""

    noise_key_path: Annotated[Path | None, Mark.PATH] = None
    """File of the secret key of persistent noise and noisy labels, made with mode 0600.

    The path is relative to this settings file. By default the file lies beside the checkpoint: a
    run that resumes keeps its noise, and a new run draws new noise. Give a path to keep the noise
    over several runs with the same defense on the same label column, which together then reveal no
    more than the first one: every example keeps the label it was first used with, whatever the
    column says now. These labels lie beside the key, in a file with the ending
    ``.labels``: move both. With another strength or column, and with noisy sums, what runs reveal
    adds up. Anyone who can read this file can subtract the noise. Needs ``data.id_column``.
    """

    leak_monitor: LeakMonitorSettings | None = LeakMonitorSettings()
    """Attacks that this party runs on its own defended gradients; ``null`` for none."""

    run_budget: Annotated[RunBudget | None, Mark.MAY_CHANGE] = None
    """Limit on what the run may reveal about each label in total; ``null`` for no limit.

    The charges of earlier runs count as well (``earlier_ledgers``). Before an answer would exceed
    the limit, the run ends with a checkpoint and exit code 5. The peer then learns when the run
    ends, and that it has ended for good.
    """

    earlier_ledgers: Annotated[tuple[str, ...] | None, Mark.PATH] = Field(
        default=None, max_length=1000
    )
    """Folders with the ledgers of earlier runs about the same labels: this party's ``checkpoint``
    folder of each, such as ``runs/monday/active/checkpoint``, written like ``initial_weights``. The
    ledger of this run starts with what they have revealed about its examples, and so does its
    budget. The ledger that it leaves includes them, so that the newest run of a chain is enough.
    Needs ``data.id_column``.

    By default these are all runs under ``runs_dir`` whose ``data.label_column`` is the same (and,
    without ``data.id_column``, whose ``data.source`` is), whatever their names, and also those that
    were killed or moved aside. With ``[]``, the ledger starts at zero, as if there had been no
    earlier answers about any example."""

    report: Annotated[ActiveReportSettings, Mark.MAY_CHANGE] = ActiveReportSettings()
    """Contents of the report; they change nothing of the run."""

    refit: RefitSettings | None = RefitSettings()
    """A top model for this party's own predictions; ``null`` for none."""

    inference: Annotated[InferenceSettings, Mark.MAY_CHANGE] = InferenceSettings()
    """Predictions with the trained model."""

    serving: Annotated[ServingSettings, Mark.MAY_CHANGE] = ServingSettings()
    """Online predictions for other programs of this party."""

    early_stopping_epochs: int | None = Field(default=None, ge=1)
    """Epochs without a higher validation AUC, or with ``data.label_range`` a lower validation RMSE,
    after which the run ends before the contract's last one; ``null`` for no such end. The peer then
    learns when the run ends, which depends on the validation labels: the bounds are about training
    labels only."""

    def defense_context(self, pos_fraction: float = 0.5, rows_of_person: int = 1) -> DefenseContext:
        """Return the facts that the defense depends on; forecasts need the share of positives."""
        data, within = self.data, self.data.label_range
        bounds = None if within is None else (within.low, within.high)
        return DefenseContext(
            self.contract.aggregate_shape,
            data.num_classes,
            pos_fraction,
            self.contract.epochs,
            bounds,
            repr((data.label_column, data.positive_label, data.class_names, bounds)),
            self.contract.is_one_shot,
            self.contract.releases_sums,
            rows_of_person,
        )

    def noise_key_file(self) -> Path:
        """Return the path of the noise key."""
        if self.noise_key_path is not None:
            return self.base_dir / self.noise_key_path
        return self.run_folder(ACTIVE) / "checkpoint" / "noise.key"

    def earlier_answers(self) -> AccountBook:
        """Return the named ledgers' accounts of earlier runs, by example."""
        named = self.earlier_ledgers or ()
        folders = [expand_path(SETTING, text, self.base_dir) for text in named]
        own = self.run_folder(ACTIVE).resolve()
        for folder in folders:
            if own in folder.resolve().parents:
                raise SettingsError(
                    f"{SETTING}: {folder} belongs to this run: give the run another run_name"
                )
        return open_books(folders, rules_as_bytes(self.contract.ids))

    @model_validator(mode="after")
    def _needs_what_it_uses(self) -> "ActiveSettings":
        if self.data.label_column is None:
            raise ValueError("data.label_column: the active party's data need a label column")
        split = self.contract.split
        is_hash = split.kind == "hash" and split.validation == 0
        if self.early_stopping_epochs is not None and is_hash:
            raise ValueError("early_stopping_epochs needs contract.split.validation > 0")
        for name in ("earlier_ledgers", "noise_key_path"):
            if getattr(self, name) and self.data.id_column is None:
                raise ValueError(
                    f"{name}: needs data.id_column: in another file, a row's number belongs to "
                    f"another example"
                )
        if self.serving.fallback and self.data.features is None:
            raise ValueError("serving.fallback: needs data.features: it predicts from them only")
        self._check_one_shot()
        self._check_label_kind()
        if not self.contract.is_one_shot:  # else the peer sees no loss
            refusal = refusal_of_weights(self.defense, self.data, self.defense_context())
            if refusal is not None:
                raise ValueError(f"defense: {refusal}")
        self._check_run_budget()
        return self

    def _check_one_shot(self) -> None:
        contract = self.contract
        if not contract.is_one_shot:
            if self.defense.traits.subject_column is not None:
                raise ValueError(
                    "defense.subject_column: bounds rows of one person together in a release of "
                    "contract.exchange: one_shot alone: with gradients, leave it out"
                )
            return
        if self.defense.traits.subject_column == self.data.label_column:
            raise ValueError(
                "defense.subject_column: names the label column, so that the strength of the noise "
                "would tell the size of a class; expected the column of the persons"
            )
        refusal = self.defense.one_shot_refusal(contract.release)
        if refusal is not None:
            raise ValueError(f"defense: {refusal}")
        scores = max(self.data.num_classes - 1, 1)
        if contract.release and contract.scores != scores:
            raise ValueError(
                f"contract.scores: expected {scores}, got {contract.scores}: one for each of "
                f"{self.data.num_classes} classes but one"
            )
        if self.early_stopping_epochs is not None:
            raise ValueError(
                "early_stopping_epochs: a one-shot run ends with its last row; leave it out"
            )

    def _check_label_kind(self) -> None:
        data = self.data
        if data.classes is None and data.label_range is None:
            return
        objection = self.defense.objection(self.defense_context())
        if objection is not None:
            of_classes = "" if data.classes is None else f" (data.classes: {data.num_classes})"
            raise ValueError(f"defense: {objection}{of_classes}")
        if data.label_range is None:
            return
        monitor = self.leak_monitor
        if self.report.min_test_auc is not None:
            raise ValueError(
                "report.min_test_auc: with data.label_range there is no AUC; set it to null"
            )
        # By their value: settings that were written out in full name the default ones.
        if monitor is not None and monitor.attacks != DEFAULT_ATTACKS:
            raise ValueError(
                "leak_monitor.attacks: they distinguish classes; with data.label_range the leak "
                "monitor always runs those on numbers: leave the list out, or set leak_monitor to "
                "null for none"
            )

    def _check_run_budget(self) -> None:
        if self.run_budget is None:
            return
        context, peers = self.defense_context(), self.run_budget.peers
        model = self.defense.charge_model(context)
        if model.refusal is not None:
            raise ValueError(f"run_budget: {model.refusal}, or run_budget to null")
        described = model.charge.adversary
        if not described.includes(peers):
            raise ValueError(
                f"run_budget: {self.defense.name} has no bound for {peers.in_words}, only for "
                f"{described.in_words}. {model.covers} Expected adversary: {described} in "
                f"run_budget, or a defense with a bound for {peers.in_words}, such as noisy_label"
            )
        signals = () if self.early_stopping_epochs is None else (EARLY_STOPPING,)
        objection = objection_to(peers, signals)
        if objection is not None:
            raise ValueError(f"run_budget: {objection}")
