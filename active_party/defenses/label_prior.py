"""RRWithPrior: each label is drawn once, among the classes that the model expects.

For a prior p over the K classes, RRTop-k answers with one of the k classes of highest prior. A
label among them is returned with probability exp e/(exp e + k - 1) and each other one of them with
1/(exp e + k - 1); for a label that is not among them, all k are equally likely. That is e-label-DP
for every k, and k is the one with the largest chance that the answer is the label,

    exp e/(exp e + k - 1) * (sum of the k largest priors)

(Ghazi, Golowich, Kumar, Manurangsi and Zhang, "Deep Learning with Label Differential Privacy",
NeurIPS 2021, algorithms 1 and 2). In several stages (LP-MST, algorithm 3) the rows are divided into
parts, and the prior of a part's rows is what the model has learned from the parts before.

Four things differ from the paper. The first three follow from one course and one model:

- The model goes on learning from one stage to the next, instead of starting anew.
- The prior is the prediction at the visit at which the row's label is drawn. By then the model has
  also learned from rows of the same part that were visited before. It has never learned from this
  row's label, which is all that the proof needs: each label is used once, and everything that its
  draw depends on follows from features and from the draws of other labels.
- A row whose label is not drawn yet is trained on its own prediction. That is no gradient at all,
  but for dropout and the rounding of a softmax, and in any case a function of what the model knows
  already.
- With ``if_certain: prediction``, so is a row whose k was 1: its answer says nothing about the
  label, and repeats what the model believed.

Drawn once, also after a restart: the random numbers come from the key of the answer at which the
label is drawn. An answer that has been given is repeated bit for bit or not at all, so that a party
that goes back to a checkpoint draws the same labels from the same predictions, or is stopped. The
noise key has no part in it: with the same random numbers and the prior of another run's model, the
two answers would be a release that nobody has analysed. Another run draws anew, under another noise
identity, and is charged on top.
"""

import hashlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from splitveil.active_party.defenses.interface import (
    Defended,
    DefendedGradient,
    Defense,
    DefenseReport,
    LabelledRows,
    LabelMove,
    LeakCharge,
    RawBatch,
)
from splitveil.active_party.defenses.label_mechanisms import ResponseWithPrior, label_leak
from splitveil.active_party.defenses.label_strength import dominating_mu_of, leak_auc_of
from splitveil.active_party.defenses.noise import DrawKeys, secure_uniform
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.common.privacy.covers import Covers

_NOT_DRAWN = -1


