"""The passive party's settings."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from splitveil.common.data.settings import DataSettings
from splitveil.common.models.settings import BottomModelSettings, CustomModel, PcaModel, ScoreModel
from splitveil.common.party.party_settings import Address, IdLimit, Insecure, PartySettings
from splitveil.common.privacy.attacks import ATTACKS, CUT
from splitveil.common.privacy.settings import DEFAULT_ATTACKS, AttackChoice, AuditSettings
from splitveil.common.run.contract import SplitSettings
from splitveil.common.settings import Mark


class AdversarySettings(AuditSettings):
    """Attacks that this party runs on the gradients it receives, to measure their leakage."""

    attacks: tuple[AttackChoice, ...] = Field(
        default=(*DEFAULT_ATTACKS, "completion_40"), min_length=1
    )
    """The attacks that score every audited batch, accumulate over the run's epochs, or look at the
    trained bottom model: names, or sections with ``kind: custom``."""

    layers: tuple[str, ...] = Field(default=("cut", "first"), min_length=1)
    """``cut`` (the gradients as received), ``first`` (the bottom model's first layer), or the name
    of a submodule of the bottom model."""

    labels: DataSettings | None = None
    """File with evaluation labels that both sides know; without it, this party measures no leak
    AUC."""

    store_received: bool = False
    """Write each epoch's received gradients and sent activations to ``received-0001.npz`` and so on
    in this party's run folder, mode 0600, with the labels if ``labels`` has them: for ``splitveil
    audit``. An epoch is held in memory; one where the run was resumed has only the batches after
    that."""

    @model_validator(mode="after")
    def _knows_no_predictions(self) -> "AdversarySettings":
        if self.needs_predictions:
            raise ValueError(
                "informed and accumulated_informed: this party does not know the predictions of "
                "the top model; the active party's leak monitor measures them"
            )
        return self

    @model_validator(mode="after")
    def _activations_are_of_the_cut(self) -> "AdversarySettings":
        unread = [
            name
            for name, attack in ATTACKS.items()
            if name in self.attacks and not attack.reads_gradients
        ]
        if unread and CUT not in self.layers:
            raise ValueError(f"{', '.join(unread)}: measured at the cut; add cut to layers")
        return self

    @model_validator(mode="after")
    def _labels_have_a_column(self) -> "AdversarySettings":
        if self.labels is not None and self.labels.label_column is None:
            raise ValueError("labels.label_column: name the column that holds the labels")
        if self.labels is not None and self.labels.label_range is not None:
            raise ValueError(
                "labels.label_range: the adversary's attacks separate classes; the active "
                "party's leak monitor measures those on numbers"
            )
        return self


class AnswerSettings(IdLimit):
    """Answers about rows once the model is trained, by ``splitveil serve passive.yaml``.

    The active party names ids, and this party answers with the activations of their rows. Each
    answer tells the active party whether this party has a row of that id.
    """

    listen: Address = "127.0.0.1:50061"
    """Host and port where the active party reaches this one for predictions."""

    whole_table: bool = False
    """Let the active party take the whole table, sealed row by row, and open the rows whose ids it
    has. This party then learns how many ids are asked for, and not which. Every row is computed for
    every such request."""


ProxyUrl = Annotated[str, StringConstraints(pattern=r"^http://[^/@\s]+:[0-9]{1,5}/?$")]
"""Without user and password, which have a file of their own."""


class PassiveSettings(PartySettings):
    """The private settings of the feature owner."""

    party: str = "passive"
    """This party's name in the contract."""

    connect: Annotated[Address, Mark.MAY_CHANGE] = "127.0.0.1:50051"
    """Host and port of the active party."""

    proxy: Annotated[Literal["environment"] | ProxyUrl | None, Mark.MAY_CHANGE] = None
    """The HTTP proxy to connect through with ``CONNECT``, as ``http://HOST:PORT``. With
    ``environment``, it is the one that ``grpc_proxy``, ``https_proxy`` or ``http_proxy`` names,
    except to the hosts in ``no_grpc_proxy`` or ``no_proxy``. Only with mTLS. By default these
    variables are ignored, and the connection is direct."""

    proxy_credentials: Annotated[Path | None, Mark.PATH, Mark.MAY_CHANGE] = None
    """File with ``USER:PASSWORD`` for the proxy, mode 0600 or stricter, relative to this settings
    file; needs ``proxy: http://HOST:PORT``. Not for ``environment``, whose variable has them."""

    bottom_model: BottomModelSettings
    """The half of the network below the cut layer."""

    max_exposure: float | None = Field(default=None, gt=0, le=1)
    """The most that what is sent may disclose of this party's columns, as ``splitveil
    plan`` measures it: the share of what a guesser without any column does not know, as a mean over
    columns. A run above it is refused before anything is sent. By default there is no limit. Each
    run counts by itself: what several runs send adds up. The strongest column is no limit: leaving
    it out of ``data.features`` is its remedy, not a narrower cut."""

    adversary: AdversarySettings | None = None
    """Red team: measure the leakage of the received gradients; ``null`` disables it."""

    answers: Annotated[AnswerSettings, Mark.MAY_CHANGE] = AnswerSettings()
    """Answers about rows for predictions with the trained model."""

    @property
    def split(self) -> SplitSettings | None:
        """The split of this party's rows; None if it does not learn which are common."""
        return None if self.contract.is_one_sided else self.contract.split

    @property
    def has_network(self) -> bool:
        return not (self.contract.is_one_shot and isinstance(self.bottom_model, PcaModel))

    def folder_name(self) -> str:
        """Return the name of this party's folder among a run's results."""
        return self.party if len(self.contract.passive_parties) > 1 else "passive"

    @model_validator(mode="after")
    def _needs_no_gradient_that_is_not_sent(self) -> "PassiveSettings":
        model, contract = self.bottom_model, self.contract
        if isinstance(model, ScoreModel) and contract.release is None:
            raise ValueError(
                "bottom_model.kind: a score is fitted to noisy labels or sums, and "
                "contract.release is null: agree on one with the label owner, or expected pca"
            )
        is_computed, others = isinstance(model, PcaModel), len(contract.passive_parties) > 1
        if contract.release and not others and not isinstance(model, ScoreModel):
            raise ValueError(
                f"contract.release: the label owner would be charged for {contract.release} that "
                f"nobody uses: expected bottom_model.kind score, got {model.kind}"
            )
        if contract.is_one_shot and is_computed and others and contract.aggregation == "mean":
            raise ValueError(
                "contract.aggregation: expected concat: bottom models that are not trained "
                "together have nothing in common whose mean could be taken"
            )
        is_fitted = is_computed or self.initial_weights is not None
        if isinstance(model, CustomModel):
            is_fitted |= bool(model.weights or model.frozen)
        if contract.is_one_shot and not is_fitted:
            raise ValueError(
                f"bottom_model.kind: {model.kind} learns from gradients, and contract.exchange: "
                f"one_shot sends none; expected pca or score, initial_weights, or custom with "
                f"weights or frozen"
            )
        return self

    @model_validator(mode="after")
    def _shows_plain_text_to_no_proxy(self) -> "PassiveSettings":
        if self.proxy is not None and isinstance(self.security, Insecure):
            raise ValueError("proxy: needs security.mode mtls; plain text may not use a proxy")
        return self

    @model_validator(mode="after")
    def _names_the_proxy_of_credentials(self) -> "PassiveSettings":
        if self.proxy_credentials is not None and self.proxy in {None, "environment"}:
            raise ValueError("proxy_credentials: needs proxy: http://HOST:PORT")
        return self

    @model_validator(mode="after")
    def _is_in_the_contract(self) -> "PassiveSettings":
        if self.party not in self.contract.passive_parties:
            raise ValueError(f"party: expected one of {list(self.contract.passive_parties)}")
        return self
