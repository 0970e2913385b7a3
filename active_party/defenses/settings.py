"""The settings of the defenses: which one, and how strong."""

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from splitveil.common.settings import Section, only_key


class NoDefense(Section):
    """Send the raw gradient: to measure the leak, not to train with."""

    name: Literal["none"] = "none"


class NoisyDefense(Section):
    """What every defense with random noise can be told."""

    insecure_noise_seed: int | None = Field(default=None, ge=0, lt=2**63)
    """For tests only: whoever knows the seed subtracts the noise. Absent: unpredictable noise."""

    noise: Literal["fresh", "persistent"] = "fresh"
    """``fresh`` noise is drawn anew for every answer; what the answers tell adds up over epochs.

    ``persistent`` noise belongs to the example for the whole run. For ``marvell`` and ``iso`` it
    repeats one answer however long the run; for ``max_norm`` it protects only from a peer that adds
    answers up, and the leak ledger gives no bound. It is drawn from the key at ``noise_key_path``.
    """

    secure_noise: bool | None = None
    """Where fresh noise comes from.

    ``true``: from a cipher's keystream, on the CPU, and copied to a GPU (about 6 ns per number and
    the copy). ``false``: from the device's own generator, filled with the operating system's
    entropy, but never meant to withstand an adversary. Absent: secure on the CPU, the device's own
    generator on a GPU. Persistent noise is always cryptographic.
    """


class IsoDefense(NoisyDefense):
    """The same Gaussian noise on every example, whatever its label."""

    name: Literal["iso"] = "iso"

    noise_ratio: float | None = Field(default=None, ge=0, le=1e6)
    """Root-mean-square noise norm r, in units of the batch's largest gradient norm.

    Either this or ``power_ratio``; 1 where neither is given.
    """

    power_ratio: float | None = Field(default=None, ge=0, le=1e12)
    """The same as power, the papers' t: t = r^2."""

    @model_validator(mode="after")
    def _have_one_ratio(self) -> Self:
        if self.noise_ratio is not None and self.power_ratio is not None:
            raise ValueError("expected noise_ratio or power_ratio (its square), got both")
        return self

    @property
    def amplitude(self) -> float:
        """The noise ratio r, however it was given."""
        if self.power_ratio is not None:
            return math.sqrt(self.power_ratio)
        return 1.0 if self.noise_ratio is None else self.noise_ratio


class MaxNormDefense(NoisyDefense):
    """Noise along each gradient that brings it to the batch's largest norm."""

    name: Literal["max_norm"] = "max_norm"


class MaxNormPositiveDefense(NoisyDefense):
    """Noise along each gradient that brings it to the norm of the least expected positive."""

    name: Literal["max_norm_positive"] = "max_norm_positive"


class PowerRatio(Section):
    """Strength given as power: P = power_ratio * |gap of the class means|^2."""

    power_ratio: float = Field(gt=0, le=1e6)
    """Noise power in units of the squared distance of the class means (the s of ICLR 2022)."""


class SumKl(Section):
    """Strength given as what may be left: the least power that leaves no more divergence."""

    sum_kl: float = Field(ge=1e-9, le=1e6)
    """Symmetrised divergence of the classes in one answer; 0.16 to 0.64 in the technical report."""


class DetectionError(Section):
    """Strength given as the least error of a detector along the gap: sum_kl = (2 - 4L)^2."""

    detection_error: float = Field(gt=0, lt=0.5)
    """Mean of false positive and false negative rate on one answer, L; 0.5 is guessing."""


class LeakAuc(Section):
    """Strength given as the guarantee: the least power that holds attacks on the gap below an AUC.

    The gap is that of the class means. Fresh noise bounds nothing across it.
    """

    leak_auc: float = Field(gt=0.5, lt=1)
    """Largest AUC that an attack along the gap may reach on one answer; 0.5 is guessing."""


