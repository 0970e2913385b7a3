"""The active party's settings."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from splitveil.active_party.defenses import DefenseSettings
from splitveil.active_party.defenses.settings import refusal_of_budget, refusal_of_several_classes
from splitveil.active_party.defenses.sum_kl import sum_kl_for_leak_auc
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.ledger.earlier_ledgers import SETTING, open_books
from splitveil.common.data.settings import expand_path
from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import ModelSettings
from splitveil.common.party.party_settings import Address, PartySettings
from splitveil.common.privacy.attacks import SideInformation
from splitveil.common.privacy.settings import AuditSettings, suggested
from splitveil.common.run.contract import ACTIVE
from splitveil.common.settings import Section, only_key


class EarlyStopping(Section):
    """End the run when the validation AUC no longer rises."""

    patience_epochs: int = Field(default=3, ge=1)
    """Epochs without a better validation AUC after which the run ends."""

    min_gain: float = Field(default=0.0, ge=0, lt=1)
    """Smallest rise of the AUC that counts as better."""


class LeakAucBudget(Section):
    """What a run may tell, as an AUC."""

    leak_auc: float = Field(gt=0.5, lt=1)
    """No score on all answers together may be able to reach a higher AUC about any example.

    That holds against peers that the charges describe: every peer for ``noisy_label``, and not
    every one for other defenses.
    Counted with the ledger's guarantee, which holds for every score, and not with its estimate,
    which is lower.
    """

    @property
    def max_sum_kl(self) -> float:
        """The same as divergence."""
        return sum_kl_for_leak_auc(self.leak_auc)


class SumKlBudget(Section):
    """What a run may tell, as symmetrised divergence."""

    sum_kl: float = Field(gt=0, le=1e6)
    """Largest divergence of the classes in all answers about one example together."""

    @property
    def max_sum_kl(self) -> float:
        """The divergence as it is."""
        return self.sum_kl


RunBudget = Annotated[
    Annotated[LeakAucBudget, Tag("leak_auc")] | Annotated[SumKlBudget, Tag("sum_kl")],
    Discriminator(
        only_key,
        custom_error_type="run_budget_key",
        custom_error_message="expected exactly one of leak_auc, sum_kl",
    ),
]
"""What a run may tell of each label in all; the key that is present says in which unit."""


class LeakGateSettings(Section):
    """What to do when the leak monitor's attacks reach more than they should."""

    attack: str | None = None
    """The attack that counts, one of the leak monitor's; ``null`` for the worst of all."""

    max_leak_auc: float = Field(default=0.65, gt=0.5, lt=1)
    """Largest leak AUC over the window that is accepted.

    Random scores reach 0.5 + 0.23 / sqrt(positives of a batch) on average: a limit near that is
    passed by chance. With several classes it is the worst pair's that counts, which lies higher by
    chance: look at ``random_leak_auc`` in the metrics first.
    """

    window_steps: int = Field(default=100, ge=1, le=100_000)
    """Audited batches that are judged together; before there are as many, nothing is."""

    quantile: Literal["mean"] | Annotated[float, Field(gt=0, lt=1)] = "mean"
    """What counts of the window: the mean, or a quantile such as 0.95 (stricter above 0.5)."""

    action: Literal["stop", "warn"] = "stop"
    """``stop`` ends the run before its next answer, with a checkpoint and exit code 5; ``warn``
    writes a line to the log, at most one per window."""


class DistributionSettings(Section):
    """At which steps to count gradients by their norm and direction, class by class."""

    epochs: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """Epochs, from 0 as in ``metrics.jsonl``, of which the first batch with enough examples of both
    classes is counted; ``null`` for 0, 1, 2, 4, 8, ... and the last."""


