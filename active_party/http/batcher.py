"""Puts requests that arrive together into one question to the passive parties.

A question leaves at once while few others are under way; requests that arrive in the meantime wait
and leave together. Predictions do not depend on the other ids of a question, because both halves of
the model compute in blocks of one size.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from splitveil.active_party.http.programs import NotAvailable
from splitveil.active_party.http.status import OnlineStatus
from splitveil.active_party.predict.predictor import Asked, Predictions, Predictor, asking_order
from splitveil.common.data.features import Features
from splitveil.common.run.contract import Contract
from splitveil.common.run.messages import Embedded
from splitveil.common.text.files import Closing
from splitveil.common.wire.inference_codec import portions

IN_FLIGHT = 4  # questions under way at a time
MOST_WAITING = 2048  # requests that may wait; a further one is refused at once


@dataclass(frozen=True, eq=False)
class IdQuestion:
    """Ids that a program wants predictions for."""

    ids: Sequence[str]  # in canonical form
    own: Features | None = None  # features that the program gave; None for those in the table


class _WaitingQuestion(NamedTuple):
    question: IdQuestion
    answer: "Future[Predictions]"
    given_up_at: float

    def is_wanted(self) -> bool:
        return not self.answer.cancelled() and time.monotonic() < self.given_up_at


_UnderWay = tuple[list[_WaitingQuestion], list[Asked], list[NDArray[np.int64]]]
"""A batch, the messages that make up its question, and of each request the places of its ids."""


class Batcher(Closing):
    """Answers questions with predictions of the joint model. Several threads may use it."""

    def __init__(
        self,
        predictor: Predictor,
        contract: Contract,
        timeout_s: float,
        status: OnlineStatus,
    ) -> None:
        self._predictor = predictor
        self._status = status
        self._contract = contract
        self._timeout_s = timeout_s
        self._incoming: queue.Queue[_WaitingQuestion | None] = queue.Queue(MOST_WAITING)
        self._under_way: queue.Queue[_UnderWay | None] = queue.Queue(IN_FLIGHT)
        self._next: _WaitingQuestion | None = None
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for work, name in ((self._ask, "batches-asked"), (self._finish, "batches-finished"))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, question: IdQuestion) -> "Future[Predictions]":
        """Return the answer to come, or one of the errors of ``Predictor.finish``."""
        answer: Future[Predictions] = Future()
        waiting = _WaitingQuestion(question, answer, time.monotonic() + self._timeout_s)
        try:
            self._incoming.put_nowait(waiting)
        except queue.Full as error:
            raise NotAvailable("too many requests are waiting") from error
        return answer

    def num_waiting(self) -> int:
        return self._incoming.qsize()

    def close(self) -> None:
        """Answer the waiting requests, and end."""
        self._incoming.put(None)
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        is_over = False
        while not is_over:
            batch, is_over = self._gathered()
            if not batch:
                continue
            try:
                together = [text for waiting in batch for text in waiting.question.ids]
                order = asking_order(together)
                ids = [together[index] for index in order]
                parts = portions(ids, self._predictor.max_ids, self._contract)
                self._status.note_question(len(batch), len(ids))
                asked = [self._predictor.ask(ids[part]) for part in parts]
                ends = np.cumsum([len(waiting.question.ids) for waiting in batch])
                under_way = batch, asked, np.split(np.argsort(order), ends[:-1])
            except Exception as error:
                _set_all(batch, error)
            else:
                self._under_way.put(under_way)
        self._under_way.put(None)

    def _gathered(self) -> tuple[list[_WaitingQuestion], bool]:
        batch, num_ids = list[_WaitingQuestion](), 0
        following = self._next or self._incoming.get()
        self._next = None
        while following is not None:
            if following.is_wanted():
                num_ids += len(following.question.ids)
                if batch and num_ids > self._predictor.max_ids:
                    self._next = following
                    return batch, False
                batch.append(following)
            try:
                following = self._incoming.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _finish(self) -> None:
        while (item := self._under_way.get()) is not None:
            batch, asked, places = item
            left_s = max(waiting.given_up_at for waiting in batch) - time.monotonic()
            try:
                wait([answer for part in asked for answer in part.answers], max(left_s, 0.0))
                found = _answers(self._predictor, batch, places, *_joined(asked))
            except Exception as error:
                _set_all(batch, error)
                continue
            for waiting, predictions in zip(batch, found, strict=True):
                _set(waiting.answer, predictions)


def _set_all(batch: Sequence[_WaitingQuestion], error: Exception) -> None:
    for waiting in batch:
        _set(waiting.answer, error)


def _set(answer: "Future[Predictions]", result: Predictions | Exception) -> None:
    with contextlib.suppress(Exception):  # a program that waits no longer has cancelled it
        if isinstance(result, Exception):
            answer.set_exception(result)
        else:
            answer.set_result(result)


def _answers(
    predictor: Predictor,
    batch: Sequence[_WaitingQuestion],
    places: Sequence[NDArray[np.int64]],
    asked: Asked,
    embedded: Sequence[Embedded],
) -> list[Predictions]:
    if any(waiting.question.own is not None for waiting in batch):
        found = []
        for waiting, at in zip(batch, places, strict=True):
            rows = None if asked.rows is None else asked.rows[at]
            answers = []
            for known, values in embedded:
                places_of_known = (np.cumsum(known) - 1)[at][known[at]]
                answers.append(Embedded(known[at], values[torch.from_numpy(places_of_known)]))
            part = Asked([asked.ids[place] for place in at], rows, [])
            found.append(predictor.combine(part, answers, waiting.question.own))
        return found
    together = predictor.combine(asked, embedded)
    return [Predictions(together.probabilities[at], together.found[at], {}) for at in places]


def _joined(asked: Sequence[Asked]) -> tuple[Asked, list[Embedded]]:
    answers = [[answer.result(0) for answer in part.answers] for part in asked]
    if len(asked) == 1:
        return asked[0], answers[0]
    rows = [part.rows for part in asked if part.rows is not None]
    ids = [text for part in asked for text in part.ids]
    together = [
        Embedded(
            np.concatenate([one.known for one in of_party]),
            torch.cat([one.values for one in of_party]),
        )
        for of_party in zip(*answers, strict=True)
    ]
    return Asked(ids, np.concatenate(rows) if rows else None, []), together
