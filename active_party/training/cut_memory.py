"""The activation of each row's last visit, and facts about rows that no label enters.

The facts are computed from these activations, the active party's own features and the top model as
it is; no label enters them as long as the top model has seen none.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from splitveil.active_party.defenses.projected.features import RowChunk
from splitveil.common.data.features import Features
from splitveil.common.run.progress import State

CHUNK_ROWS = 16_384

_MOST_CATEGORIES = 32
"""Categories of a column beyond which it says nothing here: its indicators would be too many."""
_MOST_COLUMNS = 128


class CutMemory:
    """The last activation of each aligned row; zeros for a row that was not visited yet."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._device = device
        self._values: Tensor | None = None

    @property
    def is_filled(self) -> bool:
        return self._values is not None

    def note(self, rows: Tensor, activation: Tensor) -> None:
        """Remember the activations of a batch."""
        if self._values is None:
            shape = (self._num_rows, *activation.shape[1:])
            self._values = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self._values[rows.to(self._device)] = activation.detach().to(self._values)

    def at(self, rows: Tensor) -> Tensor:
        """Return the last activations of some rows, (rows, *cut_shape) float32."""
        if self._values is None:
            raise RuntimeError("no activation was noted yet")
        return self._values[rows.to(self._device)]

    def state_dict(self) -> State:
        return {} if self._values is None else {"values": self._values}

    def load_state_dict(self, state: State) -> None:
        values = state.get("values")
        if values is not None and len(values) != self._num_rows:
            raise ValueError(f"expected activations of {self._num_rows} rows, got {len(values)}")
        self._values = None if values is None else values.to(self._device, copy=True)


class LabelFreeFacts:
    """Yields facts about the training rows, chunk by chunk."""

    def __init__(
        self,
        model: nn.Module,
        memory: CutMemory,
        features: Features | None,
        training: Tensor,
        device: torch.device,
    ) -> None:
        self._model = model
        self._memory = memory
        self._features = features
        self._training = training
        self._device = device
        self._num_categories = _numbers_of_categories(features)

    def __call__(self) -> Iterator[RowChunk]:
        """Yield the facts, in ascending order of the rows; the model is not changed."""
        with self._evaluating():
            for rows in torch.split(self._training, CHUNK_ROWS):
                yield self._chunk(rows)

    def logits(self) -> Iterator[Tensor]:
        """Yield the model's logits only, (rows,) or (rows, classes)."""
        with self._evaluating():
            for rows in torch.split(self._training, CHUNK_ROWS):
                with torch.no_grad():
                    logits: Tensor = self._model(self._cut(rows), self._own(rows))
                yield logits

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        was_training = self._model.training
        self._model.eval()
        try:
            yield
        finally:
            self._model.train(was_training)

    def _cut(self, rows: Tensor) -> Tensor:
        return self._memory.at(rows).to(self._device)

    def _own(self, rows: Tensor) -> Features | None:
        return None if self._features is None else self._features.rows(rows.to(self._device))

    def _chunk(self, rows: Tensor) -> RowChunk:
        cut = self._cut(rows).requires_grad_()
        own = self._own(rows)
        with _listening_to_last_layer(self._model) as inputs:
            logits = self._model(cut, own)
        hidden = inputs[-1].detach().flatten(1) if inputs else None
        (slopes,) = torch.autograd.grad(_steepest(logits).sum(), cut)
        return RowChunk(
            cut.detach().flatten(1),
            self._as_numbers(own),
            None if hidden is None or len(hidden) != len(rows) else hidden,
            logits.detach(),
            slopes.flatten(1),
        )

    def _as_numbers(self, own: Features | None) -> Tensor | None:
        if own is None:
            return None
        parts = [] if own.numeric is None else [own.numeric]
        if own.categorical is not None:
            parts += [
                one_hot(slots, count).to(torch.float32)
                for slots, count in zip(own.categorical.T, self._num_categories, strict=True)
                if count <= _MOST_CATEGORIES
            ]
        return torch.cat(parts, dim=1)[:, :_MOST_COLUMNS] if parts else None


def _numbers_of_categories(features: Features | None) -> list[int]:
    if features is None or features.categorical is None:
        return []
    return [int(slots.max()) + 1 for slots in features.categorical.T]


def _steepest(logits: Tensor) -> Tensor:
    """Return one number per row whose slope shows where the activation matters most."""
    if logits.ndim == 1:
        return logits
    return logits.max(dim=1).values - logits.mean(dim=1)


@contextmanager
def _listening_to_last_layer(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of the model's linear layers; the last is that of the output layer."""
    inputs: list[Tensor] = []

    def note(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        inputs.append(given[0])

    hooks = [
        part.register_forward_pre_hook(note)
        for part in model.modules()
        if isinstance(part, nn.Linear)
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
