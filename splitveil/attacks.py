"""Attacks for programs: their names, their scores of one batch, and custom attacks.

    from splitveil import attacks, simulate

    def largest_entry(gradients):
        return gradients.flatten(1).abs().amax(dim=1)

    simulate("breast_cancer", attacks=["norm", "spectral", largest_entry])

``own`` gives an attack another name, or side information. `splitveil.audit` runs attacks on the
gradients of any trainer.
"""

from collections.abc import Mapping
from types import MappingProxyType

from splitveil.common.privacy.attacks import (
    ATTACKS,
    BUILT_IN_NAMES,
    Attack,
    Knowledge,
    SideInformation,
)
from splitveil.common.privacy.leakage import LeakInterval, leak_auc
from splitveil.common.privacy.settings import CustomAttack
from splitveil.common.privacy.stored_row_attacks import STORED_ROW_ATTACKS
from splitveil.library.choices import own_attack as own

__all__ = [
    "NAMES",
    "ON_BATCHES",
    "ON_STORED_ROWS",
    "Attack",
    "CustomAttack",
    "Knowledge",
    "LeakInterval",
    "SideInformation",
    "leak_auc",
    "own",
]

NAMES: tuple[str, ...] = BUILT_IN_NAMES
"""The names of all attacks: on single batches, and over a run."""

ON_BATCHES: Mapping[str, Attack] = MappingProxyType({str(n): one for n, one in ATTACKS.items()})
"""Name -> the attack on single batches: ``ON_BATCHES["spectral"].score(gradients, Knowledge())``
returns the scores, and ``needs`` says what `Knowledge` has to hold."""

ON_STORED_ROWS: Mapping[str, str] = STORED_ROW_ATTACKS
"""Name -> what it needs to know: attacks of `splitveil.audit` only, on a run's stored rows."""
