"""The active party's half of the network: its computations, without any rule of the protocol."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from splitveil.active_party.defenses.interface import Defended, Defense, Objective, Step
from splitveil.active_party.defenses.noise import AnswerKeys
from splitveil.active_party.defenses.noisy_sums import NoisySums
from splitveil.active_party.training.boosting import WithTrees
from splitveil.active_party.training.evaluation import HeldOutPredictions
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind, LossWeights
from splitveil.active_party.training.own_models import CutMemory, KnownRows
from splitveil.common.data.features import Features
from splitveil.common.errors import SplitveilError
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.device import check_same_gpu, gpu_of, to_device
from splitveil.common.models.optimizers import in_training_mode, random_state, set_random_state
from splitveil.common.run.progress import Phase, Phases, State
from splitveil.common.run.sample_order import Positions
from splitveil.common.text.imports import fault_of_own_code

Refit = Callable[[KnownRows, Tensor, nn.Module | None], nn.Module]
"""Fits a new top model on some rows; returns it, or the given one if that is no worse."""


class TrainingRows(NamedTuple):
    """The active party's data about the aligned rows, in the common order."""

    labels: Tensor
    """0 or 1, class indices, or shares of the range if labels are numbers, (aligned,)."""
    features: Features | None = None
    num_classes: int = 2
    example_keys: Tensor | None = None
    """Secret bits of each id, (aligned, 2) int64 on the CPU, if the defense needs them."""
    digest: str = ""  # distinguishes these data from other data when the run is resumed later
    noise_key: str = ""  # names the key of the noise that belongs to examples, if there is one
    persons: NDArray[np.uint8] | None = None
    """Names of the persons of all rows of the table, (rows, 16); None if rows count alone."""
    weights: LossWeights = LossWeights()
    training: Tensor | None = None
    """Positions of the training rows, (training rows,) int64, ascending, if the activations of all
    rows are to be remembered; None if nothing needs them."""
    kind: LabelKind = CLASS_LABELS
    refit: Refit | None = None  # what fits a new top model to these rows once the run is over


