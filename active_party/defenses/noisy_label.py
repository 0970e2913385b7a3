"""Noisy labels, and training on them instead of the labels.

The gradient of the loss on the noisy labels is sent, and nothing is added to it. With
``top_labels: noisy`` the top model also learns from them: then everything that the peer ever sees
is a function of features and noisy labels, and an adversary learns no more about a label than the
noisy labels reveal, for any epochs, optimiser, model and number of passive parties.

Targets may also depend on what the top model predicts: with ``posterior: model`` a noisy label is
replaced by the distribution of the label given the noisy label, with the prediction as the prior

    log odds of the target = logit + log p(noisy label given 1) - log p(noisy label given 0)

(Malek et al., "Antipodes of Label Differential Privacy: PATE and ALIBI", NeurIPS 2021).
As the model has only ever seen noisy labels, that is another function of them, and reveals no more.

With ``top_labels: true`` the top model learns from the labels themselves, and its knowledge shows
in p and J of later gradients (p - noisy y) J. Given p and J, a gradient is a function of the noisy
label, so that its charge describes what an honest-but-curious peer learns beyond the predictions. A
peer that chooses activations can make the top model memorise a single label, and read it from p:
nothing bounds what it learns, and there is no label-DP. Targets that depend on predictions are
refused with it: they would pass on the label itself.

The mechanisms are drawn once per example, from the noise key:

    gaussian             y + k x, x ~ N(0, 1)            sumKL = 1/k^2, AUC <= Phi(1/(k sqrt 2))
    laplace              y + x/e, x ~ Laplace(1)         sumKL = 2 (e + exp(-e) - 1), e-label-DP
    randomized_response  flipped with prob. 1/(1+exp e)  sumKL = 2 e tanh(e/2), e-label-DP
    alibi                one-hot y + 2 x/e, x ~ Laplace  sumKL = 4 (e/2 + exp(-e/2) - 1), e-label-DP

A label moves two entries of its one-hot form by 1 each, so that the L1 sensitivity of ``alibi`` is
2 and each entry gets noise of scale 2/e: twice ``laplace`` at e/2. This holds for any number of
classes. With K of them, randomized response returns the true class with probability
exp e/(K-1+exp e), and otherwise one of the other classes, all equally likely. Between any two
classes sumKL = 2 e (exp e - 1)/(K-1+exp e), e-label-DP. Gaussian noise for K classes is that of the
one-hot label, k sqrt 2 on each entry, so that sumKL stays 1/k^2.

Labels may also be numbers, as shares of their range within 0 and 1: ``gaussian`` and ``laplace``
then bound any two values of a label, which differ by 1 at most, as they bound 0 and 1.

All labels of a person with g rows together move g values of independent noise by D each, D = 1 or
sqrt 2 for one-hot labels, and so their vector by sqrt(g) D: Gaussian noise of k sqrt(g) D on each
is mu = 1/k for the person. Laplace noise would need the scale g/e, since e adds up
over rows: it is refused in one-shot runs, and these alone bound persons.

Labels and noise are rounded to multiples of 2^-10. Since y is such a multiple itself, the rounded
sum is the sum rounded: the guarantee is not weakened, and the low bits of a floating-point sum,
which differ between y = 0 and y = 1, reveal nothing. Laplace noise ends at 44 times its scale;
anything beyond has probability 2^-63.

The best AUC of any score, and the Gaussian mechanism that reveals no less: `dp_bounds`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from splitveil.active_party.defenses import dp_bounds, interface
from splitveil.active_party.defenses.example_keys import (
    LABEL_NOISE,
    NoiseKey,
    example_keys,
    key_name,
    scalars,
)
from splitveil.active_party.defenses.noise import open_uniform
from splitveil.active_party.defenses.noisy_sums import NoisySums
from splitveil.active_party.defenses.rows import as_rows, check_labels
from splitveil.active_party.defenses.section import ChargeModel, SeededDefense, Traits, require_key
from splitveil.common.privacy.charge import Adversary, Charge, noise_digest
from splitveil.common.settings import Section

_GRID = 2.0**10


class NoisyLabels(Section):
    """Labels with noise, or their posterior."""

    posterior: Literal["none", "model"] = "none"
    """``model``: train on the posterior given noisy label and prediction; see ``alibi``."""


class GaussianLabels(NoisyLabels):
    """y plus Gaussian noise."""

    kind: Literal["gaussian"]

    noise_ratio: float = Field(default=2.0, ge=0.01, le=100)
    """Standard deviation k of the noise; no attack exceeds AUC Phi(1/(k sqrt 2))."""


class PrivateLabels(Section):
    """Labels with differential privacy."""

    epsilon: float = Field(ge=0.01, le=20)
    """Label differential privacy of the whole run."""


class LaplaceLabels(PrivateLabels, NoisyLabels):
    """y plus Laplace noise of scale 1/epsilon."""

    kind: Literal["laplace"]


class RandomizedResponse(PrivateLabels, NoisyLabels):
    """y, or its opposite with probability 1/(1 + exp(epsilon)).

    With K classes, the true one with probability exp(epsilon)/(K - 1 + exp(epsilon)), and otherwise
    one of the others, all equally likely.
    """

    kind: Literal["randomized_response"]


class AlibiLabels(PrivateLabels):
    """ALIBI: Laplace noise of scale 2/epsilon on each entry of the one-hot label, and a posterior.

    At each step the target is the distribution of the label given its noisy form, with the model's
    present prediction as the prior (Malek et al., "Antipodes of Label Differential Privacy: PATE
    and ALIBI", NeurIPS 2021). For the same with Gaussian noise set ``kind: gaussian,
    posterior: model``.
    """

    kind: Literal["alibi"]

    @property
    def posterior(self) -> Literal["model"]:
        return "model"


LabelMechanism = Annotated[
    GaussianLabels | LaplaceLabels | RandomizedResponse | AlibiLabels, Field(discriminator="kind")
]
"""A mechanism that makes a noisy label from a label."""


def label_leak(mechanism: LabelMechanism, num_classes: int = 2) -> Charge:
    """Return what one draw reveals between two classes, with the best AUC of any score."""
    if isinstance(mechanism, GaussianLabels):
        mu = 1 / mechanism.noise_ratio
        return Charge(
            mechanism.noise_ratio**-2,
            is_gaussian=True,
            leak_auc=dp_bounds.leak_auc_of_mu(mu),
            dominating_mu=mu,
        )
    epsilon = mechanism.epsilon
    match mechanism:
        case LaplaceLabels():
            sum_kl = 2 * (epsilon + math.expm1(-epsilon))
            auc, mu = dp_bounds.laplace_auc(epsilon), dp_bounds.gaussian_of_laplace(epsilon)
        case AlibiLabels():
            sum_kl = 4 * (epsilon / 2 + math.expm1(-epsilon / 2))
            auc, mu = dp_bounds.laplace_auc(epsilon, 2), dp_bounds.gaussian_of_laplace(epsilon, 2)
        case RandomizedResponse():
            if num_classes == 2:
                sum_kl = 2 * epsilon * math.tanh(epsilon / 2)
            else:
                odds = num_classes - 1 + math.exp(epsilon)
                sum_kl = 2 * epsilon * math.expm1(epsilon) / odds
            auc, mu = (
                dp_bounds.response_auc(epsilon, num_classes),
                dp_bounds.gaussian_of_response(epsilon, num_classes),
            )
    return Charge(sum_kl, epsilon=epsilon, leak_auc=auc, dominating_mu=mu)


def at_leak_auc(mechanism: LabelMechanism, leak_auc: float, num_classes: int = 2) -> LabelMechanism:
    """Return the mechanism at which no score exceeds a leak AUC, above 0.5 and below 1."""
    if isinstance(mechanism, GaussianLabels):
        ratio = 1 / dp_bounds.mu_of_leak_auc(leak_auc)
        return mechanism.model_copy(update={"noise_ratio": ratio})
    bound = dp_bounds.laplace_auc
    if isinstance(mechanism, AlibiLabels):
        bound = partial(dp_bounds.laplace_auc, num_numbers=2)
    elif isinstance(mechanism, RandomizedResponse):
        bound = partial(dp_bounds.response_auc, num_classes=num_classes)
    return mechanism.model_copy(update={"epsilon": dp_bounds.strength_for_auc(bound, leak_auc)})


def strength_name(mechanism: LabelMechanism) -> str:
    """Name the draw, without later processing: the posterior reveals no more."""
    drawn = (f"{name}={value!r}" for name, value in mechanism if name != "posterior")
    return f"{type(mechanism).__name__}({', '.join(drawn)})"


def draw_noisy_labels(
    mechanism: LabelMechanism,
    labels: Tensor,
    key: NoiseKey,
    ids: Sequence[str],
    num_classes: int = 2,
) -> Tensor:
    """Draw each example's noisy label; repeated calls return the same labels.

    Labels are 0 or 1, class indices, or shares of a range. Returns (aligned,) float32; for
    ``alibi``, and with Gaussian noise for more than two classes, (aligned, classes). Raises
    ValueError if the mechanism is for two classes, and there are more.
    """
    match mechanism:
        case GaussianLabels() if num_classes <= 2:
            noise = mechanism.noise_ratio * scalars(example_keys(key, ids, LABEL_NOISE))
            return _on_grid(labels, noise)
        case LaplaceLabels() if num_classes <= 2:
            noise = _laplace(example_keys(key, ids, LABEL_NOISE), mechanism.epsilon)
            return _on_grid(labels, noise)
        case RandomizedResponse():
            keys, num_others = example_keys(key, ids, LABEL_NOISE), num_classes - 1
            chance = num_others / (num_others + math.exp(mechanism.epsilon))
            flipped = open_uniform(keys[:, 0], torch.float64) <= chance
            steps = 1 + (open_uniform(keys[:, 1], torch.float64) * num_others).floor()
            # A draw of exactly 1 would otherwise lead back to the label.
            others = (labels + steps.clamp(max=num_others)) % num_classes
            return torch.where(flipped, others, labels).float()
        case AlibiLabels() | GaussianLabels():
            columns = []
            for index in range(num_classes):
                keys = example_keys(key, ids, b"label noise %d" % index)
                if isinstance(mechanism, AlibiLabels):
                    noise = _laplace(keys, mechanism.epsilon / 2)
                else:
                    noise = math.sqrt(2) * mechanism.noise_ratio * scalars(keys)
                columns.append(_on_grid(labels == index, noise))
            return torch.stack(columns, dim=1)
        case _:
            raise ValueError(f"{mechanism.kind} noise is for two classes, got {num_classes}")


def evidence(mechanism: LabelMechanism, noisy: Tensor, num_classes: int = 2) -> Tensor:
    """Return what noisy labels add to the logits of their labels: their log likelihoods.

    Logits plus this are those of the posterior of the label under the prior that the logits
    predict. (rows,), that of label 1 minus that of label 0; with several classes (rows, classes),
    but for a number of the row's own.
    """
    match mechanism:
        case GaussianLabels():
            if num_classes == 2:
                return (noisy - 0.5) / mechanism.noise_ratio**2
            return noisy / (2 * mechanism.noise_ratio**2)
        case LaplaceLabels():
            return mechanism.epsilon * (noisy.abs() - (noisy - 1).abs())
        case RandomizedResponse():
            if num_classes == 2:
                return mechanism.epsilon * (2 * noisy - 1)
            classes = torch.arange(num_classes, device=noisy.device)
            return mechanism.epsilon * (noisy[:, None] == classes).to(noisy)
        case AlibiLabels():
            likelihood = mechanism.epsilon / 2 * (noisy.abs() - (noisy - 1).abs())
            return likelihood if num_classes > 2 else likelihood[:, 1] - likelihood[:, 0]


def _on_grid(labels: Tensor, noise: Tensor) -> Tensor:
    steps = (labels.double() * _GRID).round_() + (noise * _GRID).round_()
    return (steps / _GRID).float()


def _laplace(keys: Tensor, epsilon: float) -> Tensor:
    """Turn secret bits into Laplace noise of scale 1/epsilon, (rows,) float64."""
    sizes = -open_uniform(keys[:, 0], torch.float64).log_()
    return sizes.copysign_(keys[:, 1]).div_(epsilon)


class NoisyLabelDefense(SeededDefense):
    """Send gradients of noisy labels, or in a one-shot run a release of noisy labels or sums."""

    name: Literal["noisy_label"] = "noisy_label"

    mechanism: LabelMechanism = GaussianLabels(kind="gaussian")
    """The kind and strength of the noise, drawn once per example from the key at
    ``noise_key_path``; of noisy sums, once per sum and anew in each run."""

    top_labels: Annotated[
        Literal["noisy", "true"], BeforeValidator(lambda value: "true" if value is True else value)
    ] = "noisy"
    """The labels that the top model learns from.

    ``noisy``: only the noisy labels influence what is sent, and their guarantee is exact.
    ``true``: the model predicts better, and its knowledge of the labels shows in later gradients:
    the bound is for an honest-but-curious peer, and about what predictions do not say. Refused
    where targets depend on predictions.
    """

    subject_column: str | None = Field(default=None, min_length=1)
    """Column of this party's table that names the person whom a row is about, in a one-shot run.

    The bound, the charges and ``run_budget`` are then about all rows of a person together. The
    noise grows with the largest number of rows that one person has among those that may be trained
    on: of noisy labels with its root, of noisy sums with the number itself. The column is sent to
    nobody, and its entries are compared as written; a row with an empty cell is a person of its
    own. ``null``: each row is bounded by itself."""

    if TYPE_CHECKING:  # also those of an inner section

        def __init__(self, **settings: Any) -> None: ...

    @model_validator(mode="after")
    def _predictions_know_noisy_labels_alone(self) -> Self:
        if self.top_labels == "true" and self.mechanism.posterior == "model":
            raise ValueError(
                "top_labels: with this mechanism targets depend on the model's predictions, which "
                "must not know the labels; expected noisy"
            )
        return self

    @property
    def traits(self) -> Traits:
        is_noisy = self.top_labels == "noisy"
        return Traits(
            takes_numbers=True,  # depending on the mechanism, see _refusal
            top_learns_targets=is_noisy,
            model_is_label_free=is_noisy,
            subject_column=self.subject_column,
        )

    def _build(
        self, context: interface.DefenseContext, secrets: interface.Secrets, /
    ) -> interface.Defense:
        num_classes, labels = context.num_classes, secrets.labels
        if context.releases_sums and isinstance(self.mechanism, GaussianLabels):
            return NoisySums(self.mechanism.noise_ratio, self.charge(num_classes), context, secrets)
        key, noisy = require_key(secrets.noise_key, self.name), None
        if labels is not None:
            drawn = self._drawn(context)
            noisy = draw_noisy_labels(drawn, labels, key, secrets.ids, num_classes)
            noisy = noisy.to(secrets.device)
        return NoisyLabel(self, key, num_classes, noisy, secrets.whose)

    def _drawn(self, context: interface.DefenseContext) -> LabelMechanism:
        if not isinstance(self.mechanism, GaussianLabels):
            return self.mechanism  # never of persons: see one_shot_refusal
        ratio = self.mechanism.noise_ratio * math.sqrt(context.rows_of_person)
        return self.mechanism.model_copy(update={"noise_ratio": ratio})

    def noise_key_strength(self, context: interface.DefenseContext, /) -> str | None:
        if context.releases_sums:
            return None
        return f"noisy_label {strength_name(self._drawn(context))}"

    def charge(self, num_classes: int, noise_identity: bytes = b"") -> Charge:
        """Return the charge of an answer; the noise identity names the draw of the labels."""
        leak = label_leak(self.mechanism, num_classes)
        if leak.is_gaussian:  # then both follow from the divergence
            leak = replace(leak, leak_auc=1.0, dominating_mu=math.inf)
        if self.top_labels == "noisy":
            return replace(leak, noise_identity=noise_identity, adversary=Adversary.ANYBODY)
        # A top model that knows the labels leaves no bound on the odds.
        peers = Adversary.HONEST_BUT_CURIOUS
        return replace(leak, noise_identity=noise_identity, epsilon=math.inf, adversary=peers)

    def charge_model(self, context: interface.DefenseContext, /) -> ChargeModel:
        said = "Charges of noisy labels depend only on their mechanism."
        covers = (
            "With top_labels true, the charge of the noisy label describes a peer that sends its "
            "model's activations, and what it learns beyond the model's predictions. It does not "
            "describe one that chooses activations to make the top model learn single labels."
        )
        if self.top_labels == "noisy":
            said = "Exact, whatever the gradients."
            covers = "Everything that the peer receives is a function of features and noisy labels."
        noise: Literal["fresh", "persistent"] = "fresh" if context.releases_sums else "persistent"
        charge = self.charge(context.num_classes)
        return ChargeModel.exact(charge, said, noise, covers=covers)

    def _refusal(self, context: interface.DefenseContext, /) -> str | None:
        mechanism = self.mechanism
        if context.is_one_shot:
            return self.one_shot_refusal("noisy_labels")
        if context.is_number:
            adds_noise = isinstance(mechanism, GaussianLabels | LaplaceLabels)
            if adds_noise and mechanism.posterior != "model":
                return None
            return (
                f"noisy_label by {mechanism.kind} with these settings is defined for classes "
                f"alone; with data.label_range expected mechanism: {{kind: gaussian}} or "
                f"{{kind: laplace, epsilon: ...}} with posterior: none"
            )
        if context.num_classes == 2 or mechanism.kind not in ("gaussian", "laplace"):
            return None
        if isinstance(mechanism, GaussianLabels) and mechanism.posterior == "model":
            return None
        return (
            f"noisy_label by {mechanism.kind} noise adds to a label of 0 or 1; with "
            "several classes expected mechanism: {kind: randomized_response, epsilon: ...}, alibi, "
            "or gaussian with posterior: model"
        )

    def at_leak_auc(self, leak_auc: float, context: interface.DefenseContext, /) -> Self | None:
        if self.top_labels == "true":
            return None
        mechanism = at_leak_auc(self.mechanism, leak_auc, context.num_classes)
        return self.model_copy(update={"mechanism": mechanism})

    def one_shot_refusal(self, release: str | None) -> str | None:
        is_usable = isinstance(self.mechanism, GaussianLabels) and self.top_labels == "noisy"
        return None if release and is_usable else super().one_shot_refusal(release)


class NoisyLabel(interface.Defense):
    """Releases gradients of labels drawn once; without examples it only states the charge."""

    def __init__(
        self,
        settings: NoisyLabelDefense,
        key: NoiseKey,
        num_classes: int = 2,
        noisy_labels: Tensor | None = None,
        whose: str = "",
    ) -> None:
        mechanism = settings.mechanism
        self.noisy_labels = noisy_labels
        self._num_classes = num_classes
        self._evidence = None
        if mechanism.posterior == "model" and noisy_labels is not None:
            self._evidence = evidence(mechanism, noisy_labels, num_classes)
        # Other rows of a person are another release; the key is that of the strength drawn.
        drawn = f"noisy_label {strength_name(mechanism)} {key_name(key)}{whose}"
        identity = noise_digest(drawn)
        self._charge = settings.charge(num_classes, identity)

    def targets(self, batch: interface.Step, /) -> Tensor:
        """Return the noisy labels, (batch,), or the posterior, (batch,) or (batch, classes)."""
        if self.noisy_labels is None:
            raise ValueError("noisy_label was built without examples: there are no noisy labels")
        if self._evidence is None:
            return self.noisy_labels[batch.rows]
        likely = batch.logits() + self._evidence[batch.rows]
        return torch.sigmoid(likely) if likely.ndim == 1 else torch.softmax(likely, dim=1)

    def released_labels(self, rows: Tensor, /) -> interface.Defended:
        """Return the noisy labels, (rows, 1), or of several classes (rows, classes)."""
        if self.noisy_labels is None:
            raise ValueError("noisy_label was built without examples: there are no noisy labels")
        values = self.noisy_labels[rows].reshape(len(rows), -1).cpu()
        return interface.Defended(interface.DefendedGradient(values), self._charge)

    def defend(self, batch: interface.Step) -> interface.Defended:
        """Return the values unchanged. The labels' values are checked but not used."""
        check_labels(batch.labels, as_rows(batch.gradients), self._num_classes)
        # The noise is in the labels: nothing is added to the gradient.
        return interface.Defended(
            interface.DefendedGradient(batch.gradients.detach()), self._charge
        )
