"""The settings that a party keeps to itself, as far as both kinds of party have them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag

from splitveil.common.data.settings import DataSettings, expand_path
from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import OptimizerSettings
from splitveil.common.party.credentials import CredentialFiles
from splitveil.common.run.contract import Contract
from splitveil.common.settings import Section, apply_overrides, named_kind, read_yaml, validate
from splitveil.common.storage.initial_weights import EarlierModel
from splitveil.common.text.addresses import usable

Address = Annotated[str, AfterValidator(usable)]


ALIGNMENT_ATTEMPTS = 3
"""How many times the largest set a peer may try, unless the settings say otherwise."""


class MutualTls(Section):
    """TLS 1.3 on which each party proves who it is; replaced files are read without a restart."""

    mode: Literal["mtls"] = "mtls"

    certificate: Path
    """PEM file with this party's own certificate first. Its subject alternative name carries the
    identity that the contract gives this party. Relative to this settings file, like the others."""

    private_key: Path
    """PEM file with its key, without a password; mode 0600 or stricter."""

    authority: Path
    """PEM file with the certificates of those who may have signed the peer's certificate."""


class Insecure(Section):
    """Plain text between the parties: for two processes of one machine, never beyond."""

    mode: Literal["insecure"]
    """Leaving the wire unprotected has to be asked for by name, and both ends be on loopback."""


SecuritySettings = Annotated[
    Annotated[MutualTls, Tag("mtls")] | Annotated[Insecure, Tag("insecure")],
    Discriminator(
        named_kind("mode", "mtls", "insecure"),
        custom_error_type="security_mode",
        custom_error_message="expected mode mtls or insecure",
    ),
]


class ReconnectSettings(Section):
    """How long a party waits for a silent or absent peer."""

    max_s: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds without the peer after which this party saves its model and gives up."""

    first_wait_s: float = Field(default=0.2, gt=0, le=60)
    """Seconds before the first new attempt; each further wait is twice as long."""

    longest_wait_s: float = Field(default=5.0, gt=0, le=600)
    """Longest wait between two attempts."""

    deadline_s: float = Field(default=120.0, gt=0, le=86_400)
    """Seconds that the peer has for the answer to one message."""


class PartySettings(Section):
    """What every party sets for itself."""

    contract: Contract
    """The shared contract: the path of its file, relative to this one."""

    data: DataSettings
    """This party's file and columns."""

    security: SecuritySettings
    """How the connection is protected."""

    optimizer: OptimizerSettings
    """How this party's half of the network learns."""

    device: Annotated[str, StringConstraints(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?)$")] = "auto"
    """``auto`` (the first GPU where there is one), ``cpu``, ``cuda`` or ``cuda:N``."""

    initial_weights: str | None = Field(default=None, min_length=1)
    """Folder with the model to begin with: this party's ``checkpoint`` in an earlier run, as
    ``runs/monday/active/checkpoint``. Relative to this settings file; ``~`` and ``${NAME}`` are
    replaced. What was fitted to the features then, vocabularies and scaling, comes with it; the
    optimizer begins anew. So does the active party's ledger without ``earlier_ledgers``."""

    model_seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights and of dropout. It has no influence on batches or noise."""

    torch_threads: int | None = Field(default=None, ge=1, le=1024)
    """Cores that this party computes on; by default all that the process may use."""

    alignment_workers: int = Field(default=0, ge=0, le=1024)
    """Worker processes for the alignment; 0 does its arithmetic in this process."""

    alignment_attempts: int = Field(default=ALIGNMENT_ATTEMPTS, ge=1, le=1000)
    """How many times ``contract.alignment.max_set_size`` ids the other party may try before a run
    has finished, over all exchanges of ids and all starts: whoever breaks exchanges off could try
    other ids each time. Also bounds the exchanges, at ten for each time."""

    reconnect: ReconnectSettings = ReconnectSettings()
    """How long to wait for a silent or absent peer."""

    transcript: bool = True
    """Whether to write down what crosses the wire: kind, step, size and digest of every message."""

    runs_dir: Path = Path("runs")
    """Folder of all runs, relative to where the command is started."""

    insecure_nonce_seed: int | None = Field(default=None, ge=0)
    """For tests only: makes this party's share of the joint seed predictable."""

    base_dir: Path = Field(default=Path(), exclude=True)
    """Folder of the settings file: relative paths in ``data`` start here."""

    def torch_device(self) -> torch.device:
        """Return the device to compute on.

        Raises:
            SettingsError: a GPU was asked for by name and there is none.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise SettingsError(
                f"device: {self.device} was asked for, but torch sees "
                f"{torch.cuda.device_count()} CUDA device(s)"
            )
        return device

    def earlier_model(self) -> EarlierModel | None:
        """Return the model to begin with, if there is one.

        Raises:
            SettingsError: it cannot be read.
        """
        if self.initial_weights is None:
            return None
        return EarlierModel.open(
            expand_path("initial_weights", self.initial_weights, self.base_dir)
        )

    def credential_files(self, party: str) -> CredentialFiles | None:
        """Return this party's certificate, key and authority; None for an insecure connection.

        Args:
            party: this party's name in the contract.
        """
        match self.security:
            case MutualTls() as tls:
                return CredentialFiles(
                    self.base_dir / tls.certificate,
                    self.base_dir / tls.private_key,
                    self.base_dir / tls.authority,
                    self.contract.identities[party],
                )
            case Insecure():
                return None

    def cores(self) -> int:
        """Return the number of cores that this party computes on."""
        return self.torch_threads or len(os.sched_getaffinity(0))


PartySettingsT = TypeVar("PartySettingsT", bound=PartySettings)


def load_party_settings(
    section: type[PartySettingsT], path: Path, overrides: Sequence[str] = ()
) -> PartySettingsT:
    """Read a party's settings file and the contract that it names.

    Args:
        section: the party's own kind of settings.
        path: the settings file.
        overrides: ``dotted.name=yaml`` each; ``contract.name=yaml`` changes the contract.

    Raises:
        SettingsError: with every problem of both files.
    """
    values = read_yaml(path)
    problems: list[str] = []
    own = [text for text in overrides if not text.startswith("contract.")]
    values = apply_overrides(values, own)
    contract, contract_problems = _load_contract(
        values.get("contract"), path, [t[len("contract.") :] for t in overrides if t not in own]
    )
    problems += contract_problems
    try:
        placeholder = contract or Contract(
            run_name="unreadable", cut_shape=(1,), batch_size=1, epochs=1
        )
        settings = validate(
            section, {**values, "contract": placeholder, "base_dir": path.parent}, str(path)
        )
    except SettingsError as error:
        problems += error.problems
    if problems:
        raise SettingsError(problems)
    return settings


def _load_contract(
    value: Any, settings_path: Path, overrides: Sequence[str]
) -> tuple[Contract | None, list[str]]:
    try:
        if isinstance(value, str):
            path = settings_path.parent / value
            return validate(Contract, apply_overrides(read_yaml(path), overrides), str(path)), []
        if isinstance(value, dict):
            values = apply_overrides(value, overrides)
            return validate(Contract, values, f"{settings_path}: contract"), []
    except SettingsError as error:
        return None, list(error.problems)
    return None, [f"{settings_path}: contract: expected the path of the contract's file"]
