"""How several passive parties' activations become one, and how its gradient becomes theirs.

The top model sees one activation, the aggregate, whatever number of parties it is made of; what is
defended is the gradient of the aggregate, once. Each party's gradient then follows from it by the
chain rule, which knows no labels: the aggregate is linear in every party's activation. So parties
that put their gradients together know the defended gradient of the aggregate and no more, whatever
the defense, and what the ledger charges for it bounds all of them together.

Noise drawn for each party on its own would be independent for each of them, and parties that put
their gradients together would average it out: with n parties the divergence is n times each one's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitveil.active_party.defenses import DefendedGradient
from splitveil.common.run.contract import Aggregation


def aggregate(rule: Aggregation, activations: Sequence[Tensor]) -> Tensor:
    """Put the parties' activations together.

    Args:
        rule: mean, sum or concatenation along the first dimension of the cut.
        activations: of one batch, in the contract's order of parties, (batch, *cut_shape) each.

    Returns:
        (batch, *aggregate_shape): of one party its own, of several float32.
    """
    if len(activations) == 1:
        return activations[0]
    values = [activation.to(torch.float32) for activation in activations]
    match rule:
        case "mean":
            return torch.stack(values).mean(dim=0)
        case "sum":
            return torch.stack(values).sum(dim=0)
        case "concat":
            return torch.cat(values, dim=1)


def parts_of(rule: Aggregation, defended: DefendedGradient, parties: int) -> list[DefendedGradient]:
    """Return each party's part of the aggregate's gradient, in the contract's order.

    Args:
        rule: how the aggregate came about.
        defended: gradient of the aggregate, (batch, *aggregate_shape).
        parties: how many there are.
    """
    if parties == 1:
        return [defended]
    match rule:
        case "mean":
            return [DefendedGradient(defended / parties)] * parties
        case "sum":
            return [defended] * parties
        case "concat":
            return [DefendedGradient(part) for part in defended.chunk(parties, dim=1)]
