"""A bottom model that is computed, its rows, and what has come of a release, without torch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.features import Features
from splitveil.common.errors import InvalidMessage
from splitveil.common.models.components import FIT_ROWS, ComponentsBottom
from splitveil.common.models.ridge import Numbers
from splitveil.common.oblivious_transfer import Receiver
from splitveil.common.run.course import Batch
from splitveil.common.run.progress import State
from splitveil.common.run.sample_order import Positions


class ComponentsTrainer:
    """Fits a score to a release, and computes activations, (rows, *cut_shape).

    ``BottomTrainer`` adds to it what a network needs.
    """

    def __init__(
        self,
        model: Any,
        features: Features,
        *,
        data_digest: str = "",
        before_labels: tuple[Numbers, Sequence[str]] | None = None,
        scores: int = 1,
    ) -> None:
        """Take a model, and of scores the moments, their columns' names and number."""
        self.model = model
        self.data_digest = data_digest
        self._features = features
        self._before_labels, self._scores = before_labels, scores
        self._receiver: Receiver | None = None
        self._sums: NDArray[np.int64] | None = None
        self._noisy: list[tuple[Positions, NDArray[np.float32]]] = []
        self.released: tuple[Positions, NDArray[Any], float] | None = None
        """Rows' positions; their noisy labels, (rows, values), and 0, or noisy sums as for
        ``fit_sums``, and the deviation of their noise."""

    @property
    def is_between_steps(self) -> bool:
        """True if no gradient and no further labels are awaited, so that the state is whole."""
        return not self._noisy and self._receiver is None

    @property
    def num_rows(self) -> int:
        return len(self._features)

    @property
    def score(self) -> ComponentsBottom:
        if not isinstance(self.model, ComponentsBottom):
            raise RuntimeError("only a score is fitted to labels")
        return self.model

    def rows(self, positions: Positions) -> Features:
        """Gather the features of some rows; best called while waiting for the peer."""
        return self._features.rows(positions)

    def arrays(self, positions: Positions) -> Features:
        return self.rows(positions)

    def embed(self, features: Features) -> Any:
        """Return activations in the host's memory."""
        return self.model(features)

    def activations(self, positions: Positions) -> Numbers:
        """Return what is sent of some rows, (rows, values)."""
        sent = np.asarray(self.embed(self.rows(positions)), np.float64)
        return sent.reshape(len(positions), -1)

    def take_labels(self, positions: Positions, noisy: Any, *, is_last: bool) -> None:
        """Take noisy labels of training rows, (rows, values), and fit the model after the last."""
        self._noisy.append((positions, np.asarray(noisy, np.float32)))
        if not is_last:
            return
        places, values = map(np.concatenate, zip(*self._noisy, strict=True))
        self.released = places, values, 0.0
        if self._before_labels is not None:
            self.score.fit_score(self.rows(places), values, *self._before_labels)
        self._noisy.clear()

    def transfer_question(self, batch: Batch) -> bytes:
        """Return the next message of an oblivious transfer to this party, or of its end."""
        if self._receiver is None or batch.split == "sums":
            return (self.score.num_bits + 1).to_bytes(4, "little")
        bits = self.score.bits(self.rows(batch.positions))
        reply = self._receiver.reply if batch.step == 1 else b""
        extension = self._receiver.extend(np.column_stack([bits, np.ones(len(bits), np.bool_)]))
        return len(reply).to_bytes(4, "little") + reply + extension

    def take_transferred(self, batch: Batch, answer: bytes) -> None:
        """Take an answer of an oblivious transfer, and fit the model after the last one."""
        if batch.split == "sums":
            if self._sums is None or self._before_labels is None:
                raise RuntimeError("noisy sums without a transfer before them")
            if len(answer) != 16 + 4 * self._sums.size:
                raise InvalidMessage(f"noisy sums in {len(answer)} bytes")
            deviation, grid = np.frombuffer(answer[:16], "<f8").tolist()
            # As an honest label owner's: a power of two that leaves the noise room in 32 bits.
            is_grid = 1 <= grid <= 2**20 and math.frexp(grid)[0] == 0.5
            least = 0.01 * math.sqrt(len(self._sums))
            if not (is_grid and least <= deviation <= 2**31 / grid):
                raise InvalidMessage(
                    f"noisy sums of deviation {deviation:g} in steps of 1/{grid:g}"
                )
            theirs = np.frombuffer(answer[16:], "<u4").reshape(self._sums.shape)
            sums = (self._sums - theirs).astype(np.uint32).astype(np.int32) / grid
            self.released = batch.positions, sums, deviation
            places = np.array_split(batch.positions, -(-len(batch.positions) // FIT_ROWS))
            self.score.fit_sums(
                lambda: map(self.rows, places), sums, deviation, *self._before_labels
            )
            self._sums = None
        elif self._receiver is None:
            self._receiver = Receiver(self.score.num_bits + 1, answer, self._scores)
        else:
            self._receiver.take(answer)
            if batch.closes_split:
                self._sums, self._receiver = self._receiver.sums.astype(np.int64), None

    def state_dict(self) -> State:
        """Return everything that a step changes, or raise RuntimeError."""
        if not self.is_between_steps:
            raise RuntimeError("no state in the middle of a step")
        return {
            "model": self.model.state_dict(),
            "sums": self._sums,
            "released": self.released,
            # Found again elsewhere, a row's bits may be others.
            "of_bits": self.score.of_bits if self._before_labels is not None else None,
        }

    def load_state_dict(self, state: State) -> None:
        self.model.load_state_dict(state["model"])
        self._noisy.clear()
        self._receiver, self._sums, self.released = None, state["sums"], state["released"]
        if state["of_bits"] is not None:
            self.score.of_bits = state["of_bits"]
