"""Noisy labels, and training on them instead of the labels.

The gradient of the loss on the noisy labels is sent, and nothing is added to it. With
``top_labels: noisy`` the top model also learns from them: then everything that the peer ever sees
is a function of features and noisy labels, and an adversary learns no more about a label than the
noisy labels reveal, for any epochs, optimiser, model and number of passive parties. The ways of
making them, and what each reveals, stand in ``label_mechanisms``.

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
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.charge_model import ChargeModel
from splitveil.active_party.defenses.example_keys import NoiseKey, key_name
from splitveil.active_party.defenses.label_mechanisms import (
    GaussianLabels,
    LabelMechanism,
    LaplaceLabels,
    at_leak_auc,
    draw_noisy_labels,
    evidence,
    label_leak,
    strength_name,
)
from splitveil.active_party.defenses.noisy_sums import NoisySums
from splitveil.active_party.defenses.rows import as_rows, check_labels
from splitveil.active_party.defenses.section import SeededDefense, Traits, require_key
from splitveil.common.privacy.charge import Adversary, Charge, noise_digest


def _word_of_true(value: object) -> object:
    return "true" if value is True else value


class NoisyLabelDefense(SeededDefense):
    """Send gradients of noisy labels, or in a one-shot run a release of noisy labels or sums."""

    name: Literal["noisy_label"] = "noisy_label"

    mechanism: LabelMechanism = GaussianLabels(kind="gaussian")
    """The kind and strength of the noise, drawn once per example from the key at
    ``noise_key_path``; of noisy sums, once per sum and anew in each run."""

    top_labels: Annotated[Literal["noisy", "true"], BeforeValidator(_word_of_true)] = "noisy"
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
        if is_noisy:
            covers = "Everything that the peer receives is a function of features and noisy labels."
        else:
            covers = (
                "With top_labels true, the charge of the noisy label describes a peer that sends "
                "its model's activations, and what it learns beyond the model's predictions. It "
                "does not describe one that chooses activations to make the top model learn single "
                "labels."
            )
        return Traits(
            Adversary.ANYBODY if is_noisy else Adversary.HONEST_BUT_CURIOUS,
            covers,
            takes_numbers=True,  # depending on the mechanism, see _refusal
            top_learns_targets=is_noisy,
            model_is_label_free=is_noisy,
            subject_column=self.subject_column,
        )

    def _build(self, given: interface.BuildInputs, /) -> interface.Defense:
        num_classes, examples = given.context.num_classes, given.examples
        if given.context.releases_sums and isinstance(self.mechanism, GaussianLabels):
            return NoisySums(self.mechanism.noise_ratio, self.charge(num_classes), given)
        key, noisy = require_key(given.secrets.noise_key, self.name), None
        if examples is not None:
            noisy = draw_noisy_labels(
                self._drawn(given.context), examples.labels, key, examples.ids, num_classes
            ).to(examples.device)
        return NoisyLabel(self, key, num_classes, noisy, "" if examples is None else examples.whose)

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
        return replace(
            leak,
            noise_identity=noise_identity,
            # A top model that knows the labels leaves no bound on the odds.
            epsilon=leak.epsilon if self.top_labels == "noisy" else math.inf,
            adversary=self.traits.adversary,
        )

    def charge_model(self, context: interface.DefenseContext, /) -> ChargeModel:
        said = (
            "Exact, whatever the gradients."
            if self.top_labels == "noisy"
            else "Charges of noisy labels depend only on their mechanism."
        )
        noise: Literal["fresh", "persistent"] = "fresh" if context.releases_sums else "persistent"
        return ChargeModel.exact(self.charge(context.num_classes), said, noise)

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
        # The noise is in the labels: nothing is added to the gradient.
        self._report = interface.DefenseReport(0.0, charge=settings.charge(num_classes, identity))

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
        return interface.Defended(interface.DefendedGradient(values), self._report)

    def defend(self, batch: interface.Step) -> interface.Defended:
        """Return the values unchanged. The labels' values are checked but not used."""
        check_labels(batch.labels, as_rows(batch.gradients), self._num_classes)
        return interface.Defended(
            interface.DefendedGradient(batch.gradients.detach()), self._report
        )
