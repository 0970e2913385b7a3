"""Predicts many ids: questions in flight, new attempts where a passive party was away, parts."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from functools import partial
from typing import NamedTuple

import numpy as np

from splitveil.active_party.predict.parts import Parts
from splitveil.active_party.predict.predictor import Asked, Predictions, Predictor
from splitveil.common.errors import DataError, PeerUnreachable
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_settings import ReconnectSettings
from splitveil.common.run.contract import Contract
from splitveil.common.wire.connection import Retrying
from splitveil.common.wire.inference_codec import portions
from splitveil.common.wire.limits import ID_BYTES

IN_FLIGHT = 4
"""Questions under way at a time: a passive party computes the next answer while one travels."""

_LOOK_EVERY_S = 0.2

Advance = Callable[[int], None]
"""Called with the number of rows that are finished since the last call."""


class BatchResult(NamedTuple):
    """What a whole prediction came to."""

    rows: int
    found: int
    missing_at: dict[str, int]
    """Number of rows asked for now that a party does not have, by its name."""
    asked_rows: int
    """Rows that were asked for now, and not by an earlier command."""
    seconds: float


class BatchPrediction:
    def __init__(
        self,
        predictor: Predictor,
        contract: Contract,
        reconnect: ReconnectSettings,
        interruption: Interruption,
    ) -> None:
        self._predictor = predictor
        self._contract = contract
        self._interruption = interruption
        where = ", ".join(client.connection.where for client in predictor.clients)
        self._retrying = Retrying(reconnect, interruption, where, self._renew)

    def run(self, parts: Parts, advance: Advance) -> BatchResult:
        """Predict what is missing, and write the output."""
        began = time.monotonic()
        num_ids = len(parts.ids)
        asked_rows = sum(part.stop - part.start for part in parts.missing)
        advance(num_ids - asked_rows)
        missing_at: Counter[str] = Counter()
        if parts.missing:
            self._retrying.until_answered(self._predictor.check_models)
            self._retrying.until_answered(
                partial(self._predictor.take_tables, parts.ids, self._interruption)
            )
        for part in parts.missing:
            finished = list(self._predicted(parts.ids_of(part), advance))
            for predictions in finished:
                missing_at.update(predictions.missing_at)
            parts.write(
                part,
                np.concatenate([predictions.probabilities for predictions in finished]),
                np.concatenate([predictions.found for predictions in finished]),
            )
        found = parts.num_found()
        parts.join()
        seconds = time.monotonic() - began
        return BatchResult(num_ids, found, dict(missing_at), asked_rows, seconds)

    def _predicted(self, ids: Sequence[str], advance: Advance) -> Iterator[Predictions]:
        """Yield the predictions of ids in their order, with a few questions in flight."""
        waiting: deque[Asked] = deque()
        for portion in portions(ids, self._predictor.max_ids, self._contract):
            waiting.append(self._predictor.ask(ids[portion]))
            if len(waiting) >= IN_FLIGHT:
                yield self._finished(waiting.popleft(), advance)
        while waiting:
            yield self._finished(waiting.popleft(), advance)

    def _finished(self, asked: Asked, advance: Advance) -> Predictions:
        try:
            predictions = self._predictor.finish(self._answered(asked))
        except PeerUnreachable:
            predictions = self._retrying.until_answered(partial(self._again, asked.ids))
        advance(len(asked.ids))
        return predictions

    def _answered(self, asked: Asked) -> Asked:
        """Wait for all answers to a question, and notice a signal meanwhile."""
        while wait(asked.answers, timeout=_LOOK_EVERY_S).not_done:
            self._interruption.check()
        self._interruption.check()
        return asked

    def _again(self, ids: Sequence[str]) -> Predictions:
        self._predictor.check_models()  # a party that was restarted may serve another model
        return self._predictor.predict(ids)

    def _renew(self) -> bool:
        changed = [client.connection.renew() for client in self._predictor.clients]
        return any(changed)


def check_lengths(ids: Sequence[str], where: str) -> None:
    """Refuse ids that do not fit into a message; the error has their number, and never an id."""
    long = [1 for text in ids if 4 * len(text) > ID_BYTES and len(text.encode()) > ID_BYTES]
    if long:
        raise DataError(f"{where}: {len(long)} ids have more than {ID_BYTES:,} bytes")
