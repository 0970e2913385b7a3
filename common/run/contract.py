"""The contract: everything that the parties must agree on before anything else happens.

All parties hold the same file. At the handshake its canonical form is compared field by field.
Everything that is not in it is private to one party.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, StringConstraints, Tag, field_validator, model_validator

from splitveil.common.errors import ContractMismatch
from splitveil.common.run.id_rules import AS_WRITTEN, IdRules
from splitveil.common.settings import Mark, Section, kind_by_field
from splitveil.common.text.visible_text import visible

CutDtype = Literal["float32", "float16", "bfloat16"]
Aggregation = Literal["mean", "sum", "concat"]
PipelineDepth = Literal[1, 2, 4]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]

DnsName = Annotated[
    str,
    StringConstraints(
        to_lower=True, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$"
    ),
]

PASSIVE_PARTIES = 8  # the most passive parties that one run can have
NAME_CHARACTERS = 64  # the most characters that `Name` allows in the name of a party or a run
_OTHER_FIELDS = "(other fields)"
_IDS = "ids"
_PURPOSE = "purpose"
_SHOWN_CHARACTERS = 60
_ABSENT = "nothing"

ACTIVE = "active"  # name of the active party; the passive parties choose theirs
MAX_CUT_DIM = 2**24
"""64 MiB of float32 for each example: far beyond any cut layer, and far below what overflows."""

TRANSFER_ROWS = 2**13  # rows of one message of an oblivious transfer
MAX_TRANSFER_BYTES = 2**28
"""The most bytes of one, or of the reply to it: 4 MiB for 128 bits and each score."""
_MOST_SUMMED = 63

DTYPE_BYTES: dict[CutDtype, int] = {"float32": 4, "float16": 2, "bfloat16": 2}


class AlignmentSettings(Section):
    """Private set intersection by elliptic-curve Diffie-Hellman."""

    kind: Literal["mutual", "one_sided"] = "mutual"
    """The parties that learn the common ids.

    ``mutual``: all. ``one_sided``: the active party alone, in a one-shot run without a ``release``
    with one passive party, which fits its model to all rows of its own table, and serves them all,
    sealed: the active party opens the rows whose ids it has."""

    min_aligned: int = Field(default=100, ge=1)
    """Fewest ids that the parties must have in common; with fewer, the run ends."""

    max_set_size: int = Field(default=10_000_000, ge=1, le=2**31)
    """Most ids that either party may bring to one exchange. Each party limits the total over all
    exchanges by its own ``alignment_attempts``."""

    buckets: int = Field(default=1, ge=1, le=1024)
    """Number of parts of the exchange of ids, one after another; a hash assigns each id to a part.
    Besides the ids, memory holds one part at a time. Padding hides how many ids are in each, and
    counts for ``max_set_size``: 1.6 % with 250,000 ids in each."""


class HashSplit(Section):
    """Rows are split by a hash of their id, keyed with the joint seed."""

    kind: Literal["hash"] = "hash"

    train: float = Field(default=0.8, gt=0, lt=1)
    """Share of the aligned rows used for training."""

    validation: float = Field(default=0.0, ge=0, lt=1)
    """Share that early stopping looks at; 0 without early stopping."""

    test: float = Field(default=0.2, gt=0, lt=1)
    """Share that the final figures are measured on."""

    @model_validator(mode="after")
    def _shares_add_up(self) -> "HashSplit":
        total = self.train + self.validation + self.test
        if not math.isclose(total, 1.0, abs_tol=1e-9):
            raise ValueError(f"train + validation + test must be 1, not {total:g}")
        return self


class ColumnSplit(Section):
    """Rows are split by the value of a column, for example one derived from each row's date."""

    kind: Literal["column"]

    column: str = Field(min_length=1)
    """Column with ``train``, ``validation`` or ``test`` in each row. Every party's table has it,
    and all tables must agree on the common rows, or the run ends. With a one-sided alignment, only
    the active party's has it. It is never used as a feature."""


