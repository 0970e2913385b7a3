"""The whole table for a peer that does not tell which rows it means: every row, each sealed."""

import secrets
import threading
from collections.abc import Iterator

import numpy as np

from splitveil.common.alignment import ristretto
from splitveil.common.errors import InvalidMessage
from splitveil.common.run.contract import Contract
from splitveil.common.wire.table_codec import Secret, rows_of_a_reply, seal, secrets_of
from splitveil.common.wire.tensor_codec import TensorLimits
from splitveil.passive_party.predict.served_model import ServedModel
from splitveil.protos import split_learning_pb2 as pb


class SealedTable:
    """Seals rows under a scalar that lives as long as this process.

    The secrets of rows are computed once, which takes some 60 microseconds each.
    """

    def __init__(self, model: ServedModel, contract: Contract) -> None:
        self._model = model
        self._limits = TensorLimits.of(contract)
        self._group = ristretto.load()
        self._scalar = self._group.random_scalar()
        seed = secrets.randbits(128)
        # The order of the file would tell which row is which.
        order = np.random.default_rng(seed).permutation(model.rows.served())
        most = rows_of_a_reply(contract)
        self._chunks = [order[start : start + most] for start in range(0, len(order), most)]
        self._secrets: dict[int, list[Secret]] = {}
        self._computing = threading.Lock()

    def multiply(self, points: bytes) -> bytes:
        """Return k P for each of some points P, or raise InvalidMessage."""
        try:
            return self._group.multiply(points, self._scalar)
        except ristretto.NotInGroupError as error:
            raise InvalidMessage(f"points: {error}") from error

    def replies(self) -> Iterator[pb.TableReply]:
        for number, rows in enumerate(self._chunks):
            values = self._model.activations(rows)
            yield seal(self._secrets_of(number), values, self._limits)

    def _secrets_of(self, number: int) -> list[Secret]:
        with self._computing:
            if number not in self._secrets:
                ids = self._model.rows.ids_at(self._chunks[number])
                points = self._group.mask(ristretto.digest_ids(ids), self._scalar)
                self._secrets[number] = list(secrets_of(points))
            return self._secrets[number]
