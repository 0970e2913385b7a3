"""Noisy labels, drawn once per example, and training on them instead of the labels.

The gradient of the loss on the noisy labels is sent, and nothing is added to it. With
``top_labels: noisy`` the top model also learns from them: then everything that the peer ever sees
is a function of features and noisy labels, and an adversary learns no more about a label than the
noisy label reveals, for any epochs, optimiser, model and number of passive parties.

    gaussian             y + k x, x ~ N(0, 1)            sumKL = 1/k^2, AUC <= Phi(1/(k sqrt 2))
    laplace              y + x/e, x ~ Laplace(1)         sumKL = 2 (e + exp(-e) - 1), e-label-DP
    randomized_response  flipped with prob. 1/(1+exp e)  sumKL = 2 e tanh(e/2), e-label-DP

With K classes, randomized response returns the true class with probability exp e/(K-1+exp e), and
otherwise one of the other classes, all equally likely. Between any two classes
sumKL = 2 e (exp e - 1)/(K-1+exp e), e-label-DP; for K = 2 this is the line above. The other two
mechanisms are for two classes only.

With ``top_labels: true`` the top model learns from the labels themselves, and its knowledge shows
in p and J of later gradients (p - noisy y) J. Given p and J, a gradient is a function of the noisy
label, so that its charge describes what a passive and honest peer learns beyond the predictions. A
peer that chooses activations can make the top model learn a single label by heart, and read it
from p: nothing bounds what it learns, and there is no label-DP.

Noise is rounded to multiples of 2^-10. Since y is such a multiple itself, the rounded sum is the
sum rounded: the guarantee is not weakened, and the low bits of a floating-point sum, which differ
between y = 0 and y = 1, reveal nothing. Laplace noise ends at 44/e; anything beyond has probability
2^-63.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from splitveil.active_party.defenses.example_keys import (
    LABEL_NOISE,
    NoiseKey,
    example_keys,
    key_name,
    scalars,
)
from splitveil.active_party.defenses.forecast import ChargeForecast, Forecast
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
from splitveil.active_party.defenses.noise import open_uniform
from splitveil.active_party.defenses.rows import as_classes, as_rows
from splitveil.active_party.defenses.section import (
    BuildInputs,
    Coverage,
    DefenseContext,
    SeededDefense,
    require_key,
)
from splitveil.active_party.defenses.sum_kl import leak_auc_bound
from splitveil.common.privacy.covers import Covers
from splitveil.common.settings import Section

_GRID = 2.0**10


class GaussianLabels(Section):
    """y plus Gaussian noise."""

    kind: Literal["gaussian"]

    noise_ratio: float = Field(default=2.0, ge=0.01, le=100)
    """Standard deviation k of the noise; no attack exceeds AUC Phi(1/(k sqrt 2))."""


class LaplaceLabels(Section):
    """y plus Laplace noise of scale 1/epsilon."""

    kind: Literal["laplace"]

    epsilon: float = Field(ge=0.01, le=20)
    """Label differential privacy of the whole run."""


class RandomizedResponse(Section):
    """y, or its opposite with probability 1/(1 + exp(epsilon)).

    With K classes, the true one with probability exp(epsilon)/(K - 1 + exp(epsilon)), and otherwise
    one of the others, all equally likely.
    """

    kind: Literal["randomized_response"]

    epsilon: float = Field(ge=0.01, le=20)
    """Label differential privacy of the whole run."""


LabelMechanism = Annotated[
    GaussianLabels | LaplaceLabels | RandomizedResponse, Field(discriminator="kind")
]
"""The way in which a noisy label is made from a label."""


def _word_of_true(value: object) -> object:
    """Return YAML's ``true`` as the word that was written."""
    return "true" if value is True else value


