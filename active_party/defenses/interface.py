"""The interface of a defense, a raw gradient in and a defended one out, and of the loss before it.

It also has the facts about a run that a defense is built from.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from splitveil.active_party.defenses.class_statistics import RunningClasses
from splitveil.active_party.defenses.example_keys import NoiseKey
from splitveil.active_party.defenses.noise import DrawKeys
from splitveil.active_party.defenses.rows import all_finite
from splitveil.active_party.defenses.sum_kl import NoiseSolution
from splitveil.common.data.features import Features
from splitveil.common.data.settings import ONE_NUMBER
from splitveil.common.privacy.charge import UNBOUNDED, Charge
from splitveil.common.run import messages
from splitveil.common.run.progress import State

DefendedGradient = messages.DefendedGradient  # may leave the active party; only defenses create one


class DefenseContext(NamedTuple):
    """The facts about a run that a defense depends on."""

    cut_shape: tuple[int, ...]  # shape of one row of the gradient
    num_classes: int = 2  # ``ONE_NUMBER`` for numbers, as shares within 0 and 1
    pos_fraction: float = 0.5
    """Share of positives among the training rows, above 0 and below 1; with several classes and
    with numbers, charges do not depend on it. For numbers: the share at which labels of 0 and 1
    would have the same variance."""
    epochs: int = 1  # number of epochs of the run
    label_bounds: tuple[float, float] | None = None  # of numbers, in their unit
    labels: str = ""  # what they are: their column, and what 0, 1 or a class stands for
    is_one_shot: bool = False  # whether there are no gradients, but at most a release of labels
    releases_sums: bool = False  # whether that release is noisy sums
    rows_of_person: int = 1  # largest number of released rows whose labels are bounded together

    @property
    def is_number(self) -> bool:
        """True if labels are numbers."""
        return self.num_classes == ONE_NUMBER

    @property
    def cut_dim(self) -> int:
        """Number of values in one row of the gradient."""
        return math.prod(self.cut_shape)


class Secrets(NamedTuple):
    """The keys of a defense's noise, and the aligned examples of a run, in the common order."""

    noise_key: NoiseKey | None = None  # of persistent noise and noisy labels, if needed
    draw_keys: DrawKeys | None = None
    """The source of the keys of fresh noise. If it is None, they come from the operating system,
    or in tests from the settings' ``insecure_noise_seed``."""
    ids: Sequence[str] = ()  # canonical ids; empty if the defense does not have a noise key
    labels: Tensor | None = None  # true labels, (aligned,), for a defense that replaces them
    device: torch.device = torch.device("cpu")  # the device of the top model
    whose: str = ""  # digest of whose rows are released, if rows of one person are bounded together


NO_SECRETS = Secrets()


class Defended(NamedTuple):
    """A defense's answer to one batch."""

    gradient: DefendedGradient  # of the same shape, dtype and device as the raw gradient
    charge: Charge = UNBOUNDED  # of each example of the batch
    noise_power: float = 0.0  # mean expected squared noise norm per example
    solution: NoiseSolution | None = None  # the noise of each class, where a solver chose it


def _no_logits() -> Tensor:
    raise ValueError("there is no model to ask for a prediction")


_LATER: Any = None


