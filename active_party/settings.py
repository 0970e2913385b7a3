"""The active party's settings."""

from pydantic import Field, model_validator

from active_party.defenses import DefenseSettings
from common.models.settings import ModelSettings
from common.party_settings import Address, PartySettings
from common.privacy.settings import AuditSettings
from common.settings import Section


class EarlyStopping(Section):
    """End the run when the validation AUC no longer rises."""

    patience_epochs: int = Field(default=3, ge=1)
    """Epochs without a better validation AUC after which the run ends."""

    min_gain: float = Field(default=0.0, ge=0, lt=1)
    """Smallest rise of the AUC that counts as better."""


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

    leak_monitor: AuditSettings | None = AuditSettings()
    """Attacks that this party runs on its own defended gradients; ``null`` for none."""

    early_stopping: EarlyStopping | None = None
    """When to stop before the contract's last epoch. The peer then learns when the run ends."""

    @model_validator(mode="after")
    def _needs_what_it_uses(self) -> "ActiveSettings":
        if self.data.label_column is None:
            raise ValueError("data.label_column: the active party's data need a label column")
        if self.early_stopping is not None and self.contract.split.validation == 0:
            raise ValueError("early_stopping needs contract.split.validation > 0")
        return self
