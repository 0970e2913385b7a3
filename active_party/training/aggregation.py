"""Aggregation of several passive parties' activations, and division of the aggregate's gradient.

The top model sees one activation, the aggregate, however many parties contribute to it, and the
gradient of the aggregate is defended once. Each party's gradient then follows from it by the chain
rule, without labels: the aggregate is linear in every party's activation. So, with any defense,
parties that pool their gradients know the defended gradient of the aggregate and nothing else, and
the ledger's charge for it bounds all of them together.

If noise were drawn for each party separately, it would be independent between parties, and parties
that pool their gradients would average it out: with n parties, the divergence would be n times the
divergence for a single party.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from splitveil.active_party.defenses import DefendedGradient
from splitveil.common.run.contract import Aggregation


def aggregate(rule: Aggregation, activations: Sequence[Tensor]) -> Tensor:
    """Return the aggregate of activations: a single one unchanged, otherwise float32."""
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
    """Return each party's part of the aggregate's gradient, in the contract's order."""
    if parties == 1:
        return [defended]
    match rule:
        case "mean":
            return [DefendedGradient(defended / parties)] * parties
        case "sum":
            return [defended] * parties
        case "concat":
            return [DefendedGradient(part) for part in defended.chunk(parties, dim=1)]
