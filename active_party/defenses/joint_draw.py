"""One draw of noise for several passive parties, as if their cuts were one.

Noise that is drawn for each party on its own is independent along each party's gap, and parties
that put their gradients together average it out: with n parties the divergence is n times each
one's. Here the defense sees the gradients side by side, as one wide cut. What ``marvell`` draws
along the concatenated gap is one scalar per example, of which each party gets the part along its
own gap: together they know no more than one alone, and no more than the report's bound.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from active_party.defenses.report import DefendedGradient, Defense, DefenseReport


def defend_jointly(
    defense: Defense,
    gradients: Sequence[Tensor],
    labels: Tensor,
    *,
    example_keys: Tensor | None = None,
    probabilities: Tensor | None = None,
) -> tuple[list[DefendedGradient], DefenseReport]:
    """Defend what goes to several passive parties about the same batch.

    Args:
        defense: sees one cut as wide as all parties' cuts together.
        gradients: one raw gradient per party, in the parties' fixed order, each
            (batch, *cut_shape), of one dtype and on one device.
        labels: as for ``Defense.defend``.
        example_keys: as for ``Defense.defend``.
        probabilities: as for ``Defense.defend``.

    Returns:
        One defended gradient per party, of its raw gradient's shape, and the report: what it bounds
        is what all parties together can learn.

    Raises:
        ValueError: as ``Defense.defend``, or the parties' gradients do not fit together.
    """
    kinds = {(len(gradient), gradient.dtype, gradient.device) for gradient in gradients}
    if len(kinds) != 1:
        raise ValueError(
            "expected each party's gradient of one batch, dtype and device, got "
            f"{[(tuple(gradient.shape), gradient.dtype) for gradient in gradients]}"
        )
    rows = [gradient.flatten(start_dim=1) for gradient in gradients]
    defended, report = defense.defend(
        torch.cat(rows, dim=1), labels, example_keys=example_keys, probabilities=probabilities
    )
    parts = defended.split_with_sizes([part.shape[1] for part in rows], dim=1)
    return [
        DefendedGradient(part.reshape(gradient.shape))
        for part, gradient in zip(parts, gradients, strict=True)
    ], report