class NoisyLabelDefense(SeededDefense):
    """Send the gradients of labels to which noise was added once per example."""

    name: Literal["noisy_label"] = "noisy_label"

    mechanism: LabelMechanism = GaussianLabels(kind="gaussian")
    """The kind and strength of the noise, which is drawn from the key at ``noise_key_path``."""

    top_labels: Annotated[Literal["noisy", "true"], BeforeValidator(_word_of_true)] = "noisy"
    """The labels from which the top model learns.

    ``noisy``: only the noisy labels influence what is sent, and their guarantee is exact.
    ``true``: the model predicts better, and its knowledge of the labels shows in later gradients:
    there is no proof, only the leak monitor.
    """

    @property
    def top_learns_targets(self) -> bool:
        """Whether the top model learns from the noisy labels."""
        return self.top_labels == "noisy"

    def _build(self, given: BuildInputs, /) -> Defense:
        """Build the defense; without examples it lacks the noisy labels for training."""
        num_classes, examples = given.context.num_classes, given.examples
        key = require_key(given.secrets.noise_key, self.name)
        noisy = None
        if examples is not None:
            noisy = draw_noisy_labels(
                self.mechanism, examples.labels, key, examples.ids, num_classes
            ).to(examples.device)
        return NoisyLabel(self, key, num_classes, noisy)

    def noise_key_strength(self, context: DefenseContext, /) -> str | None:
        """Name the strength for which the noise key is derived."""
        of_several = f" of {context.num_classes}" if context.num_classes > 2 else ""
        return f"noisy_label {self.mechanism!r}{of_several}"

    def forecast(self, context: DefenseContext) -> Forecast:
        """Return the charge of all answers together, which the mechanism determines."""
        sum_kl, _ = label_leak(self.mechanism, context.num_classes)
        honesty = (
            "Exact, whatever the gradients."
            if self.top_labels == "noisy"
            else "Charges of noisy labels depend on their mechanism alone."
        )
        charge = ChargeForecast.exactly(
            sum_kl, self.coverage().covers, is_gaussian=self.mechanism.kind == "gaussian"
        )
        return Forecast({"persistent": charge}, "persistent", honesty)

    def refusal(self, context: DefenseContext, /) -> str | None:
        """Explain why the mechanism cannot be used with more than two classes."""
        if context.num_classes == 2 or self.mechanism.kind == "randomized_response":
            return None
        return (
            f"noisy_label by {self.mechanism.kind} noise adds to a label of 0 or 1; with "
            "several classes expected mechanism: {kind: randomized_response, epsilon: ...}"
        )

    def coverage(self) -> Coverage:
        """Return the peers whom the charge describes: everybody, if nothing else uses labels."""
        if self.top_labels == "noisy":
            return Coverage(
                Covers.ANYBODY,
                "Everything that the peer receives is a function of features and noisy labels.",
            )
        return Coverage(
            Covers.PASSIVE_AND_HONEST,
            "With top_labels true, the charge of the noisy label describes a peer that sends its "
            "model's activations, and what it learns beyond the model's predictions. It does not "
            "describe one that chooses activations to make the top model learn single labels.",
        )

    def composition_refusal(self) -> str | None:
        """Explain why the noisy labels cannot replace the labels of another loss."""
        if self.mechanism.kind == "randomized_response" and self.top_labels == "noisy":
            return None
        return (
            "the critic compares predictions with labels of 0 and 1; expected "
            "a noisy_label of mechanism randomized_response, with top_labels noisy"
        )

    def bounds_label_move(self, _cut_dim: int, *, is_known: bool) -> bool:  # noqa: ARG002
        """Whether a finite charge covers the label: always, for any use of the noisy label."""
        return True