@dataclass(slots=True, eq=False)
class Step:
    """One batch on its way through the label owner's half; each stage fills in what it computes.

    ``Defense.targets`` gets what is known before the loss, the objective adds the gradient and its
    loss, and ``Defense.defend`` gets all of that. Only the gradient in ``defended`` may leave the
    active party. A custom training loop gives gradients and labels, and what else it has.
    """

    gradients: Tensor = _LATER
    """Raw gradient at the cut layer, (batch, *cut_shape), float32 or float64."""
    labels: Tensor = _LATER  # true, (batch,) or (batch, 1), any dtype: 0 and 1, or class indices
    example_keys: Tensor | None = None
    """Secret bits of each example's id, (batch, 2) int64 on the CPU; the source of persistent
    noise. None where the settings do not ask for them."""
    probabilities: Tensor = _LATER
    """The model's predictions, (batch,) for label 1 or of a number, or (batch, classes)."""
    label_move: float | None = None
    """The largest move of a row by its own label; None if the gap of the class means represents it,
    as it does for a cross entropy."""
    slopes: Tensor | None = None
    """The gradient at the cut layer for each unit of a logit's residual p - y, which holds no
    label: (batch, *cut_shape), or (batch, classes, *cut_shape). None if neither the settings nor
    the monitor ask for it, or if the gradient is not that of a cross entropy."""
    # Of a run, before the loss.
    rows: Tensor = _LATER  # positions in the common order, (batch,), on the device of training
    activation: Tensor = _LATER  # the aggregated activation, (batch, *cut_shape), without a graph
    logits: Callable[[], Tensor] = _no_logits
    """Computes what the top model predicts at this step, (batch,) or (batch, classes), without a
    graph, dropout or any trace in the model. Costs a pass through the top model, if it is asked."""
    weights: Tensor | None = None  # of each row in the loss, (batch,); None if all count 1
    own: Features | None = None  # this party's features of the rows
    # After the loss.
    targets: Tensor = _LATER  # labels of the loss, (batch,): true ones, or a defense's replacements
    loss: Tensor = _LATER
    """Cross entropy or squared error of the prediction, mean over the batch; with its graph until
    the model has learned from it."""
    outputs: Tensor | None = None
    """Outputs of the model, with their graph, where ``gradients`` is the gradient of their cross
    entropy or squared error: (batch,), or (batch, classes); None for another loss."""
    # After the defense.
    defended: Defended = _LATER  # its gradient is sent in place of ``gradients``


Schedule = Callable[[int], float]  # maps a step to the multiplier of the learning rate


class TopModel(NamedTuple):
    """A top model and the means of its optimisation."""

    model: nn.Module  # maps (activation, own features or None) to logits
    optimizer: Optimizer
    schedule: Schedule


class Objective(Protocol):
    """A top model and the way it learns."""

    model: nn.Module
    """The model that makes the predictions. Maps (activation, own features or None) to logits,
    (batch,), or (batch, classes) with several classes."""

    def compute(self, step: Step, /) -> None:
        """Fill in gradient, probabilities, loss, and what else follows from it.

        The activation requires a gradient; the loss compares with ``targets``.
        """
        ...

    def learn(self, step: Step, /) -> None:
        """Do the rest of the step once the answer has been sent."""
        ...

    def state_dict(self) -> State:
        """Return everything that a step changes."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Return to the step at which ``state_dict`` was taken."""
        ...


def descend(loss: Tensor, parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """Take one optimiser step on the loss; nothing else in its graph keeps a gradient."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimizer.zero_grad(set_to_none=True)
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


class Defense(ABC):
    """Turns raw gradients into gradients that may be sent.

    A subclass has to define `defend`. All other methods have defaults for a stateless defense that
    adds noise to the gradient of the true labels.
    """

    @abstractmethod
    def defend(self, batch: Step) -> Defended:
        """Defend the gradients of one batch.

        Raises ValueError if shapes do not fit, a gradient is not finite, or a label is out of
        range.
        """

    def targets(self, batch: Step, /) -> Tensor:
        """Return the labels behind the batch's gradient, (batch,); called once a step, in order."""
        return batch.labels

    def released_labels(self, _rows: Tensor, /) -> Defended:
        """Return noisy labels of rows by position, (rows, values) on the CPU, or noisy sums."""
        raise ValueError("this defense releases no labels")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that later batches need about earlier ones; empty by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a state; raises ValueError if it belongs to another defense."""
        if state:
            raise ValueError(f"this defense keeps no state, got {sorted(state)}")


class RememberingDefense(Defense):
    """A defense whose only state is a memory of earlier batches, or that of a defense behind it."""

    def __init__(self, memory: RunningClasses | Defense) -> None:
        self._memory = memory

    def state_dict(self) -> dict[str, Tensor]:
        return self._memory.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._memory.load_state_dict(state)


def release(rows: Tensor, gradients: Tensor) -> DefendedGradient:
    """Give defended rows the raw gradient's shape, finite values, and mark them fit to leave."""
    # A GPU would have to be waited for; on the CPU, looking is quicker than replacing nothing.
    if rows.is_cuda or not all_finite(rows):
        limit = torch.finfo(rows.dtype).max
        torch.nan_to_num_(rows, nan=0.0, posinf=limit, neginf=-limit)
    return DefendedGradient(rows.reshape(gradients.shape))
