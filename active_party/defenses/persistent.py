"""Noise that belongs to an example for the whole run, so that a second answer repeats the first.

With a binary cross entropy the raw gradient of an example is (p - y) J: J is what one unit of p
would move it, and -y J is the one part that holds its label. Noise k x J, with x ~ N(0, 1) drawn
once per example and k fixed for the run, turns y into y - k x. However J, p and the model change,
the answers hold y and x only in this one sum: an adversary who knows p and J in every epoch learns
y - k x and no more, and reaches AUC = Phi(1/(k sqrt 2)), sumKL = 1/k^2, whatever the epochs.

Three obvious forms fail against an adversary who remembers, and their attacks stand in the tests:

- k x times the gap of the class means. The gap shrinks as the model learns to tell the classes
  apart, by c = 1 - mean p of the positives + mean p of the negatives; (p - y) + k c x with two
  values of c is two equations for y and x.
- A vector of the example, scaled by the batch's largest norm (``iso`` as it stands). J turns and
  that noise does not, so that the difference of two scaled answers has no noise at all.
- A scalar along the row that fills it up to the batch's largest norm (``max_norm`` as it stands).
  Its k depends on p and y: only the true label explains all epochs by the same x.

So ``marvell`` and ``iso`` measure persistent noise by J, the gap of the classes as each example
sees it. For ``max_norm`` there is no such form, for to equalise the norms is to change k: its
persistent noise serves against a peer that only adds answers up, and is charged as if it were none.

Three things are not covered. A peer that chooses its activations can saturate the top model: a row
whose label is the one that the model is certain of then gets next to no gradient, and one with the
other label a whole one, in a direction that the noise does not cover. The model itself learns from
the labels, so p may tell of y what a model trained on all labels tells (see ``label_noise`` for the
form without this). And unbiasedness holds over the key, not over steps: an example's error does not
average out.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from splitveil.active_party.defenses.example_keys import scalars
from splitveil.active_party.defenses.interface import (
    DefendedGradient,
    Defense,
    DefenseReport,
    LeakCharge,
    Stateless,
    release,
)
from splitveil.active_party.defenses.noise import NoiseSource
from splitveil.active_party.defenses.rows import (
    as_positive,
    as_rows,
    in_chunks,
    largest_size,
    row_norms,
)
from splitveil.active_party.defenses.settings import PowerRatio, Strength
from splitveil.active_party.defenses.strength import allowed_sum_kl
from splitveil.active_party.defenses.sum_kl import leak_auc_bound

_SMALLEST_RESIDUAL = 2.0**-10
"""Below this |p - y| a row is too little of J for float32 to find J in it."""


class PersistentMarvell(Stateless):
    """Adds to each row one scalar of its example along what its label moves.

    Args:
        sum_kl: divergence that all answers about an example together leave, 1/k^2.
        key_name: tells this run's noise from that of another key, in the ledger.
    """

    def __init__(self, sum_kl: float, key_name: str) -> None:
        self._noise_ratio = sum_kl**-0.5
        self._charge = LeakCharge(sum_kl, noise_identity=f"marvell {sum_kl!r} {key_name}")

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,
        probabilities: Tensor | None = None,
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Add noise; a batch of one class is like any other, for no class is estimated.

        Raises:
            ValueError: as for every defense, or keys or probabilities are missing.
        """
        rows = as_rows(gradients)
        moves = label_moves(rows, as_positive(labels, rows), probabilities)
        scale = self._noise_ratio * own_scalars(example_keys, rows)
        defended = moves.values.mul_(scale).add_(rows)
        return release(defended, gradients), _report(moves, self._noise_ratio, self._charge)