Strength = Annotated[
    Annotated[PowerRatio, Tag("power_ratio")]
    | Annotated[SumKl, Tag("sum_kl")]
    | Annotated[DetectionError, Tag("detection_error")]
    | Annotated[LeakAuc, Tag("leak_auc")],
    Discriminator(
        only_key,
        custom_error_type="strength_key",
        custom_error_message="expected exactly one of power_ratio, sum_kl, detection_error, "
        "leak_auc; to replace another one, set the whole: strength={power_ratio: 4}",
    ),
]
"""How strong marvell is; the key that is present says in which unit."""


class MarvellDefense(NoisyDefense):
    """The noise that leaves the classes the least divergence for its power."""

    name: Literal["marvell"] = "marvell"

    strength: Strength = PowerRatio(power_ratio=4.0)
    """How much noise."""

    statistics: Literal["batch", "running"] = "batch"
    """What the noise is fitted to: this batch, or averages over the batches before it.

    The scale of noise that is fitted to a batch tells something of the batch's share of positives.
    Choose ``running`` where a batch holds few of them, and the peer might count.
    """


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

    Of K classes the true one with probability exp(epsilon)/(K - 1 + exp(epsilon)), and else any of
    the others alike.
    """

    kind: Literal["randomized_response"]

    epsilon: float = Field(ge=0.01, le=20)
    """Label differential privacy of the whole run."""


LabelMechanism = Annotated[
    GaussianLabels | LaplaceLabels | RandomizedResponse, Field(discriminator="kind")
]
"""How a noisy label is made of a label."""


def _word_of_true(value: object) -> object:
    """Give YAML's ``true`` back as the word that was written."""
    return "true" if value is True else value


class NoisyLabelDefense(Section):
    """Send the gradients of labels to which noise was added once per example."""

    name: Literal["noisy_label"] = "noisy_label"

    mechanism: LabelMechanism = GaussianLabels(kind="gaussian")
    """What noise. It is drawn from the key at ``noise_key_path``."""

    top_labels: Annotated[Literal["noisy", "true"], BeforeValidator(_word_of_true)] = "noisy"
    """What the top model learns from.

    ``noisy``: nothing but the noisy labels shapes what is sent, and their guarantee is exact.
    ``true``: the model serves better, and what it has learned of the labels shows in later
    gradients: there is no proof, only the leak monitor.
    """

    insecure_noise_seed: int | None = Field(default=None, ge=0, lt=2**63)
    """For tests only: whoever knows the seed knows the noise. Absent: a secret key."""


class GafmDefense(Section):
    """Train the cut layer against a critic and softened labels instead of the labels.

    The top model becomes the generator; the paper's has one hidden layer with leaky ReLU. No
    defense of the gradients' numbers by itself: the leak ledger gives it no credit, see
    ``composed_with``. As in the paper on Spambase, with its own Marvell behind it:

        top_model: {kind: mlp, hidden: [16], activation: leaky_relu}
        defense:
          name: gafm
          response_width: 0.05
          composed_with: {name: marvell, strength: {power_ratio: 4}}
    """

    name: Literal["gafm"] = "gafm"

    gan_weight: float = Field(default=1.0, gt=0, le=1000)
    """Weight of the adversarial term beside the cross entropy, both brought to norm 1 first."""

    response_width: float = Field(default=0.05, ge=0, le=0.5)
    """Largest distance of a softened label from 1/2."""

    response: Literal["fresh", "persistent"] = "fresh"
    """Whether a label is softened anew for every answer, or once for the whole run.

    Fresh ones average out over epochs. Persistent ones come from the key at ``noise_key_path``.
    Neither hides on which side of 1/2 a softened label lies, which is the label.
    """

    terms: Literal["both", "gan_only", "ce_only"] = "both"
    """What is sent: both terms, or one of them for comparison.

    The adversarial term alone does not say which rows are the positive ones; what it teaches the
    cut layer may have little to do with the labels.
    """

    label_noise: float = Field(default=0.01, ge=0, le=1)
    """Standard deviation of the noise on the labels that the critic sees."""

    critic_width: int = Field(default=16, ge=1, le=4096)
    """Width of the critic's hidden layer."""

    weight_limit: float = Field(default=0.1, gt=0, le=100)
    """Size to which the critic's weights are clipped."""

    critic_learning_rate: float = Field(default=1e-4, gt=0, le=1)
    """Step size of the critic's Adam; the contract's schedule holds for it, too."""

    composed_with: Annotated[
        NoDefense | IsoDefense | MaxNormDefense | MarvellDefense | NoisyLabelDefense,
        Field(discriminator="name"),
    ] = NoDefense()
    """What is done to the mixed gradient before it leaves.

    ``noisy_label`` keeps its guarantee: critic and softened labels then see noisy labels only. The
    others add fresh noise; the leak ledger gives credit to ``iso``, and to ``marvell`` where the
    cut has one value per example.
    """

    insecure_noise_seed: int | None = Field(default=None, ge=0, lt=2**63)
    """For tests only: whoever knows the seed knows the critic, the responses and all noise."""

    @model_validator(mode="after")
    def _fits_what_it_is_composed_with(self) -> Self:
        behind = self.composed_with
        if getattr(behind, "insecure_noise_seed", None) is not None:
            raise ValueError("composed_with: set insecure_noise_seed of gafm itself instead")
        if getattr(behind, "noise", "fresh") == "persistent":
            raise ValueError(
                "composed_with: persistent noise is measured by what a label moves in a cross "
                "entropy's gradient, which this is not; expected noise: fresh, or noisy_label"
            )
        if isinstance(behind, NoisyLabelDefense) and (
            behind.mechanism.kind != "randomized_response" or behind.top_labels != "noisy"
        ):
            raise ValueError(
                "composed_with: the critic compares predictions with labels of 0 and 1; expected "
                "a noisy_label of mechanism randomized_response, with top_labels noisy"
            )
        return self


