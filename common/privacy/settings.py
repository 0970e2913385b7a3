"""The settings of an audit: which attacks run, and how often."""

from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from splitveil.common.privacy.attacks import (
    ATTACKS,
    BUILT_IN_NAMES,
    RUN_ATTACKS,
    AttackName,
    SideInformation,
)
from splitveil.common.settings import Section
from splitveil.common.text.wording import suggest

DEFAULT_ATTACKS: tuple[AttackName, ...] = (
    "norm",
    "cosine",
    "spectral",
    "residual_energy",
    "accumulated_spectral",
    "accumulated_residual_energy",
    "accumulated_cosine",
)

_TAKEN_NAMES = (*BUILT_IN_NAMES, "random")
"""Names that a user-defined attack may not have: metrics hold other figures under them."""

_Need = Literal["positive_gradient", "positives_are_fewer", "hints", "classes", "activations"]


class CustomAttack(Section):
    """A user-defined attack on single batches.

    It is called as ``score(gradients, **side_information)`` with a tensor (rows, ...) and returns
    one number per row, (rows,), higher for rows that look more like positives.
    """

    kind: Literal["custom"]

    module: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    """The function, as ``package.module:function``."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
    """Name of its figures in metrics, summary and report: letters, digits, _ and -."""

    needs: tuple[_Need, ...] = ()
    """Side information that it uses. Each kind but the second is handed over as a keyword argument.

    ``positive_gradient``: one clean gradient of a positive (evaluation only).
    ``positives_are_fewer``: it takes the minority for the positives; nothing is handed over.
    ``hints``: gradients of ``num_hints`` known positives of the batch, (hints, ...).
    ``classes``: other gradients with their labels, as ``classes.negatives`` and
    ``classes.positives``, (rows, ...) each (evaluation only); not together with other kinds.
    ``activations``: the passive party's own, (rows, ...); not for the leak monitor.
    """

    num_hints: int = Field(default=1, ge=1, le=64)
    """Number of known positives, for an attack that needs ``hints``."""

    @property
    def side_information(self) -> frozenset[SideInformation]:
        return frozenset(SideInformation[need.upper()] for need in self.needs)

    @field_validator("name")
    @classmethod
    def _is_not_taken(cls, name: str) -> str:
        if name in _TAKEN_NAMES:
            raise ValueError("this name is taken; choose another")
        return name

    @model_validator(mode="after")
    def _needs_fit_together(self) -> Self:
        if len(set(self.needs)) < len(self.needs):
            raise ValueError("needs: each kind of side information may be named once")
        if "classes" in self.needs and len(self.needs) > 1:
            raise ValueError("needs: classes cannot be combined with other side information")
        # Not only where it is written: resolved settings, which may be read again, write defaults.
        if self.num_hints > 1 and "hints" not in self.needs:
            raise ValueError("num_hints: name hints in needs, too")
        return self


def _kind_of_attack(value: object) -> str | None:
    if isinstance(value, dict | CustomAttack):
        return "custom"
    return "name" if isinstance(value, str) else None


def _known_name(value: object) -> object:
    if isinstance(value, str) and value not in BUILT_IN_NAMES:
        others = f" (there are: {', '.join(BUILT_IN_NAMES)}; or a section with kind: custom)"
        raise ValueError(f"there is no such attack{suggest(value, BUILT_IN_NAMES) or others}")
    return value


AttackChoice = Annotated[
    Annotated[AttackName, Tag("name")] | Annotated[CustomAttack, Tag("custom")],
    Discriminator(
        _kind_of_attack,
        custom_error_type="attack",
        custom_error_message="expected the name of an attack, or a section with kind: custom",
    ),
    BeforeValidator(_known_name),
]
"""The name of a built-in attack, or the section of a user-defined one."""


class AuditSettings(Section):
    """Attacks that a party runs against the gradients it sends or receives."""

    attacks: tuple[AttackChoice, ...] = Field(default=DEFAULT_ATTACKS, min_length=1)
    """The attacks that score every audited batch, or accumulate over the run's epochs: names, or
    sections with ``kind: custom``."""

    max_cpu_share: float | None = Field(default=0.03, gt=0, le=1)
    """Largest share of the party's CPU time that the audit may take; ``null`` for no limit.

    Beyond it, batches are left out and counted, so that training is hardly slowed down. Attacks
    that accumulate over a run then see only some batches, and understate what a peer that keeps all
    of them can learn. One second of CPU time is allowed on top, so that short runs are measured
    completely.

    Up to 8 batches wait for the audit, without a limit up to 1,024; further ones are left out. The
    passive party's checkpoints, and so the training, wait for those. The active party's never do,
    because how long attacks take depends on labels: if its process is killed, it may lose them.
    """

    convention: Literal["leak", "paper"] = "leak"
    """Figure of a batch: ``leak`` is max(AUC, 1 - AUC) over the examples whose class the
    attack does not know. ``paper``, for two classes, is the AUC over all examples, as in the
    notebooks of Marvell's authors, with whose figures it can be compared; the leak alarm
    judges max(AUC, 1 - AUC) of all examples then."""

    @property
    def attack_names(self) -> tuple[str, ...]:
        return tuple(one.name if isinstance(one, CustomAttack) else one for one in self.attacks)

    @property
    def custom_attacks(self) -> tuple[CustomAttack, ...]:
        return tuple(one for one in self.attacks if isinstance(one, CustomAttack))

    @property
    def needs_predictions(self) -> bool:
        """True if an attack needs the model's predictions."""
        needs = [attack.needs for name, attack in ATTACKS.items() if name in self.attacks]
        needs += [attack.needs for name, attack in RUN_ATTACKS.items() if name in self.attacks]
        return any(SideInformation.PREDICTIONS in kinds for kinds in needs)

    @property
    def batch_attack_needs(self) -> dict[str, frozenset[SideInformation]]:
        """Name of each attack on single batches -> the side information that it needs."""
        named = {
            str(name): attack.needs for name, attack in ATTACKS.items() if name in self.attacks
        }
        return named | {one.name: one.side_information for one in self.custom_attacks}

    @model_validator(mode="after")
    def _can_run_each_attack_once(self) -> Self:
        if len(set(self.attack_names)) < len(self.attacks):
            raise ValueError("each attack may be named once")
        return self