class PersistentIsotropic(Stateless):
    """Adds noise in all directions, persistent along what the label moves and fresh across it.

    Across it there is nothing of the label to hide, and nothing to gain from repeating.

    Args:
        noise_ratio: root-mean-square noise norm r in units of what one unit of label moves.
        noise: source of the fresh part.
        key_name: tells this run's noise from that of another key, in the ledger.
    """

    def __init__(self, noise_ratio: float, noise: NoiseSource, key_name: str) -> None:
        self._noise_ratio = noise_ratio
        self._noise = noise
        self._key_name = key_name

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,
        probabilities: Tensor | None = None,
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Add noise.

        Raises:
            ValueError: as for every defense, or keys or probabilities are missing.
        """
        rows = as_rows(gradients)
        moves = label_moves(rows, as_positive(labels, rows), probabilities)
        own = own_scalars(example_keys, rows)
        lengths = moves.norms[:, None].to(rows.dtype)
        directions = moves.values.div_(torch.where(lengths > 0, lengths, 1.0))
        noise = self._noise.standard_normal(tuple(rows.shape), rows)
        along = (noise * directions).sum(dim=1, keepdim=True)
        noise.addcmul_(own - along, directions)
        noise.mul_(lengths * (self._noise_ratio / rows.shape[1] ** 0.5))
        return release(noise.add_(rows), gradients), _report(
            moves, self._noise_ratio, self._charge(rows.shape[1])
        )

    def _charge(self, cut_dim: int) -> LeakCharge:
        ratio = self._noise_ratio
        sum_kl = cut_dim / ratio / ratio if ratio else math.inf
        return LeakCharge(sum_kl, noise_identity=f"iso {ratio!r} {self._key_name}")


class PersistentMaxNorm:
    """Draws the scalars of a norm-aligning defense once per example. Charged without bound.

    Args:
        defense: the defense that draws its noise from ``scalars_of``.
        scalars_of: told before each batch whose scalars to hand out.
    """

    def __init__(self, defense: Defense, scalars_of: "KeyedScalars") -> None:
        self._defense = defense
        self._scalars_of = scalars_of

    def defend(
        self,
        gradients: Tensor,
        labels: Tensor,
        *,
        example_keys: Tensor | None = None,
        probabilities: Tensor | None = None,
    ) -> tuple[DefendedGradient, DefenseReport]:
        """Add noise.

        Raises:
            ValueError: as for every defense, or keys are missing.
        """
        self._scalars_of.example_keys = example_keys
        defended, report = self._defense.defend(gradients, labels, probabilities=probabilities)
        return defended, replace(report, charge=LeakCharge(math.inf))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the defense inside."""
        return self._defense.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state of the defense inside."""
        self._defense.load_state_dict(state)


class KeyedScalars:
    """Hands out the examples' own numbers where one per row is asked for, and else fresh ones."""

    def __init__(self, noise: NoiseSource) -> None:
        self.example_keys: Tensor | None = None
        self._noise = noise

    def standard_normal(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Draw numbers with the dtype and on the device of ``like``."""
        if shape == (like.shape[0], 1):
            return own_scalars(self.example_keys, like)
        return self._noise.standard_normal(shape, like)


def repeated_sum_kl(strength: Strength) -> float:
    """Return the divergence that all answers of persistent marvell leave together, 1/k^2.

    A power ratio s is k^2. A leak AUC is taken as the guarantee for every attack, as for fresh
    noise and in the run's budget; the estimate Phi(1/(k sqrt 2)), exact here, lies below it.
    """
    if isinstance(strength, PowerRatio):
        return 1 / strength.power_ratio
    return allowed_sum_kl(strength)


class LabelMoves(NamedTuple):
    """What one unit of probability, or minus one unit of label, moves each row."""

    values: Tensor  # (batch, cut_dim)
    norms: Tensor  # (batch,) float64, exact where the values overflow their dtype


def label_moves(rows: Tensor, positive: Tensor, probabilities: Tensor | None) -> LabelMoves:
    """Divide each raw gradient (p - y) J by p - y.

    Rows in which p - y is nearly nothing get the batch's J by least squares instead. A batch in
    which p is exactly y everywhere is a batch of zeros, and all its J are taken as zero.

    Raises:
        ValueError: the probabilities are missing, of another number, or outside [0, 1].
    """
    residuals = _checked(probabilities, rows).double() - positive.double()
    row_lengths, common = _lengths_and_common_move(rows, residuals)
    small = residuals.abs() < _SMALLEST_RESIDUAL
    divisors = torch.where(small, 1.0, residuals)
    values = (rows / divisors[:, None].to(rows.dtype)).nan_to_num_()
    lengths = row_lengths / divisors.abs()
    sure = small.nonzero().squeeze(1)
    values[sure] = common.to(rows.dtype)
    lengths[sure] = row_norms(common[None])
    return LabelMoves(values, lengths)


def own_scalars(example_keys: Tensor | None, rows: Tensor) -> Tensor:
    """Return each example's standard normal number, (batch, 1), like the rows.

    Raises:
        ValueError: there is not one key per row.
    """
    if example_keys is None or example_keys.shape != (rows.shape[0], 2):
        got = None if example_keys is None else tuple(example_keys.shape)
        raise ValueError(f"expected example keys ({rows.shape[0]}, 2), got {got}")
    return scalars(example_keys)[:, None].to(rows.device, rows.dtype)


def _checked(probabilities: Tensor | None, rows: Tensor) -> Tensor:
    if probabilities is None or probabilities.shape != rows.shape[:1]:
        got = None if probabilities is None else tuple(probabilities.shape)
        raise ValueError(f"expected {rows.shape[0]} probabilities, got {got}")
    probabilities = probabilities.detach().to(rows.device)
    if not bool(((probabilities >= 0) & (probabilities <= 1)).all()):
        raise ValueError("probabilities must be between 0 and 1")
    return probabilities


def _lengths_and_common_move(rows: Tensor, residuals: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows' norms, (batch,), and the J that explains (p - y) J best, (cut_dim,).

    Both float64, in one pass.
    """
    largest = largest_size(rows)
    unit = torch.where(largest > 0, largest, 1.0)
    size = torch.linalg.vector_norm(residuals).clamp(min=1e-200)
    weights = residuals / size
    move = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    lengths = []
    for part, chunk in in_chunks(rows, unit):
        lengths.append(torch.linalg.vector_norm(chunk, dim=1))
        move.addmv_(chunk.T, weights[part])
    return torch.cat(lengths).mul_(unit), move * (unit / size)


def _report(moves: LabelMoves, noise_ratio: float, charge: LeakCharge) -> DefenseReport:
    mean_square = float((moves.norms * noise_ratio).square_().mean())
    return DefenseReport(
        noise_power=mean_square,
        sum_kl_after=charge.sum_kl,
        leak_auc_bound=leak_auc_bound(charge.sum_kl),
        charge=charge,
    )
