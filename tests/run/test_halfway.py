"""If something fails halfway, a checkpoint is not saved: the run resumes from the previous one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.run.session import ActiveSession
from splitveil.common.errors import SplitveilError, StorageError
from splitveil.common.run.messages import Activation, Answer, Course
from tests.support.peers import MARVELL, Lost, Silent, parties_in
from tests.support.runs import run_in_process

Fault = Callable[[ActiveSession, pytest.MonkeyPatch], None]


def fails(*_: object, **__: object) -> None:
    raise StorageError("no room")


def failing_after(action: Callable[..., object]) -> Callable[..., None]:
    def act_and_fail(*arguments: object, **named: object) -> None:
        action(*arguments, **named)
        fails()

    return act_and_fail


def in_learning(session: ActiveSession, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(session.lifecycle.answering.trainer._objective, "learn", fails)


def in_observing_a_step(session: ActiveSession, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(session.lifecycle.observer, "on_step", fails)


def in_observing_an_evaluation(session: ActiveSession, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(session.lifecycle.observer, "on_evaluation", fails)


def in_a_defense_that_has_seen_the_batch(
    session: ActiveSession, patched: pytest.MonkeyPatch
) -> None:
    defense = session.lifecycle.answering.trainer.defense
    patched.setattr(defense, "defend", failing_after(defense.defend))


class Breaking(Silent):
    """Lets a fault begin at one of its messages; the active party then ends as it does served."""

    at, fault, saved = 0, staticmethod(in_learning), dict[str, bytes]()
    folder, patched = Path(), pytest.MonkeyPatch()
    _calls = 0

    def _guarded(self, ask: Callable[[], object]) -> object:
        self._calls += 1
        if self._calls >= self.at:
            self.saved.clear()
            self.saved.update(contents(self.folder))
        if self._calls == self.at:
            self.fault(self._session, self.patched)
        try:
            return ask()
        except SplitveilError as error:
            self._session.end(error)
            raise Lost from error

    def receive_gradient(self) -> Answer:
        reply = self._guarded(super().receive_gradient)
        assert isinstance(reply, Answer)
        return reply

    def evaluate(self, activation: Activation) -> Course:
        ask = super().evaluate
        return self._guarded(lambda: ask(activation))  # type: ignore[return-value]


def contents(runs: Path) -> dict[str, bytes]:
    folder = runs / "active" / "checkpoint"
    return {path.name: path.read_bytes() for path in folder.glob("at-*.state")}


@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize(
    "fault",
    [
        in_learning,
        in_observing_a_step,
        in_observing_an_evaluation,
        in_a_defense_that_has_seen_the_batch,
    ],
)
def test_what_fails_halfway_is_in_no_checkpoint(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault, at: int
) -> None:
    """Of these messages one is between two checkpoints, and with the other one is due."""
    whole = parties_in(example, tmp_path / "whole", MARVELL)
    run_in_process(whole)
    first, runs = parties_in(example, tmp_path / "broken", MARVELL), tmp_path / "broken"
    saved: dict[str, bytes] = {}
    with monkeypatch.context() as patched:
        chosen = {"at": at, "fault": staticmethod(fault), "patched": patched, "folder": runs}
        with pytest.raises(Lost):
            run_in_process(first, type("Breaks", (Breaking,), chosen | {"saved": saved}))
    assert first.session.stage is Stage.ENDED
    assert saved
    assert contents(runs) == saved
    again = parties_in(example, runs, MARVELL)
    assert again.session.reopen()
    run_in_process(again)
    found, expected = again.weights(), whole.weights()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert again.active.evaluations[-1] == whole.active.evaluations[-1]
