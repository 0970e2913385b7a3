"""The settings that every defense shares, and the questions a run asks them.

The settings class of a defense is its front door: it builds the defense, and only it knows which
noise key the defense needs, which charges to expect, and where the defense cannot be used. Other
modules read its `Traits` or ask it, and never check which defense it is.

Weights in the loss (``refusal_of_weights``): a defended gradient is that of w_i c_y times the loss
of row i, with the row's own weight w_i and the weight c_y of its class, a fixed number. A defense
that replaces labels by targets multiplies by the targets' shares of the labels, so that the
gradient stays a function of what was released; one that adds noise measures the weighted gradients;
persistent noise does not measure. The peer reads w off the gradients' lengths, whatever replaces
the label in the loss.
"""

import logging
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, final

import numpy.typing as npt
import torch
from pydantic import Field, ValidationError, model_validator
from torch import Tensor, nn

from splitveil.active_party.defenses import example_keys, interface
from splitveil.active_party.defenses.noise import AnswerKeys, NoiseSource, fresh_key
from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import SettingsError
from splitveil.common.privacy.charge import UNBOUNDED, Adversary, Charge
from splitveil.common.settings import Mark, Section, full_name, validate

SEE = "docs/defenses.md, section 'Which bounds do not hold'"


_CLASS_MEANS = (
    "The charges of fresh noise compare the class means of a batch. They do not describe a peer "
    "that looks at anything else, such as the energy of single rows or what the model predicts "
    f"for an example: see {SEE}."
)
_HONEST_BUT_CURIOUS = (
    "The charges of persistent noise describe a peer that sends its model's activations. They do "
    f"not describe one that chooses its activations: see {SEE}."
)


class ChargeModel(NamedTuple):
    """The charge of some answers of a run, as precisely as it is known before the run.

    The defense, the epochs and the labels are known then; the gradients are not. So the divergence
    is one of four kinds:

        exact       ``charge``, as only the strength decides: persistent noise, noisy labels or
                    sums, no credit at all
        bound       ``charge`` at most; proved where it is computed
        estimate    from ``low`` to ``charge`` for batches that are as the estimate assumes. Others
                    are charged more, up to infinity, and so may the run be
        unknown     only the gradients decide
    """

    low: float  # the lowest divergence
    charge: Charge  # with the highest divergence, and all its other figures
    certainty: Literal["exact", "bound", "estimate", "unknown"]
    said: str  # a sentence about how reliable it is
    covers: str = _CLASS_MEANS  # a sentence about the peers whom the charge describes
    noise: Literal["fresh", "persistent"] = "fresh"  # one charge of persistent noise covers a run
    refusal: str | None = None  # why the first answer exceeds every budget; None if it need not
    answers: int = 1

    @classmethod
    def exact(
        cls,
        charge: Charge,
        said: str,
        noise: Literal["fresh", "persistent"] = "fresh",
        refusal: str | None = None,
        covers: str = _CLASS_MEANS,
    ) -> Self:
        """Return a charge that the settings determine."""
        return cls(charge.sum_kl, charge, "exact", said, covers, noise, refusal)

    @classmethod
    def of_gradients(cls, name: str) -> Self:
        """Return the charge of a defense, by name, before there is a gradient."""
        said = (
            f"The charge of {name} depends on the gradients alone: nothing can be said "
            "before the run. Its ledger says it after each epoch."
        )
        return cls(0.0, UNBOUNDED, "unknown", said)

    @property
    def high(self) -> float:
        return self.charge.sum_kl

    @property
    def is_promise(self) -> bool:
        """True if a run is never charged more than ``high``."""
        return self.certainty in ("exact", "bound")

    def over(self, answers: int) -> Self:
        """Return what several answers are charged together, where this is the charge of one."""
        if self.noise == "persistent" or answers == 1:
            return self._replace(answers=answers)
        one = self.charge
        whole = Charge(self.high * answers, adversary=one.adversary, is_gaussian=one.is_gaussian)
        return self._replace(low=self.low * answers, charge=whole, answers=answers)

    def narrowed(self, peers: Adversary) -> Self:
        """Return the same for no more peers than these."""
        return self._replace(charge=self.charge.narrowed(peers))


