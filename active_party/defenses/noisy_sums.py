"""Noisy sums of labels over bits that only the peer knows, by oblivious transfer.

The peer has m bits of each training row and a last one that is always 1. For each value v of a
label (one for two classes and for numbers, otherwise whether it is class k, for each class but the
last) it gets S_j = sum_i b_ij v_i + z_j, z normal. A transferred choice is 0 or 1 by construction,
whatever the peer does, so that one label moves the m + 1 sums of a value by sqrt(m + 1) at most;
with several classes a label moves two values, and all sums by sqrt(2 (m + 1)). Noise of k times
that on each sum is a Gaussian mechanism of mu = 1/k for every label, as that of `GaussianLabels`:
against anybody who cannot break the transfer, whose security is computational. All labels of a
person with g rows together move the sums by g times as much at most, by the triangle inequality,
and by that if all bits of these rows are 1: noise of g times as much is mu = 1/k for the person.

The transfer leaves sums R with the peer and H with the label owner, R - H = sum_i b_ij v_i modulo
2^32, and each by itself is uniformly random. Only the last message, H - z, is informative. It is
made once: a second one for other bits would be charged again, and the same noise for other bits
would give exact sums by a difference. So its noise is keyed by H, which is stored before it leaves,
and by its deviation: the same normal numbers at two deviations would give exact sums as well.
Values and noise are rounded as in `noisy_label`, so coarsely that sums stay within 32 bits.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.defenses import interface
from splitveil.active_party.defenses.noise import NoiseSource, fresh_key
from splitveil.common.errors import InvalidMessage, OutOfStep
from splitveil.common.oblivious_transfer import Sender
from splitveil.common.oblivious_transfer.extension import MAX_TRANSFERS
from splitveil.common.privacy.charge import Charge
from splitveil.common.run.contract import TRANSFER_ROWS
from splitveil.common.run.course import Batch
from splitveil.common.run.messages import bytes_of, tensor_of

COMPUTATIONAL = (
    "The bound is computational: it holds for anybody who cannot break the oblivious transfer, "
    "which rests on AES-128 as an ideal cipher, BLAKE3 as a random oracle, and ristretto255."
)
_MOST_DEVIATIONS = 10  # `noise.py` draws none above 9.42
_FINEST = 2.0**20


class NoisySums(interface.Defense):
    """The label owner's side of a transfer, and the sums that it releases once."""

    def __init__(
        self,
        noise_ratio: float,
        charge: Charge,
        context: interface.DefenseContext,
        secrets: interface.Secrets,
    ) -> None:
        if secrets.labels is None:
            raise ValueError("noisy sums need the examples")
        labels, num_classes = secrets.labels.cpu().numpy(), context.num_classes
        classes = range(num_classes - 1) if num_classes > 2 else ()
        self._values = np.stack([labels == one for one in classes] or [labels], axis=1)
        self._ratio = noise_ratio * context.rows_of_person * math.sqrt(2 if classes else 1)
        self._charge = charge
        self._noise = NoiseSource(secrets.draw_keys or fresh_key)
        self._sender: Sender | None = None
        self._own: Tensor | None = None

    def defend(self, _batch: interface.Step, /) -> interface.Defended:
        """Raise ValueError: a run with noisy sums has no gradients."""
        raise ValueError("noisy sums are released instead of gradients")

    @property
    def own(self) -> Tensor:
        """This side's sums H of the last transfer, (bits + 1, values) int64."""
        if self._own is None:
            raise ValueError("no transfer was completed")
        return self._own

    @property
    def released(self) -> Tensor:
        """All that the last message follows from but its noise: H, the deviation, the steps."""
        strength = torch.tensor(self._noise_of(len(self.own)), dtype=torch.float64)
        return torch.cat([self.own.flatten(), strength.view(torch.int64)])

    def transfer(self, batch: Batch, question: Tensor, /) -> interface.DefendedGradient:
        """Answer the next message of a transfer, (bytes,): nothing in it tells of a label.

        The first one says how many bits the peer has, and begins the transfer anew; each other one
        is about the bits of some rows. Raises ProtocolError; then no other message may follow.
        """
        asked = bytes_of(question)
        if batch.step == 0:
            width = int.from_bytes(asked, "little")
            if len(asked) != 4 or not 1 < width <= MAX_TRANSFERS // TRANSFER_ROWS:
                raise InvalidMessage("a transfer of no bits, or of too many")
            self._own, self._sender = None, Sender(width, self._values.shape[1])
            return interface.DefendedGradient(tensor_of(self._sender.request))
        if self._sender is None:
            raise OutOfStep("no transfer has begun")
        end = 4 + int.from_bytes(asked[:4], "little")
        if batch.step == 1:
            self._sender.accept(asked[4:end])
        _, grid = self._noise_of(len(self._sender.sums))
        steps = (self._values[batch.positions].astype(np.float64) * grid).round()
        answer = self._sender.answer(asked[end:], steps.astype(np.uint32))
        if batch.closes_split:
            self._own = torch.from_numpy(self._sender.sums.astype(np.int64))
            self._sender = None
        return interface.DefendedGradient(tensor_of(answer))

    def released_labels(self, _rows: Tensor, /) -> interface.Defended:
        """Return the noise's deviation, the steps of a value of 1, and H with noise, as bytes."""
        deviation, grid = self._noise_of(len(self.own))
        normal = self._noise.standard_normal(tuple(self.own.shape), torch.empty(0).double())
        sums = (self.own - (deviation * grid * normal).round().long()) % 2**32
        message = (
            np.array([deviation, grid], "<f8").tobytes() + sums.numpy().astype("<u4").tobytes()
        )
        final = interface.DefendedGradient(tensor_of(message))
        return interface.Defended(final, self._charge)

    def _noise_of(self, width: int) -> tuple[float, float]:
        """Return the deviation of the noise on a sum, and the steps of a value of 1."""
        deviation = self._ratio * math.sqrt(width)
        largest = len(self._values) + _MOST_DEVIATIONS * deviation
        return deviation, min(2.0 ** math.floor(31 - math.log2(largest)), _FINEST)

    def state_dict(self) -> dict[str, Tensor]:
        return {} if self._own is None else {"sums": self._own}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._sender, self._own = None, state.get("sums")