class LabelsWithPrior(Defense):
    """Trains on labels that are drawn during the run, and releases their gradients unchanged.

    Args:
        mechanism: epsilon and stages.
        draw_keys: the keys of each answer's random numbers.
        num_classes: number of classes.
        labels: true labels, (aligned,), on the device of training; None for a defense that is only
            asked for its charge.
    """

    def __init__(
        self,
        mechanism: ResponseWithPrior,
        draw_keys: DrawKeys,
        num_classes: int = 2,
        labels: Tensor | None = None,
    ) -> None:
        self._mechanism = mechanism
        self._draw_keys = draw_keys
        self._num_classes = num_classes
        self._labels = torch.zeros(0) if labels is None else labels
        self._answers = torch.full_like(self._labels, _NOT_DRAWN, dtype=torch.int64)
        self._certain = torch.zeros_like(self._labels, dtype=torch.bool)
        self._visits = torch.zeros_like(self._labels, dtype=torch.int32)
        self._identity = b""

    def targets(self, batch: LabelledRows, /) -> Tensor:
        """Return the drawn labels of a batch, and the predictions where there is none yet.

        Returns:
            (batch,), or with several classes a share of each, (batch, classes).

        Raises:
            ValueError: there are no labels, or a prediction is not a number.
        """
        if not len(self._labels):
            raise ValueError("noisy_label was built without examples: there are no labels to draw")
        rows, predicted = batch.rows, _distribution(batch.logits())
        if not bool(torch.isfinite(predicted).all()):
            raise ValueError("the model's predictions hold NaN")
        self._draw(rows, predicted)
        self._visits[rows] += 1
        answers = self._answers[rows]
        open_rows = answers == _NOT_DRAWN
        if self._mechanism.if_certain == "prediction":
            open_rows |= self._certain[rows]
        one_hot = torch.nn.functional.one_hot(answers.clamp(min=0), self._num_classes)
        targets = torch.where(open_rows[:, None], predicted, one_hot.double()).float()
        return targets[:, 1] if self._num_classes == 2 else targets

    def _draw(self, rows: Tensor, predicted: Tensor) -> None:
        mechanism = self._mechanism
        begins = rows.remainder(mechanism.parts) * mechanism.epochs_per_part
        due = (self._answers[rows] == _NOT_DRAWN) & (self._visits[rows] >= begins)
        key = self._draw_keys()
        self._identity = (
            self._identity
            or hashlib.blake2b(key=key, digest_size=8, person=b"drawn labels").digest()
        )
        # For every row of the batch, so that a row's number depends on its place alone.
        uniform = secure_uniform(len(rows), key).to(rows.device)
        drawn, certain = draw_with_prior(
            self._labels[rows].long(), predicted, mechanism.epsilon, uniform
        )
        self._answers[rows] = torch.where(due, drawn, self._answers[rows])
        self._certain[rows] = torch.where(due, certain, self._certain[rows])

    def defend(self, batch: RawBatch) -> Defended:
        """Return the values unchanged. The labels' values are checked but not used."""
        as_classes(batch.labels, as_rows(batch.gradients), self._num_classes)
        sum_kl, epsilon = label_leak(self._mechanism, self._num_classes)
        bound = leak_auc_of(self._mechanism, self._num_classes)
        report = DefenseReport(
            noise_power=0.0,  # the noise is in the labels: nothing is added to the gradient
            sum_kl_after=sum_kl,
            leak_auc_bound=bound,
            charge=LeakCharge(
                sum_kl,
                noise_identity=f"noisy_label {self._mechanism!r} {self._identity.hex()}",
                epsilon=epsilon,
                covers=Covers.ANYBODY,
                leak_auc=bound,
                dominating_mu=dominating_mu_of(self._mechanism, self._num_classes),
            ),
        )
        return Defended(DefendedGradient(batch.gradients.detach()), report)

    def charge_covering(self, move: LabelMove, /) -> LeakCharge:
        """Return the same charge: every gradient is a function of features and drawn labels."""
        return move.report.charge

    def state_dict(self) -> dict[str, Tensor]:
        """Return the labels drawn so far, which are never drawn again."""
        return {
            "answers": self._answers,
            "certain": self._certain,
            "visits": self._visits,
            "identity": torch.tensor(list(self._identity), dtype=torch.uint8),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume with the labels drawn before.

        Raises:
            ValueError: the state belongs to another defense, or to other rows.
        """
        own = self.state_dict()
        if state.keys() != own.keys():
            raise ValueError(f"expected the labels of noisy_label, got {sorted(state)}")
        for name in ("answers", "certain", "visits"):
            if state[name].shape != own[name].shape or state[name].dtype != own[name].dtype:
                raise ValueError(f"{name}: expected one for each of {len(self._labels)} rows")
        answers = state["answers"]
        if bool(((answers < _NOT_DRAWN) | (answers >= self._num_classes)).any()):
            raise ValueError(f"expected answers below {self._num_classes}")
        device = self._labels.device
        self._answers = answers.to(device, copy=True)
        self._certain = state["certain"].to(device, copy=True)
        self._visits = state["visits"].to(device, copy=True)
        self._identity = bytes(state["identity"].tolist())


def draw_with_prior(
    labels: Tensor, prior: Tensor, epsilon: float, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw one answer for each label, among the classes of highest prior.

    Args:
        labels: class indices, (rows,).
        prior: of each class, (rows, classes) float64.
        epsilon: label differential privacy of an answer.
        uniform: (rows,) float64, above 0 and at most 1: the only source of randomness.

    Returns:
        The answers, (rows,) class indices, and whether k was 1, so that the answer does not depend
        on the label.
    """
    highest, classes = prior.sort(dim=1, descending=True, stable=True)
    places = torch.arange(prior.shape[1], device=prior.device)
    odds = math.exp(epsilon) + places.to(prior)  # exp e + k - 1
    num_kept = (highest.cumsum(dim=1) / odds).argmax(dim=1, keepdim=True) + 1
    own = classes == labels[:, None]
    is_inside = (own & (places < num_kept)).any(dim=1, keepdim=True)
    weights = torch.where(own & is_inside, math.exp(epsilon), 1.0).to(prior)
    below = weights.masked_fill_(places >= num_kept, 0.0).cumsum(dim=1)
    reached = uniform[:, None] * below[:, -1:] > below
    chosen = reached.sum(dim=1, keepdim=True).minimum(num_kept - 1)
    return classes.gather(1, chosen).squeeze(1), num_kept.squeeze(1) == 1


def _distribution(logits: Tensor) -> Tensor:
    """Return the predicted share of each class, (rows, classes) float64."""
    logits = logits.double()
    if logits.ndim == 1:
        return torch.stack((torch.sigmoid(-logits), torch.sigmoid(logits)), dim=1)
    return torch.softmax(logits, dim=1)
