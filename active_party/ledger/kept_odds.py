"""The odds of a ledger's accounts as tensors, for checkpoints and account books."""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.defenses.exact_auc import auc_of_epsilon, gaussian_of_epsilon
from splitveil.active_party.ledger.bounds import NOT_GAUSSIAN, Caveats, Divergences
from splitveil.active_party.ledger.odds import GAUSSIAN, NOTHING, OF_ANY_KIND, ManyOdds, Odds

NAMES = frozenset({"odds", "odds_of", "current_odds"})
"""The tensors that hold them; a ledger from before there were any has none of these."""


def tensors_of(settled: ManyOdds, current: Odds) -> dict[str, Tensor]:
    """Return the tensors that ``odds_in`` reads.

    Args:
        settled: what is known of fresh noise and of earlier noise identities.
        current: what is known of the current noise identity.
    """
    return {
        "odds": torch.tensor(settled.table, dtype=torch.float64),
        "odds_of": torch.from_numpy(settled.kinds),
        "current_odds": torch.tensor(current, dtype=torch.float64),
    }


def odds_in(state: Mapping[str, Tensor], num_examples: int) -> tuple[ManyOdds, Odds]:
    """Return a copy of the odds that ``tensors_of`` was given.

    Raises:
        ValueError: they are not of this many examples, or no odds at all.
    """
    table, kinds, current = state["odds"], state["odds_of"], state["current_odds"]
    if (
        kinds.dtype != torch.int32
        or kinds.shape != (num_examples,)
        or table.shape != (len(table), len(Odds._fields))
        or current.shape != (len(Odds._fields),)
        or not bool(((kinds >= 0) & (kinds < len(table))).all())
        or not all(map(_are_odds, [*table.tolist(), current.tolist()]))
        or len(known := tuple(Odds(*row) for row in table.tolist())) > len(set(known))
    ):
        raise ValueError(f"odds: expected those of {num_examples} accounts")
    return ManyOdds(kinds.numpy().copy(), known), Odds(*current.tolist())


def odds_before(
    settled: Divergences, current: Divergences, caveats: Caveats, epsilon: float
) -> tuple[ManyOdds, Odds]:
    """Return what is known of the accounts of a ledger that did not keep it.

    Args:
        settled: divergences of fresh noise and of earlier noise identities, (examples,).
        current: divergences of the current noise identity, (examples,).
        caveats: what does not hold of each, (examples,).
        epsilon: label differential privacy of the current noise identity; infinite for none.
    """
    is_gaussian = (caveats & NOT_GAUSSIAN) == 0
    kinds = np.where(settled > 0, np.where(is_gaussian, 1, 2), 0).astype(np.int32)
    before = ManyOdds(kinds, (NOTHING, GAUSSIAN, OF_ANY_KIND))
    charged = current > 0
    if not charged.any():
        return before, NOTHING
    if math.isfinite(epsilon):
        # mu^2 exceeds a divergence by no more than itself.
        return before, Odds(auc_of_epsilon(epsilon), epsilon, gaussian_of_epsilon(epsilon) ** 2)
    return before, GAUSSIAN if bool(is_gaussian[charged].all()) else OF_ANY_KIND


def _are_odds(values: list[float]) -> bool:
    leak_auc, epsilon, excess = values
    return 0.5 <= leak_auc <= 1 and epsilon >= 0 and excess >= 0