SplitSettings = Annotated[
    Annotated[HashSplit, Tag("hash")] | Annotated[ColumnSplit, Tag("column")],
    kind_by_field("kind", "hash", "column", error_type="split_kind"),
]


class LearningRateSchedule(Section):
    """The course of both parties' learning rates over the run, in lockstep."""

    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises linearly to its full value, at most half the run."""

    decay: Literal["none", "cosine"] = "none"
    """Fall of the learning rate afterwards, up to the last step of the contract's epochs."""

    def factor(self, step: int, total_steps: int) -> float:
        """Return the multiplier of the learning rate at a step counted over the run, from 0."""
        warmup = min(self.warmup_steps, total_steps // 2)
        if step < warmup:
            return (step + 1) / warmup
        if self.decay == "none":
            return 1.0
        progress = (step - warmup) / max(total_steps - warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


class Contract(Section):
    """Everything that the parties hold in common."""

    unchunked_bytes: ClassVar = 4 * 1024 * 1024  # tensors up to this size travel in one message
    chunk_bytes: ClassVar = 1024 * 1024  # larger ones in chunks of this size

    protocol_version: Literal[1] = 1
    """Version of the rules in ``protos/split_learning.proto``."""

    run_name: Annotated[Name, Mark.PER_RUN]
    """Name of the run, and of its folder at every party."""

    passive_parties: tuple[Name, ...] = Field(
        default=("passive",), min_length=1, max_length=PASSIVE_PARTIES
    )
    """The passive parties, in the order of their cut layers."""

    aggregation: Aggregation = "mean"
    """Combination of several passive parties' activations into the top model's input: their
    ``mean``, their ``sum``, or their concatenation along the first dimension (``concat``)."""

    identities: dict[Name, DnsName] = Field(default_factory=dict)
    """DNS name that each party's certificate carries, by the party's name; the active party is
    named ``active``. The default is the party's name followed by ``.splitveil``. It is only
    compared with the certificate, and never looked up."""

    cut_shape: tuple[PositiveInt, ...] = Field(min_length=1, max_length=4)
    """Shape of one example's activation at the cut layer, the same for every passive party: up to
    16,777,216 values."""

    cut_dtype: CutDtype = "float32"
    """Element type of activations and gradients on the wire."""

    exchange: Literal["gradients", "one_shot"] = "gradients"
    """Messages of the parties after the alignment.

    ``gradients``: activations up and defended gradients down, in every epoch. ``one_shot``: the
    activation of each common row once, and no gradient; the bottom model is fitted without labels,
    or to a ``release``, and the active party trains the top model by itself afterwards."""

    release: Literal["noisy_labels", "noisy_sums"] | None = None
    """Release that begins a one-shot run, so that a bottom model of ``kind: score`` can be fitted
    to it; the active party's ``defense: noisy_label`` draws the noise.

    ``noisy_labels``: a noisy label of each training row. ``noisy_sums``: sums, with noise, of the
    training rows' labels over bits of the passive party's columns, which the active party does not
    learn; with one passive party. ``null``: nothing that depends on a label is sent."""

    scores: int = Field(default=1, ge=1)
    """Scores that may be fitted to the release: of K classes K - 1, otherwise one."""

    batch_size: int = Field(ge=1, le=1_048_576)
    """Examples per training step."""

    evaluation_batch_size: int = Field(default=4096, ge=1, le=1_048_576)
    """Examples per message of an evaluation."""

    epochs: int = Field(default=20, ge=1, le=100_000)
    """Passes over the training rows, in a run with gradients."""

    pipeline_depth: PipelineDepth = 1
    """Activations that a passive party has sent before it receives the gradient of the first of
    them. With 1, each activation is computed with the weights after the gradient before it. With 2
    or 4, the line works while both parties compute, and an activation is computed with weights that
    lack the last 1 or 3 gradients; each gradient still belongs to the weights of its activation.
    ``check --connect`` says how many steps per second the line allows with each."""

    drop_last: bool = False
    """Leave out an epoch's last batch if it is smaller than ``batch_size``."""

    split: SplitSettings = HashSplit()
    """Division of the aligned rows into training, validation and test rows."""

    schedule: LearningRateSchedule = LearningRateSchedule()
    """Course of both learning rates over the run."""

    alignment: AlignmentSettings = AlignmentSettings()
    """Method of finding the common ids."""

    ids: IdRules = Field(default=tuple(AS_WRITTEN), validate_default=False)
    """Rules that bring all parties' ids into the form that is compared, for each column that
    ``data.id_column`` names, in the same order."""

    checkpoint_steps: PositiveInt = 500
    """Training steps between two checkpoints that all parties save; every epoch ends with another
    one. After a crash, everything since the last checkpoint that they have in common is done again.
    Each party keeps its three newest ones."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_identities(cls, values: Any) -> Any:
        # Filled in here, so that both parties' canonical forms name them all.
        if not isinstance(values, dict):
            return values
        given, passive = values.get("identities", {}), values.get("passive_parties", ("passive",))
        if not isinstance(given, dict) or not isinstance(passive, list | tuple):
            return values
        defaults = {str(name): f"{name}.splitveil" for name in (ACTIVE, *passive)}
        return {**values, "identities": {**defaults, **given}}

    @model_validator(mode="after")
    def _every_party_has_an_identity_of_its_own(self) -> "Contract":
        if ACTIVE in self.passive_parties:
            raise ValueError(f"passive_parties: {ACTIVE!r} is the other party's name")
        if len(set(self.passive_parties)) < len(self.passive_parties):
            raise ValueError("passive_parties: two have the same name")
        unknown = self.identities.keys() - {ACTIVE, *self.passive_parties}
        if unknown:
            raise ValueError(f"identities: unknown party {', '.join(sorted(unknown))}")
        if len(set(self.identities.values())) < len(self.identities):
            raise ValueError("identities: two parties have the same identity")
        return self

    @model_validator(mode="after")
    def _labels_are_of_one_shot(self) -> "Contract":
        if self.release is not None and not self.is_one_shot:
            raise ValueError("release: only a run with exchange: one_shot begins with one")
        if self.releases_sums and len(self.passive_parties) > 1:
            raise ValueError("release: noisy_sums needs a single passive party")
        if self.releases_sums and self.scores > _MOST_SUMMED:
            raise ValueError(
                f"scores: noisy_sums has at most {_MOST_SUMMED}: expected noisy_labels"
            )
        if self.scores > self.cut_dim:
            raise ValueError(f"cut_shape: {self.scores} scores need at least {self.scores} values")
        if not self.is_one_sided:
            return self
        if not self.is_one_shot:
            raise ValueError("alignment.kind: one_sided needs exchange: one_shot")
        if self.release is not None:
            raise ValueError(
                f"alignment.kind: one_sided, and {self.release} would name the common rows to the "
                f"passive party: expected release: null, or alignment.kind: mutual"
            )
        if len(self.passive_parties) > 1:
            raise ValueError("alignment.kind: one_sided needs a single passive party")
        return self

    @field_validator("cut_shape")
    @classmethod
    def _is_a_tensor_s_shape(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        if math.prod(shape) > MAX_CUT_DIM:
            raise ValueError(f"expected at most {MAX_CUT_DIM:,} values in one example's activation")
        return shape

    @property
    def is_one_shot(self) -> bool:
        """Whether each common row's activation is sent once, and no gradient."""
        return self.exchange == "one_shot"

    @property
    def releases_sums(self) -> bool:
        """Whether the run begins with noisy sums."""
        return self.release == "noisy_sums"

    @property
    def is_one_sided(self) -> bool:
        """Whether the passive party does not learn which ids are common."""
        return self.alignment.kind == "one_sided"

    @property
    def cut_dim(self) -> int:
        """Number of values in one example's activation."""
        return math.prod(self.cut_shape)

    @property
    def aggregate_shape(self) -> tuple[int, ...]:
        """Shape of the top model's input for one example."""
        if self.aggregation != "concat":
            return self.cut_shape
        return (self.cut_shape[0] * len(self.passive_parties), *self.cut_shape[1:])

    @property
    def max_rows(self) -> int:
        """The most rows that one tensor on the wire may have."""
        return max(self.batch_size, self.evaluation_batch_size)

    @property
    def max_message_bytes(self) -> int:
        """Size of the largest message that either party has a reason to send."""
        tensor_bytes = self.max_rows * self.cut_dim * DTYPE_BYTES[self.cut_dtype]
        if self.releases_sums:
            tensor_bytes = MAX_TRANSFER_BYTES
        return max(min(tensor_bytes, self.unchunked_bytes), self.chunk_bytes) + 65536

    def canonical_json(self) -> str:
        """Return the text that represents this contract on the wire."""
        return json.dumps(self._agreed_values(), sort_keys=True, separators=(",", ":"))

    def digest(self) -> bytes:
        """Return the SHA-256 of the canonical form, 32 bytes."""
        return hashlib.sha256(self.canonical_json().encode()).digest()

    def fields_differing_from(self, canonical: str) -> list[str]:
        """Name the fields where another party's canonical form differs from this contract.

        Only names of this contract's own fields are returned. Anything else in the text, or a text
        that is not a contract at all, is summed up as "(other fields)".
        """
        if canonical == self.canonical_json():
            return []
        try:
            other = json.loads(canonical)
        except (ValueError, RecursionError):
            return [_OTHER_FIELDS]
        # Texts that differ for equal values, such as 1 and true, are not canonical either.
        own = self._agreed_values()
        if isinstance(other, dict):  # else a party that leaves them out cannot name them
            own |= {name: None for name in (_IDS, _PURPOSE) if name in other and name not in own}
        names = dict.fromkeys(_differing(own, other))
        return list(names) or [_OTHER_FIELDS]

    def _agreed_values(self) -> dict[str, Any]:
        # One party's cut layer is its own mean, sum and concatenation: nothing to agree on.
        left_out = {"aggregation"} if len(self.passive_parties) == 1 else set()
        if self.ids == AS_WRITTEN:  # keeps the digests from before there were rules
            left_out.add(_IDS)
        return self.model_dump(mode="json", exclude=left_out)


class AlignmentContract(Contract):
    """The contract of a run that ends with the alignment.

    A party that is to train refuses it, and the other way round.
    """

    purpose: Literal["alignment"] = "alignment"

    @classmethod
    def of(cls, contract: Contract) -> Self:
        """Return the contract of a run that only aligns, for one that trains."""
        return cls.model_validate(contract.model_dump())


def _differing(own: dict[str, Any], other: Any, prefix: str = "") -> Iterator[str]:
    """Name the fields that differ, descending only where this party has fields of its own.

    The other side's nesting is the peer's choice: names built from it could fill the memory.
    """
    others = other if isinstance(other, dict) else {}
    for name, value in own.items():
        if isinstance(value, dict):
            yield from _differing(value, others.get(name), f"{prefix}{name}.")
        elif name not in others or others[name] != value:
            yield prefix + name
    if others.keys() - own.keys():
        yield _OTHER_FIELDS


def check_same_contract(own: Contract, canonical: str, others_name: str) -> None:
    if fields := own.fields_differing_from(canonical):
        raise ContractMismatch(fields, first_difference(own, canonical, others_name))


def first_difference(own: Contract, canonical: str, others_name: str) -> str:
    """Return a sentence about the first field that differs in any text; empty if none does."""
    fields = own.fields_differing_from(canonical)
    if not fields:
        return ""
    name, *others = fields
    ours = _shown(json.loads(own.canonical_json()), name)
    try:
        theirs = _shown(json.loads(canonical), name)
    except (ValueError, RecursionError):
        return f"what {others_name} holds is no contract"
    also = f"; also different: {', '.join(others)}" if others else ""
    return f"contract.{name}: {ours} here, {theirs} at {others_name}{also}"


def _shown(value: Any, name: str) -> str:
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return in_short(value)


def in_short(value: Any) -> str:
    text = visible(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
