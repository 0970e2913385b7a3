"""Private settings common to both kinds of party."""

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, Tag, ValidationError

from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import SettingsError
from splitveil.common.models.settings import AdamOptimizer, OptimizerSettings
from splitveil.common.run.contract import Contract, SplitSettings
from splitveil.common.settings import (
    Mark,
    Section,
    apply_overrides,
    kind_by_field,
    read_yaml,
    validate,
)
from splitveil.common.text.addresses import usable
from splitveil.common.text.log_lines import add_to_log_lines
from splitveil.common.text.wording import suggest

Address = Annotated[str, AfterValidator(usable)]


_DEVICE = r"^(auto|cpu|cuda(:[0-9]{1,2})?)$"


def _known_device(value: object) -> object:
    if isinstance(value, str) and not re.match(_DEVICE, value):
        meant = "cuda" if "gpu" in value.lower() else value
        raise ValueError(f"expected auto, cpu, cuda or cuda:N{suggest(meant, ('cuda', 'cpu'))}")
    return value


Device = Annotated[str, StringConstraints(pattern=_DEVICE), BeforeValidator(_known_device)]


ALIGNMENT_ATTEMPTS = 3
"""Default number of times that a peer may try the largest set."""


class KeyPair(Section):
    """A certificate with its key; replaced files are used without a restart."""

    certificate: Annotated[Path, Mark.PATH]
    """PEM file with this party's own certificate first. The path is relative to this settings file,
    like the others."""

    private_key: Annotated[Path, Mark.PATH]
    """PEM file with the certificate's key, without a password; mode 0600 or stricter."""


class MutualTls(KeyPair):
    """TLS 1.3 with certificates on both sides; replaced files are reloaded without a restart.

    The certificate's subject alternative name carries the identity that the contract gives this
    party.
    """

    mode: Literal["mtls"] = "mtls"

    authority: Annotated[Path, Mark.PATH]
    """PEM file with the certificates of the authorities that may have signed the peer's
    certificate."""


class Insecure(Section):
    """Plain text between the parties, only for processes on one machine.

    It must be requested by name, and both ends must be on loopback.
    """

    mode: Literal["insecure"]


SecuritySettings = Annotated[
    Annotated[MutualTls, Tag("mtls")] | Annotated[Insecure, Tag("insecure")],
    kind_by_field("mode", "mtls", "insecure", error_type="security_mode"),
]


class IdLimit(Section):
    """The ids about which a party answers, and how fast."""

    allowed_ids: Annotated[str | None, Mark.PATH] = Field(default=None, min_length=1)
    """File with the ids that are answered: a text file with one id per line, or a CSV or Parquet
    file with the column ``data.id_column``. All others are answered as unknown, and nobody else is
    asked for them. Relative to this settings file; ``~`` and ``${NAME}`` are replaced. By default
    all are answered."""

    ids_per_second: float | None = Field(default=None, gt=0)
    """The most ids per second that are answered on average: by ``answers`` over all connections,
    where faster requests wait, and by ``serving`` to each program, where one second's number may be
    asked for at once and more is refused. By default there is no limit."""


class ReconnectSettings(Section):
    """Waiting times for a silent or absent peer.

    An absent one is tried again after 0.2 s, and then after twice as long each time, up to 1 s.
    """

    max_s: float = Field(default=300.0, gt=0, le=86_400)
    """Seconds without the peer before this party saves its model and gives up."""

    deadline_s: float = Field(default=120.0, gt=0, le=86_400)
    """Seconds within which the peer must answer a message."""


