"""The passive party's settings."""

from typing import Literal

from pydantic import Field, model_validator

from splitveil.common.data.settings import DataSettings
from splitveil.common.models.settings import ModelSettings
from splitveil.common.party.party_settings import Address, Insecure, PartySettings
from splitveil.common.privacy.attacks import ATTACKS, CUT
from splitveil.common.privacy.label_free import LABEL_FREE
from splitveil.common.privacy.settings import AuditSettings
from splitveil.common.wire.http_proxy import HttpProxy, proxy_of_environment


class AdversarySettings(AuditSettings):
    """The attacks that this party runs on the gradients it receives, to measure what they leak."""

    layers: tuple[str, ...] = Field(default=("cut", "first"), min_length=1)
    """``cut`` (the gradients as received), ``first`` (the bottom model's first layer), or the name
    of a submodule of the bottom model."""

    labels: DataSettings | None = None
    """File with evaluation labels that both sides know; without it there is no leak AUC here."""

    audit: bool = False
    """Whether to have the active party measure, after every epoch, the scores of those attacks that
    need no labels. Needs ``audits_allowed`` in the contract; the active party may still refuse."""

    @model_validator(mode="after")
    def _can_be_audited(self) -> "AdversarySettings":
        if self.audit and not set(self.attack_names) & set(LABEL_FREE):
            raise ValueError(f"audit: attacks names none of {', '.join(LABEL_FREE)}")
        return self

    @model_validator(mode="after")
    def _activations_are_of_the_cut(self) -> "AdversarySettings":
        unread = [
            name
            for name, attack in ATTACKS.items()
            if name in self.attacks and not attack.reads_gradients
        ]
        if unread and CUT not in self.layers:
            raise ValueError(f"{', '.join(unread)}: measured at the cut; name it in layers")
        return self

    @model_validator(mode="after")
    def _labels_have_a_column(self) -> "AdversarySettings":
        if self.labels is not None and self.labels.label_column is None:
            raise ValueError("labels.label_column: name the column that holds the labels")
        return self


class PassiveSettings(PartySettings):
    """What the feature owner sets, and shows to nobody."""

    party: str = "passive"
    """This party's name in the contract."""

    connect: Address = "127.0.0.1:50051"
    """Host and port of the active party."""

    proxy: Literal["environment"] | None = None
    """``environment``: connect through the HTTP proxy that ``grpc_proxy``, ``https_proxy`` or
    ``http_proxy`` names, but for the hosts in ``no_grpc_proxy`` or ``no_proxy``. With mTLS only. By
    default those variables are not looked at."""

    bottom_model: ModelSettings
    """The half of the network below the cut layer."""

    adversary: AdversarySettings | None = None
    """Red team: measure what the received gradients leak; ``null`` for none."""

    def folder_name(self) -> str:
        """Return the name of this party's folder among a run's results."""
        return self.party if len(self.contract.passive_parties) > 1 else "passive"

    def http_proxy(self) -> HttpProxy | None:
        """Return the proxy to connect through, None for a direct connection.

        Raises:
            SettingsError: what the environment names is no proxy of this kind.
        """
        return None if self.proxy is None else proxy_of_environment(self.connect)

    @property
    def audits(self) -> bool:
        """Whether the active party is to measure scores."""
        return self.adversary is not None and self.adversary.audit

    @model_validator(mode="after")
    def _audits_only_where_allowed(self) -> "PassiveSettings":
        if self.audits and not self.contract.audits_allowed:
            raise ValueError("adversary.audit needs contract.audits_allowed")
        return self

    @model_validator(mode="after")
    def _shows_plain_text_to_no_proxy(self) -> "PassiveSettings":
        if self.proxy is not None and isinstance(self.security, Insecure):
            raise ValueError("proxy: needs security.mode mtls; plain text goes through no proxy")
        return self

    @model_validator(mode="after")
    def _is_in_the_contract(self) -> "PassiveSettings":
        if self.party not in self.contract.passive_parties:
            raise ValueError(f"party: the contract lists {list(self.contract.passive_parties)}")
        return self