class Traits(NamedTuple):
    """The facts that a run needs about any defense."""

    takes_numbers: bool = False  # whether labels may be numbers within bounds, and not only classes
    takes_weights: bool = True  # whether the loss can have weights of rows and classes
    needs_example_keys: bool = False  # whether ``Step.example_keys`` has to be given
    needs_slopes: bool = False  # whether ``Step.slopes`` has to be given
    has_own_objective: bool = False  # whether ``DefenseSection.objective`` returns one
    top_learns_targets: bool = True  # from ``Defense.targets``, and not from true labels
    model_is_label_free: bool = False  # depends on labels through releases only
    subject_column: str | None = None  # of the table, if rows of one person are bounded together


class DefenseSection(Section):
    """The base of all defenses' settings, with the answers for a defense without noise.

    A setting that only an inner section has may stand outside of it: ``power_ratio`` of
    ``marvell`` for that of its ``strength``.
    """

    __slots__ = ("_begun",)  # no part of pydantic's state: neither compared, nor copied or pickled

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError:
            validate(type(self), settings, self.title)  # the same problems, as of a file
            raise

    # As pydantic marks its own: a file's sections are validated all at once, and not by calls.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @model_validator(mode="before")
    @classmethod
    def _with_names_of_inner_sections(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        values = dict(values)
        for name in values.keys() - cls.model_fields.keys():
            outer, *within = full_name(cls, str(name)).split(".")
            inner = values.get(outer, {})
            if within and isinstance(inner, dict) and not inner.keys() & {name, within[0]}:
                values[outer] = {**inner, name: values.pop(name)}
        return values

    @final
    def __call__(
        self,
        gradients: Tensor | npt.NDArray[Any],
        labels: Tensor | Sequence[float] | npt.NDArray[Any],
        *,
        probabilities: Tensor | Sequence[float] | npt.NDArray[Any] | None = None,
        num_classes: int = 2,
    ) -> interface.Defended:
        """Defend the gradient of one batch in a custom training loop, as a run does.

        Fresh noise comes from the operating system's entropy, and never from torch's global
        generator; with ``insecure_noise_seed`` it is repeatable. Batches that lack a class are
        compared with earlier ones, so that each training needs a section of its own.

        Args:
            gradients: raw gradient at the cut, (batch, ...), float32 or float64.
            labels: 0 and 1, or class indices, (batch,).
            probabilities: predictions for label 1, (batch,), which ``max_norm_positive`` needs.
            num_classes: number of classes of the whole table.

        Returns:
            The gradient to send, and a report, whose ``charge`` is for ``Ledger.charge``.

        Raises:
            SettingsError: the defense needs more than a gradient, or not so many classes.
            ValueError: a shape, a dtype or a value does not fit.
        """
        gradients, labels = torch.as_tensor(gradients), torch.as_tensor(labels)
        context = interface.DefenseContext(tuple(gradients.shape[1:]), num_classes)
        if not hasattr(self, "_begun"):
            objection = self._objection_to_calls(context) or self.objection(context)
            if objection is not None:
                raise SettingsError(objection)
            self._begun = context, self.build(context)
        begun, defense = self._begun
        if context != begun:
            raise ValueError(
                f"expected rows of shape {begun.cut_shape} and {begun.num_classes} classes, as "
                f"before, got {context.cut_shape} and {num_classes}; another cut needs another "
                f"{type(self).__name__}"
            )
        step = interface.Step(gradients, labels)
        if probabilities is not None:
            step.probabilities = torch.as_tensor(probabilities)
        return defense.defend(step)

    def _objection_to_calls(self, context: interface.DefenseContext) -> str | None:
        if self.traits.has_own_objective:
            needs = "has a loss of its own, with a critic that learns in every step"
        elif self.traits.needs_slopes:
            needs = "with noise: persistent needs ids, a noise key and the slopes of logits"
        elif self._replaces_labels(context):
            needs = "replaces labels before there is a gradient"
        else:
            return None
        return (
            f"{self.title} {needs}: expected simulate(..., defense=...), or marvell, iso or "
            f"max_norm with noise: fresh"
        )

    def _replaces_labels(self, context: interface.DefenseContext) -> bool:
        return self.noise_key_strength(context) is not None

    @property
    def title(self) -> str:
        """The name that the settings choose the defense by."""
        return str(type(self).model_fields["name"].default)

    @property
    def noise_seed(self) -> int | None:
        """The seed that replaces all secrets in tests; None outside tests."""
        return None

    @property
    def traits(self) -> Traits:
        """The facts that a run with these settings needs about the defense."""
        return Traits()

    @final
    def build(
        self,
        context: interface.DefenseContext,
        secrets: interface.Secrets = interface.NO_SECRETS,
    ) -> interface.Defense:
        """Build the defense.

        Raises ValueError if it is refused or lacks a noise key that it needs, and SettingsError if
        a class written by the user cannot be loaded or built.
        """
        objection = self.objection(context)
        if objection is not None:
            raise ValueError(objection)
        return self._build(context, secrets)

    @final
    def objection(self, context: interface.DefenseContext) -> str | None:
        """Explain why the defense cannot be used with these labels; None if it can."""
        if context.is_number and not self.traits.takes_numbers:
            return (
                f"{self.title} is defined for classes alone; with data.label_range expected "
                f"noisy_label by gaussian or laplace noise, or none"
            )
        return self._refusal(context)

    @abstractmethod
    def _build(
        self, context: interface.DefenseContext, secrets: interface.Secrets, /
    ) -> interface.Defense:
        """Build the defense, which is not refused; raises what ``build`` does."""

    @abstractmethod
    def charge_model(self, context: interface.DefenseContext, /) -> ChargeModel:
        """Return the charge of one answer, as precisely as it is known before the run."""

    def charge_models(self, context: interface.DefenseContext) -> tuple[ChargeModel, ...]:
        """Return the charge of one answer for each kind of noise that may be chosen."""
        return (self.charge_model(context),)

    def noise_key_strength(self, _context: interface.DefenseContext, /) -> str | None:
        """Name the strength that the noise key is derived for; None if no key is needed.

        The same noise at two strengths would give two equations for noise and label.
        """
        return None

    def _refusal(self, _context: interface.DefenseContext, /) -> str | None:
        return None

    def at_leak_auc(self, _leak_auc: float, _context: interface.DefenseContext, /) -> Self | None:
        """Return these settings at the strength that bounds a run's leak AUC for every peer.

        The bound, above 0.5 and below 1, is exact: it is met by the best score. None if no strength
        of this defense holds against everybody.
        """
        return None

    def one_shot_refusal(self, release: str | None) -> str | None:
        """Explain why it cannot be the defense of a one-shot run; None if it can."""
        expected = "none" if release is None else "noisy_label by gaussian noise"
        return (
            f"{self.title} defends gradients, and a one-shot run sends none: expected {expected}, "
            f"as contract.release: {release or 'null'} says"
        )

    def objective(
        self, _top: interface.TopModel, _secrets: interface.Secrets, /
    ) -> interface.Objective | None:
        """Return the top model's objective; None for the cross entropy of its logits."""
        return None

    def predicting(self, model: nn.Module, /) -> nn.Module:
        """Return what makes a run's predictions, and is saved, around a top model."""
        return model

    def require_usable(self, _context: interface.DefenseContext, /) -> None:
        """Raise SettingsError for everything that could otherwise fail only during the run."""

    def open_noise_key(
        self, context: interface.DefenseContext, path: Path
    ) -> example_keys.NoiseKey | None:
        """Return the key of the defense's noise; None if it needs no key.

        The file yields a key for each strength, and for each meaning of the labels: the same noise
        on two labels would reveal their difference. Raises what ``load_or_create_key`` does.
        """
        strength = self.noise_key_strength(context)
        if strength is None:
            return None
        drawn = f"{strength} of {context.labels}"
        if self.noise_seed is None:
            return example_keys.key_for(example_keys.load_or_create_key(path), drawn)
        warn_about_seed()
        return example_keys.key_for(example_keys.key_from_insecure_seed(self.noise_seed), drawn)


class SeededDefense(DefenseSection):
    """The settings of every defense that draws random numbers."""

    insecure_noise_seed: Annotated[int | None, Mark.HIDDEN, Mark.SEED] = Field(
        default=None, ge=0, lt=2**63
    )
    """For tests only: anyone who knows the seed can reproduce everything that the defense draws,
    and so remove the noise. A run without it takes nothing over from a run with it, such as
    ``simulate`` starts. Without it, the noise is unpredictable."""

    @property
    def noise_seed(self) -> int | None:
        return self.insecure_noise_seed


class NoisyDefense(SeededDefense):
    """The settings of every defense that adds noise to gradients."""

    noise: Literal["fresh", "persistent"] = "fresh"
    """``fresh`` noise is drawn again for every answer; the information in the answers adds up over
    epochs.

    ``persistent`` noise belongs to the example for the whole run. For ``marvell`` and ``iso`` it
    repeats one answer however long the run is; for ``max_norm`` it protects only against a peer
    that adds up answers, and the leak ledger does not give a bound. It is drawn from the key at
    ``noise_key_path``.
    """

    @property
    def traits(self) -> Traits:
        is_persistent = self.noise == "persistent"
        return Traits(needs_example_keys=is_persistent, needs_slopes=is_persistent)

    def charge_models(self, context: interface.DefenseContext) -> tuple[ChargeModel, ...]:
        if context.num_classes > 2:
            return super().charge_models(context)
        kinds = (self.model_copy(update={"noise": noise}) for noise in ("fresh", "persistent"))
        return tuple(kind.charge_model(context) for kind in kinds)

    def _noise_source(self, secrets: interface.Secrets) -> NoiseSource:
        if self.noise == "persistent":
            require_key(secrets.noise_key, self.title)
        seed = self.insecure_noise_seed
        if seed is None:
            return NoiseSource(secrets.draw_keys or fresh_key)
        warn_about_seed()
        known = AnswerKeys(example_keys.key_from_insecure_seed(seed))
        return NoiseSource(secrets.draw_keys or known)


class LabelMoveDefense(NoisyDefense):
    """The settings of every defense whose persistent noise is measured by a label's move."""

    def _repeated(self, sum_kl: float) -> ChargeModel:
        """Return the charge of noise drawn once per example, with all its repetitions."""
        charge = Charge(sum_kl, adversary=Adversary.HONEST_BUT_CURIOUS)
        said = "Charges of persistent noise depend only on the strength."
        return ChargeModel.exact(charge, said, "persistent", covers=_HONEST_BUT_CURIOUS)

    def _refusal(self, context: interface.DefenseContext, /) -> str | None:
        if context.num_classes == 2 or self.noise == "fresh":
            return None
        return (
            f"persistent noise of {self.title} is measured by what one label out of two "
            "moves; with several classes expected noise: fresh, or noisy_label"
        )


def refusal_of_several_classes(name: str, context: interface.DefenseContext) -> str | None:
    """Explain that a defense is for two classes only, and name the other defenses."""
    if context.num_classes <= 2:
        return None
    return (
        f"{name} is defined for two classes alone; expected none, iso, max_norm, "
        "marvell or noisy_label"
    )


def require_key(noise_key: example_keys.NoiseKey | None, name: str) -> example_keys.NoiseKey:
    """Return the noise key of a defense that needs one; raises ValueError if it is missing."""
    if noise_key is None:
        raise ValueError(f"{name} with these settings needs a noise key")
    return noise_key


def warn_about_seed() -> None:
    """Warn that noise can be reproduced."""
    logging.getLogger(__name__).warning(
        "INSECURE: insecure_noise_seed is set; whoever knows it subtracts the noise and reads the "
        "labels. It is for tests only."
    )


def refusal_of_weights(
    defense: DefenseSection, data: DataSettings, context: interface.DefenseContext
) -> str | None:
    """Explain why a defense cannot be used with the weights in a run's loss; None if it can."""
    traits, of_rows = defense.traits, data.weight_column is not None
    of_classes = data.class_weights is not None
    if (of_classes or of_rows) and not traits.takes_weights:
        return (
            f"{defense.title} has a loss of its own, which knows no weights: leave out "
            f"data.class_weights and data.weight_column"
        )
    if of_classes and traits.needs_slopes:
        return (
            f"persistent noise of {defense.title} is measured by what a label moves in a loss "
            f"without class weights: leave out data.class_weights, or set noise: fresh"
        )
    is_measured = defense.charge_model(context).charge.adversary is Adversary.CLASS_MEANS
    if of_rows and not (data.weights_are_label_free or is_measured):
        return (
            f"the peer reads data.weight_column off the gradients, so that weights that depend on "
            f"labels would reveal them beside the bound of {defense.title}: set "
            f"data.weights_are_label_free if no label was looked at to choose them"
        )
    return None
