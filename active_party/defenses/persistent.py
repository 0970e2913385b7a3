"""The mathematics of noise that belongs to an example for the whole run.

A second answer about the example then repeats the first.

With a binary cross entropy the raw gradient of an example is (p - y) J: J is its move by one unit
of p, and -y J is the only part that holds its label. Noise k x J, with x ~ N(0, 1) drawn once per
example and k fixed for the run, turns y into y - k x. However J, p and the model change, the
answers hold y and x only in this one sum: an adversary that knows p and J in every epoch learns
y - k x and nothing else, and reaches AUC = Phi(1/(k sqrt 2)), sumKL = 1/k^2, in any number of
epochs.

Three obvious forms fail against an adversary that remembers, so that ``marvell`` and ``iso``
measure persistent noise in units of J:

- k x times the gap of the class means, which shrinks as the model learns: (p - y) + k c x with two
  values of c gives two equations for y and x.
- A vector of the example, scaled by the batch's largest norm. J turns and that noise does not.
- A scalar that fills the row up to the largest norm, with a k that depends on p and y: only the
  true label explains all epochs with the same x. ``max_norm`` has no other form: its persistent
  noise protects against a peer that only adds up answers, and is charged as if there were no noise.

J has to come only from the model. Taken from the raw gradient, divided by p - y, it holds the
label: in its last bits, which are rounded differently for p and for p - 1, and all of it where the
model is certain, since nothing can be divided by zero. So J is the slope of the logit, the noise
k x is rounded to a multiple of 2^-20 like y itself, and an answer is (p + (k x - y)) J, computed in
float64 and rounded once: a function of p, J and k x - y alone.

Two things are not covered. The model itself learns from the labels, so p may reveal as much about y
as a model trained on all labels does, and a peer that chooses its activations can have it memorise
one label (``noisy_label`` avoids this). And unbiasedness holds over the key, not over steps:
an example's error does not average out.
"""

import torch
from torch import Tensor

from splitveil.active_party.defenses.example_keys import scalars
from splitveil.active_party.defenses.interface import Defended, Step, release
from splitveil.active_party.defenses.rows import as_positive, as_rows, row_norms
from splitveil.common.privacy.charge import Charge

_GRID = 2.0**20  # the noise on a label is a multiple of its inverse, as the label is


def moves_of(batch: Step) -> tuple[Tensor, Tensor]:
    """Return J, the move of each row by one unit of probability, or minus one unit of label.

    (batch, cut_dim), and its norms, (batch,) float64, exact where the values overflow their dtype.
    Raises ValueError if the batch comes without slopes.
    """
    rows = as_rows(batch.gradients)
    if batch.slopes is None or batch.slopes.shape != batch.gradients.shape:
        got = None if batch.slopes is None else tuple(batch.slopes.shape)
        raise ValueError(f"expected slopes {tuple(batch.gradients.shape)}, got {got}")
    slopes = as_rows(batch.slopes).to(rows)
    return slopes, row_norms(slopes)


def noisy_rows(batch: Step, moves: Tensor, noise_ratio: float) -> Tensor:
    """Return the rows with noise along a label's moves, k labels, (batch, cut_dim) float64."""
    rows = as_rows(batch.gradients)
    noise = noise_ratio * own_scalars(batch.example_keys, rows).squeeze(1)
    noise = (noise * _GRID).round_() / _GRID
    # In this order: k x - y is exact, and the sum with p the same function of it for either label.
    noisy_labels = noise - as_positive(batch.labels, rows).double()
    residuals = checked_probabilities(batch.probabilities, rows).double() + noisy_labels
    return moves.double() * residuals[:, None]


def own_scalars(example_keys: Tensor | None, rows: Tensor) -> Tensor:
    """Return each example's standard normal number, (batch, 1) float64, on the rows' device."""
    if example_keys is None or example_keys.shape != (rows.shape[0], 2):
        got = None if example_keys is None else tuple(example_keys.shape)
        raise ValueError(f"expected example keys ({rows.shape[0]}, 2), got {got}")
    return scalars(example_keys)[:, None].to(rows.device, torch.float64)


def repeated_answer(
    batch: Step, rows: Tensor, norms: Tensor, noise_ratio: float, charge: Charge
) -> Defended:
    """Answer with rows whose noise is drawn once per example, in units of their move's norm."""
    sent = release(rows.to(batch.gradients.dtype), batch.gradients)
    return Defended(sent, charge, float((norms * noise_ratio).square_().mean()))


def checked_probabilities(probabilities: Tensor | None, rows: Tensor) -> Tensor:
    """Return the predictions on the rows' device, (batch,); raises ValueError for other things."""
    if probabilities is None or probabilities.shape != rows.shape[:1]:
        got = None if probabilities is None else tuple(probabilities.shape)
        raise ValueError(f"expected {rows.shape[0]} probabilities, got {got}")
    probabilities = probabilities.detach().to(rows.device)
    if not bool(((probabilities >= 0) & (probabilities <= 1)).all()):
        raise ValueError("probabilities must be between 0 and 1")
    return probabilities