class PartySettings(Section):
    """The settings that every party has."""

    contract: Contract
    """The shared contract: the path of its file, relative to this file."""

    data: DataSettings
    """This party's file and columns."""

    security: Annotated[SecuritySettings, Mark.MAY_CHANGE]
    """Protection of the connection."""

    optimizer: OptimizerSettings = AdamOptimizer(kind="adam")
    """Optimizer of this party's half of the network."""

    device: Annotated[Device, Mark.MAY_CHANGE] = "auto"
    """``auto`` (the first GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``."""

    initial_weights: Annotated[str | None, Mark.PATH] = Field(default=None, min_length=1)
    """Folder with the model to start from: this party's ``checkpoint`` in an earlier run, such as
    ``runs/monday/active/checkpoint``. Relative to this settings file; ``~`` and ``${NAME}`` are
    replaced. The vocabularies and scaling that were fitted in that run are reused. The optimizer
    starts over."""

    model_seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights and of dropout. It has no influence on batches or noise."""

    torch_threads: Annotated[int | None, Mark.MAY_CHANGE] = Field(default=None, ge=1, le=1024)
    """Number of cores that this party computes on; by default all that the process may use."""

    autocast: Literal["bfloat16"] | None = None
    """Number format of matrix products and convolutions while this party's model trains; by
    default float32. ``bfloat16`` is about twice as fast on GPUs and processors that have it.
    Weights, gradients at the cut layer, defenses, evaluations and predictions stay float32."""

    compile: bool = False
    """Compile the computation of training batches by this party's model with torch. The first batch
    then takes seconds to minutes; needs a C++ compiler, or for a GPU Triton and a C compiler."""

    deterministic: Annotated[bool, Mark.MAY_CHANGE] = True
    """Use only algorithms on a GPU that give the same bits each time, as resuming a run requires.
    ``false`` may be faster, and allows operations of a model of your own that have no such
    algorithm; a run that stops then mostly cannot be resumed, because what comes again would
    differ, which is refused. A CPU always repeats its bits."""

    alignment_attempts: Annotated[int, Mark.MAY_CHANGE] = Field(
        default=ALIGNMENT_ATTEMPTS, ge=1, le=1000
    )
    """Number of ids that the other party may try before a run has finished, in multiples of
    ``contract.alignment.max_set_size``, over all exchanges of ids and all restarts: a peer that
    aborts exchanges could try other ids each time. It also bounds the number of exchanges, at ten
    per attempt."""

    reconnect: Annotated[ReconnectSettings, Mark.MAY_CHANGE] = ReconnectSettings()
    """Waiting times for a silent or absent peer.

    An absent one is tried again after 0.2 s, and then after twice as long each time, up to 1 s.
    """

    transcript: Annotated[bool, Mark.MAY_CHANGE] = True
    """Record what crosses the wire: kind, step, size and digest of every message."""

    status: Annotated[Address | None, Mark.MAY_CHANGE] = None
    """Address of an HTTP endpoint for those who operate this party, such as ``127.0.0.1:9464``:
    ``/healthz``, ``/readyz`` and ``/metrics`` for Prometheus. By default there is none. It has
    neither password nor encryption, so that an address other than one on loopback needs a firewall.
    On loopback, a request's header ``Host`` has to be ``localhost``, an IP address, or this host.
    """

    runs_dir: Annotated[Path, Mark.MAY_CHANGE, Mark.PER_RUN] = Path("runs")
    """Folder of all runs, relative to the command's working directory."""

    insecure_nonce_seed: Annotated[int | None, Mark.HIDDEN, Mark.SEED] = Field(default=None, ge=0)
    """For tests only: makes this party's share of the joint seed predictable."""

    base_dir: Path = Field(default=Path(), exclude=True)
    """Folder of the settings file, the base of relative paths in ``data``."""

    @property
    def split(self) -> SplitSettings | None:
        """The split of this party's rows; None if it does not learn which are common."""
        return self.contract.split

    @property
    def has_network(self) -> bool:
        """Whether this party's half of the model is a network, for which torch is imported."""
        return True

    def run_folder(self, party: str) -> Path:
        return self.runs_dir / self.contract.run_name / party


PartySettingsT = TypeVar("PartySettingsT", bound=PartySettings)


def load_settings(
    section: type[PartySettingsT], arguments: argparse.Namespace, party: str
) -> PartySettingsT:
    """Read the settings of a command; from then on lines of the log name the run."""
    overrides = [text.removeprefix(f"{party}.") for text in arguments.overrides]
    if arguments.runs is not None:
        overrides.append(f"runs_dir={arguments.runs}")
    settings = load_party_settings(section, arguments.settings, overrides)
    add_to_log_lines(run=settings.contract.run_name)
    return settings


def load_party_settings(
    section: type[PartySettingsT], path: Path, overrides: Sequence[str] = ()
) -> PartySettingsT:
    """Read a party's settings file and the contract that it names.

    Overrides have the form ``dotted.name=yaml``; ``contract.name=yaml`` changes the contract. A
    SettingsError lists every problem of both files.
    """
    values = read_yaml(path)
    problems: list[str] = []
    own = [text for text in overrides if not text.startswith("contract.")]
    values = apply_overrides(values, own)
    given, of_contract = (
        values.get("contract"),
        [t.removeprefix("contract.") for t in overrides if t not in own],
    )
    # Stands in for one that cannot be read, so that all problems are named at once.
    contract = Contract(run_name="unreadable", cut_shape=(1,), batch_size=1, epochs=1)
    read: dict[str, Any] = {}
    try:
        if isinstance(given, str):
            agreed = path.parent / given
            read = apply_overrides(read_yaml(agreed), of_contract)
            contract = validate(Contract, read, str(agreed))
        elif isinstance(given, dict):
            read = apply_overrides(given, of_contract)
            contract = validate(Contract, read, f"{path}: contract")
        else:
            problems.append(f"{path}: contract: expected the path of the contract's file")
    except SettingsError as error:
        problems += error.problems
        for name, value in read.items():  # what is right in it decides what else is
            with suppress(ValidationError):
                contract = Contract.model_validate(dict(contract) | {name: value})
    try:
        settings = validate(
            section, {**values, "contract": contract, "base_dir": path.parent}, str(path)
        )
    except SettingsError as error:
        problems += error.problems
    if problems:
        raise SettingsError(problems)
    return settings