def refusal_of_several_classes(defense: "DefenseSettings") -> str | None:
    """Say why a defense cannot be had with more than two classes; None where it can."""
    match defense:
        case GafmDefense() | MaxNormPositiveDefense():
            return (
                f"{defense.name} is defined for two classes alone; expected none, iso, max_norm, "
                "marvell or noisy_label"
            )
        case IsoDefense() | MarvellDefense() if defense.noise == "persistent":
            return (
                f"persistent noise of {defense.name} is measured by what one label out of two "
                "moves; with several classes expected noise: fresh, or noisy_label"
            )
        case NoisyLabelDefense() if defense.mechanism.kind != "randomized_response":
            return (
                f"noisy_label by {defense.mechanism.kind} noise adds to a label of 0 or 1; with "
                "several classes expected mechanism: {kind: randomized_response, epsilon: ...}"
            )
        case _:
            return None


def refusal_of_budget(defense: "DefenseSettings", cut_dim: int) -> str | None:
    """Say why the first answer would pass every budget; None where it need not.

    Args:
        defense: the settings.
        cut_dim: numbers per example in what is defended.
    """
    match defense:
        case NoDefense():
            return "the first answer without a defense would pass every budget; set a defense"
        case IsoDefense() if not defense.amplitude:
            return "the first answer without noise would pass every budget; set noise_ratio above 0"
        case MaxNormDefense() | MaxNormPositiveDefense() if defense.noise == "persistent":
            return (
                f"the ledger gives persistent {defense.name} no credit, and the first answer would "
                "pass every budget; expected noise: fresh, or another defense"
            )
        case GafmDefense() if not is_credited(defense, cut_dim):
            return (
                "the ledger gives gafm no credit by itself, and the first answer would pass every "
                "budget; expected both terms and composed_with iso, noisy_label, or marvell at a "
                "cut of one number"
            )
        case _:
            return None


def is_credited(defense: GafmDefense, cut_dim: int) -> bool:
    """Say whether the ledger may give credit to what stands behind gafm; never to gafm itself."""
    behind = defense.composed_with
    if isinstance(behind, NoisyLabelDefense):
        return True
    along_gap = isinstance(behind, MarvellDefense) and cut_dim == 1
    return defense.terms != "gan_only" and (along_gap or isinstance(behind, IsoDefense))


DefenseSettings = Annotated[
    NoDefense
    | IsoDefense
    | MaxNormDefense
    | MaxNormPositiveDefense
    | MarvellDefense
    | NoisyLabelDefense
    | GafmDefense,
    Field(discriminator="name"),
]