class TopTrainer:
    """Trains the top model on this party's rows, and defends every gradient that it returns."""

    def __init__(
        self,
        objective: Objective,
        defense: Defense,
        rows: TrainingRows,
        device: torch.device,
        answer_keys: AnswerKeys | None = None,
        phases: Phases | None = None,
        *,
        gives_slopes: bool = False,
    ) -> None:
        self.data_digest = rows.digest
        self.noise_key = rows.noise_key
        self.persons = rows.persons
        self.num_classes = rows.num_classes
        self.kind = rows.kind
        self.defense = defense
        self.phases = phases or Phases()
        self._objective = objective
        self._features = None if rows.features is None else rows.features.to(device)
        self._labels = rows.labels.to(device, torch.float32)
        self._weights = rows.weights
        self._device = device
        self._example_keys = rows.example_keys
        self._answer_keys = answer_keys
        self._gives_slopes = gives_slopes
        self._refit = rows.refit
        self._unlearned: Step | None = None
        self._training = rows.training
        self.memory = None if rows.training is None else CutMemory(len(rows.labels), device)

    @property
    def model(self) -> nn.Module:
        return self._objective.model

    @property
    def is_between_steps(self) -> bool:
        """True if the model has learned from the last step, so that the state is complete."""
        return self._unlearned is None

    def released_labels(self, positions: Positions, answer_key: bytes) -> Defended:
        """Return the defense's release of some training rows' labels, or of their sums."""
        if self._answer_keys is not None:
            self._answer_keys.begin(answer_key)
        rows = torch.from_numpy(positions.copy()).to(self._device)
        with self._defending("labels cannot be released"):
            return self.defense.released_labels(rows)

    @property
    def sums(self) -> NoisySums:
        """The defense of a run with noisy sums."""
        if not isinstance(self.defense, NoisySums):
            raise SplitveilError("this defense releases no sums")
        return self.defense

    def gradient(
        self, positions: Positions, activation: Tensor, answer_key: bytes | None = None
    ) -> Step:
        """Compute the gradient at the cut layer and defend it.

        Everything that need not come before the answer follows in ``learn``, so that the peer need
        not wait for it.
        """
        self.learn()
        if self._answer_keys is not None and answer_key is not None:
            self._answer_keys.begin(answer_key)
        positions = positions.copy()
        rows = torch.from_numpy(positions).to(self._device)
        cut = to_device(activation, self._device, torch.float32).detach()
        keys = self._example_keys
        step = Step(
            labels=self._labels.index_select(0, rows),
            example_keys=None if keys is None else keys[torch.from_numpy(positions)],
            rows=rows,
            activation=cut,
            logits=lambda: self._logits(rows, cut.detach()),
            weights=None if self._weights.of_rows is None else self._weights.of_rows[rows],
            own=self._own(rows),
        )
        with self._defending("the defense has no targets to train on"):
            step.targets = self.defense.targets(step)
        in_training_mode(self.model)
        with self.phases(Phase.FORWARD):
            cut.requires_grad_()
            self._objective.compute(step)
            if self._gives_slopes:
                step.slopes = _slopes(step, self.kind.slope_of_residual)
        step.activation = cut.detach()
        with self._defending("a gradient cannot be defended"):
            step.defended = self.defense.defend(step)
        self._unlearned = step
        return step

    @contextmanager
    def _defending(self, failure: str) -> Iterator[None]:
        try:
            with self.phases(Phase.DEFENSE):
                yield
        except ValueError as error:
            own = fault_of_own_code(error)
            raise own or SplitveilError(f"{failure}: {error}") from error

    def learn(self) -> None:
        """Let the top model learn from the last step, and note its activations, if not yet done."""
        if self._unlearned is None:
            return
        step = self._unlearned
        with self.phases(Phase.BACKWARD):
            self._objective.learn(step)
        step.loss, step.outputs = step.loss.detach(), None  # without the graph
        self.note(step.rows, step.activation)
        self._unlearned = None  # only now: half-learned weights must not count as a state

    def refitted(self, *, may_stay: bool = True) -> nn.Module | None:
        """Return a new top model fitted to true labels, or the trained one if that is no worse.

        None without activations to learn from. Call it after the last answer; nothing of it may be
        sent.
        """
        if self._refit is None or self.memory is None or self._training is None:
            return None
        self.learn()
        trained = self.model if may_stay else None
        return self._refit(self._known(self.memory), self._training, trained)

    def fit_top(self) -> nn.Module | None:
        """Fit the model of a one-shot run that is over; return its mean with trees, if better."""
        fitted = self.refitted(may_stay=False)
        if fitted is None:
            raise RuntimeError("a one-shot run is over, and its activations are not there")
        network = fitted.model if isinstance(fitted, WithTrees) else fitted
        self.model.load_state_dict(network.state_dict())
        return None if network is fitted else fitted

    def rows_alone(self) -> KnownRows | None:
        """Return what this party knows of all aligned rows by itself; None without features."""
        if self._features is None:
            return None
        cpu = torch.device("cpu")
        on_cpu = LossWeights(*(None if one is None else one.cpu() for one in self._weights))
        return KnownRows(self._labels.cpu(), self._features.to(cpu), weights=on_cpu, kind=self.kind)

    def logits(
        self, positions: Positions, model: nn.Module | None = None
    ) -> HeldOutPredictions | None:
        """Return logits and labels of some rows at their last activations, on the CPU, if known."""
        if self.memory is None or not self.memory.is_filled or not len(positions):
            return None
        rows = torch.from_numpy(positions.copy())
        logits = self._known(self.memory).logits(model or self.model, rows)
        return HeldOutPredictions(logits.cpu(), self.labels_of(positions))

    def _known(self, memory: CutMemory) -> KnownRows:
        return KnownRows(self._labels, self._features, memory, self._weights, self.kind)

    def predict(self, positions: Positions, activation: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and labels of some rows, on the CPU, without learning."""
        self.learn()
        rows = torch.from_numpy(positions.copy()).to(self._device)
        self.note(rows, activation)
        logits = self._logits(rows, to_device(activation, self._device, torch.float32))
        return logits.cpu(), self._labels[rows].cpu()

    def _logits(self, rows: Tensor, activation: Tensor) -> Tensor:
        return predict_in_blocks(self.model, activation, self._own(rows))

    def state_dict(self) -> State:
        """Return everything that a step changes."""
        if not self.is_between_steps:
            raise RuntimeError("no state in the middle of a step")
        return {
            "objective": self._objective.state_dict(),
            "defense": self.defense.state_dict(),
            "random": random_state(self._device),
            "gpu": gpu_of(self._device),
            "cut": {} if self.memory is None else self.memory.state_dict(),
        }

    def check_device(self, state: State) -> None:
        """Refuse a state of another GPU, or of a CPU instead of one, with SettingsError."""
        check_same_gpu(self._device, state)

    def load_state_dict(self, state: State) -> None:
        self.check_device(state)
        self._unlearned = None
        self._objective.load_state_dict(state["objective"])
        self.defense.load_state_dict(state["defense"])
        set_random_state(self._device, state["random"])
        if self.memory is not None:
            self.memory.load_state_dict(state["cut"])

    def labels_of(self, positions: Positions) -> Tensor:
        """Return the true labels of some rows, (rows,), on the CPU."""
        return self._labels[torch.from_numpy(positions.copy()).to(self._device)].cpu()

    def note(self, rows: Tensor, activation: Tensor) -> None:
        """Remember the activations of some rows, without a step."""
        if self.memory is not None:
            self.memory.note(rows, activation)

    def _own(self, rows: Tensor) -> Features | None:
        return None if self._features is None else self._features.rows(rows)


def _slopes(step: Step, of_residual: float) -> Tensor | None:
    """Return each logit's slope in each row's activation, times the row's share of the loss."""
    logits, cut, shares = step.outputs, step.activation, step.weights
    if logits is None:
        return None
    shares = logits.new_ones(len(logits)) if shares is None else shares
    if logits.ndim == 1:
        (slopes,) = torch.autograd.grad(logits, cut, shares, retain_graph=True)
    else:
        each = [torch.autograd.grad(one, cut, shares, retain_graph=True)[0] for one in logits.T]
        slopes = torch.stack(each, dim=1)
    return of_residual * (slopes / len(cut))