class LeakMonitorSettings(AuditSettings):
    """The attacks that this party runs on the gradients it sends, to know what they leak."""

    reference: Literal["clean", "sent"] = "clean"
    """Which gradient of a positive the cosine attack is told.

    ``clean``, as it was before the defense, is the stronger reading: it carries no noise, so that
    the figure holds for an attacker who knows more than this party ever sends. ``sent``, as it
    leaves, is what the passive party's own adversary takes: then both sides' figures are equal.
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


class ActiveSettings(PartySettings):
    """What the label owner sets, and shows to nobody."""

    listen: Address = "127.0.0.1:50051"
    """Host and port at which the passive party finds this one."""

    first_contact_s: float = Field(default=3600.0, gt=0)
    """Seconds to wait for the passive party's first call."""

    top_model: ModelSettings
    """The half of the network above the cut layer."""

    defense: DefenseSettings
    """What is done to each gradient before it is sent. Private: the peer never learns it."""

    noise_key_path: Path | None = None
    """File of the secret key of persistent noise and noisy labels, made with mode 0600.

    Relative to this settings file. By default it lies beside the checkpoint: a run that goes on
    keeps its noise, and a new run draws its own. Give a path to keep the noise over several runs on
    the same labels with the same defense, which then tell together what the first one tells. With
    another strength, what they tell adds up. Whoever reads this file subtracts the noise.
    """

    leak_monitor: LeakMonitorSettings | None = LeakMonitorSettings()
    """Attacks that this party runs on its own defended gradients; ``null`` for none."""

    distributions: DistributionSettings | None = DistributionSettings()
    """Histograms of gradients before and after the defense, by class, in this party's own metrics
    and report; ``null`` for none. A run of several classes has none."""

    run_budget: RunBudget | None = None
    """What the run may tell of each label in all; ``null`` for no limit.

    What the runs of ``earlier_ledgers`` told counts, too. Before an answer would pass it the run
    ends with a checkpoint and exit code 5. The peer then learns when the run ends, and that it is
    for good.
    """

    earlier_ledgers: tuple[str, ...] = Field(default=(), max_length=1000)
    """Folders with the ledgers of earlier runs about the same labels: this party's ``checkpoint``
    in each, as ``runs/monday/active/checkpoint``, written like ``initial_weights``. The ledger of
    this run begins with what they have told of its examples, and so does its budget. The ledger
    that it leaves includes them: of a chain of runs the newest is enough. Needs ``data.id_column``.
    By default it begins with nothing, as if no example had been answered about before."""

    leak_gate: LeakGateSettings | None = None
    """Whether the leak monitor's figures may end the run; ``null`` for never.

    The monitor measures beside the training: what was answered meanwhile has left.
    """

    allow_audits: bool = False
    """Whether to tell the peer the leak AUC of scores that it sends, if the contract's
    ``audits_allowed`` is set, too.

    At most once per attack, layer and epoch, for at least 1,000 training rows of each class, with
    two digits. The peer chooses the scores, and the ledger counts no such answer: allow it to a
    peer that audits the run with you.
    """

    early_stopping: EarlyStopping | None = None
    """When to stop before the contract's last epoch. The peer then learns when the run ends."""

    def noise_key_file(self) -> Path:
        """Return where the noise key lies."""
        if self.noise_key_path is not None:
            return self.base_dir / self.noise_key_path
        return self.runs_dir / self.contract.run_name / ACTIVE / "checkpoint" / "noise.key"

    def earlier_answers(self) -> AccountBook:
        """Return what earlier runs may have told of examples, by example.

        Raises:
            SettingsError: a ledger cannot be read, or is this run's own.
        """
        folders = [expand_path(SETTING, text, self.base_dir) for text in self.earlier_ledgers]
        own = (self.runs_dir / self.contract.run_name / ACTIVE).resolve()
        for folder in folders:
            if own in folder.resolve().parents:
                raise SettingsError(
                    f"{SETTING}: {folder} is of this run: give the run another run_name"
                )
        return open_books(folders)

    @model_validator(mode="after")
    def _needs_what_it_uses(self) -> "ActiveSettings":
        if self.data.label_column is None:
            raise ValueError("data.label_column: the active party's data need a label column")
        split = self.contract.split
        if self.early_stopping is not None and split.kind == "hash" and split.validation == 0:
            raise ValueError("early_stopping needs contract.split.validation > 0")
        unbounded = refusal_of_budget(self.defense, self.contract.aggregate_dim)
        if self.run_budget is not None and unbounded is not None:
            raise ValueError(f"run_budget: {unbounded}, or run_budget to null")
        if self.earlier_ledgers and self.data.id_column is None:
            raise ValueError(
                "earlier_ledgers: needs data.id_column: a row's number is another example's in "
                "another file"
            )
        if self.allow_audits and not self.contract.audits_allowed:
            raise ValueError("allow_audits needs contract.audits_allowed")
        self._check_leak_gate()
        if self.data.classes is not None:
            refusal = refusal_of_several_classes(self.defense)
            if refusal is not None:
                raise ValueError(f"defense: {refusal} (data.classes: {self.data.num_classes})")
        return self

    def _check_leak_gate(self) -> None:
        if self.leak_gate is None:
            return
        if self.leak_monitor is None:
            raise ValueError("leak_gate needs leak_monitor, whose figures it judges")
        judged = tuple(self.leak_monitor.batch_attack_needs)
        if not judged:
            raise ValueError("leak_gate: no attack of leak_monitor measures single batches")
        if self.leak_gate.attack is not None and self.leak_gate.attack not in judged:
            raise ValueError(
                f"leak_gate.attack: {self.leak_gate.attack!r} is not in leak_monitor.attacks"
                f"{suggested(self.leak_gate.attack, judged)} (single batches are measured by: "
                f"{', '.join(judged)})"
            )