class NoisyLabel(Defense):
    """Releases gradients of noisy labels unchanged, and charges what the noisy labels reveal.

    Args:
        settings: the mechanism, and the labels from which the top model learns.
        key: the noise key.
        num_classes: number of classes.
        noisy_labels: (aligned,) float32, on the device of training; None for a defense that is
            only asked for its charge.
    """

    def __init__(
        self,
        settings: NoisyLabelDefense,
        key: NoiseKey,
        num_classes: int = 2,
        noisy_labels: Tensor | None = None,
    ) -> None:
        self.noisy_labels = noisy_labels
        self._num_classes = num_classes
        sum_kl, epsilon = label_leak(settings.mechanism, num_classes)
        self._report = DefenseReport(
            noise_power=0.0,  # the noise is in the labels: nothing is added to the gradient
            sum_kl_after=sum_kl,
            leak_auc_bound=leak_auc_bound(sum_kl),
            charge=LeakCharge(
                sum_kl,
                noise_identity=f"noisy_label {settings.mechanism!r} {key_name(key)}",
                epsilon=epsilon if settings.top_labels == "noisy" else None,
                covers=settings.coverage().covers,
                is_gaussian=settings.mechanism.kind == "gaussian",
            ),
        )

    def targets(self, batch: LabelledRows, /) -> Tensor:
        """Return the noisy labels of a batch, (batch,).

        Raises:
            ValueError: noisy labels were not drawn.
        """
        if self.noisy_labels is None:
            raise ValueError("noisy_label was built without examples: there are no noisy labels")
        return self.noisy_labels[batch.rows]

    def defend(self, batch: RawBatch) -> Defended:
        """Return the values unchanged. The labels' values are checked but not used."""
        as_classes(batch.labels, as_rows(batch.gradients), self._num_classes)
        return Defended(DefendedGradient(batch.gradients.detach()), self._report)

    def charge_covering(self, move: LabelMove, /) -> LeakCharge:
        """Return the same charge: every gradient is a function of features and noisy labels."""
        return move.report.charge


def draw_noisy_labels(
    mechanism: LabelMechanism,
    labels: Tensor,
    key: NoiseKey,
    ids: Sequence[str],
    num_classes: int = 2,
) -> Tensor:
    """Draw each example's noisy label; repeated calls return the same labels.

    Args:
        mechanism: kind and strength of the noise.
        labels: (aligned,), 0 or 1, or class indices.
        key: the noise key.
        ids: canonical ids in the same order.
        num_classes: number of classes.

    Returns:
        (aligned,) float32. 0 or 1 for randomized response, or a class index; otherwise any
        number.

    Raises:
        ValueError: the mechanism is for two classes, and there are more.
    """
    if num_classes > 2 and not isinstance(mechanism, RandomizedResponse):
        raise ValueError(f"expected randomized response for {num_classes} classes")
    keys = example_keys(key, ids, LABEL_NOISE)
    match mechanism:
        case GaussianLabels():
            noise = mechanism.noise_ratio * scalars(keys)
        case LaplaceLabels():
            sizes = -open_uniform(keys[:, 0], torch.float64).log_()
            noise = sizes.copysign_(keys[:, 1]).div_(mechanism.epsilon)
        case RandomizedResponse():
            chance = _flip_probability(mechanism, num_classes)
            flipped = open_uniform(keys[:, 0], torch.float64) <= chance
            others = 1 - labels if num_classes == 2 else _others(labels, keys[:, 1], num_classes)
            return torch.where(flipped, others, labels).float()
    return (labels + (noise * _GRID).round_() / _GRID).float()


def label_leak(mechanism: LabelMechanism, num_classes: int = 2) -> tuple[float, float | None]:
    """Return a noisy label's divergence between two classes, and its epsilon if it has one."""
    match mechanism:
        case GaussianLabels():
            return mechanism.noise_ratio**-2, None
        case LaplaceLabels():
            epsilon = mechanism.epsilon
            return 2 * (epsilon + math.expm1(-epsilon)), epsilon
        case RandomizedResponse():
            epsilon = mechanism.epsilon
            if num_classes == 2:
                return 2 * epsilon * math.tanh(epsilon / 2), epsilon
            return 2 * epsilon * math.expm1(epsilon) / (
                num_classes - 1 + math.exp(epsilon)
            ), epsilon


def _flip_probability(mechanism: RandomizedResponse, num_classes: int) -> float:
    others = num_classes - 1
    return others / (others + math.exp(mechanism.epsilon))


def _others(labels: Tensor, bits: Tensor, num_classes: int) -> Tensor:
    """Pick one of the other classes for each label, all equally likely."""
    # A draw of exactly 1 would otherwise lead back to the label.
    steps = 1 + (open_uniform(bits, torch.float64) * (num_classes - 1)).floor()
    return (labels + steps.clamp(max=num_classes - 1)) % num_classes
