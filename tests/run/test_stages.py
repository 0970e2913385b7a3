"""The state machine of a run: its table matches its drawing, and calls never leave the table."""

import hashlib
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.active_party.run import stages
from splitveil.active_party.run.parties import PassivePeers
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.run.stages import TRANSITIONS, RunStages, Stage
from splitveil.common.errors import OutOfStep, SplitveilError
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import Batch
from splitveil.common.run.messages import Activation, LeaveReason, Offer
from tests.support.runs import build_parties

OVERRIDES = ["contract.checkpoints.every_steps=1", "contract.epochs=1"]
WALKS, CALLS = 15, 60

CONTRACT = Contract(run_name="a", cut_shape=(4,), batch_size=4, epochs=1)
Transition = tuple[Stage, Stage]


def test_the_drawing_is_the_table() -> None:
    lines = re.findall(r"^    (\w+) +-> (.+)$", stages.__doc__ or "", flags=re.MULTILINE)
    drawn = {Stage[one.upper()]: {Stage[name.upper()] for name in to.split()} for one, to in lines}
    assert drawn | {Stage.ENDED: set()} == TRANSITIONS


def test_every_stage_is_reached_and_only_an_early_end_is_final() -> None:
    reached = {stage for following in TRANSITIONS.values() for stage in following}
    assert reached | {Stage.WAITING} == set(Stage)
    assert [stage for stage in Stage if not TRANSITIONS[stage]] == [Stage.ENDED]


@pytest.mark.parametrize("start", Stage)
def test_a_transition_beyond_the_table_is_refused(start: Stage) -> None:
    for wanted in Stage:
        machine = at(start)
        if wanted in TRANSITIONS[start]:
            machine.move_to(wanted)
            assert machine.current is wanted
        else:
            with pytest.raises(RuntimeError, match=start.name):
                machine.move_to(wanted)
            assert machine.current is start


def test_a_message_at_another_stage_is_refused_without_effect() -> None:
    machine = at(Stage.TRAINING)
    machine.require(Stage.HANDSHAKEN, Stage.TRAINING, message="a tensor")
    with pytest.raises(OutOfStep, match="an alignment while training"):
        machine.require(Stage.HANDSHAKEN, message="an alignment")
    assert machine.current is Stage.TRAINING


def at(stage: Stage) -> RunStages:
    """Return a machine at a stage, by the shortest way."""
    ways: dict[Stage, list[Stage]] = {Stage.WAITING: []}
    while stage not in ways:
        for known, way in list(ways.items()):
            for following in TRANSITIONS[known]:
                ways.setdefault(following, [*way, following])
    machine = RunStages(PassivePeers(CONTRACT, allow_audits=False))
    for each in ways[stage]:
        machine.move_to(each)
    return machine


class Walk:
    """A peer that calls whatever comes to mind, most of it at the wrong time."""

    def __init__(self, example: Path, folder: Path, seed: int) -> None:
        self._example, self._folder = example, folder
        self._random = random.Random(seed)
        self._nonce = b""
        self.session = self._started()

    def go(self) -> None:
        """Make the calls; nothing but errors of ours may come of them."""
        for _ in range(CALLS):
            call = self._random.choice(self._calls())
            try:
                call()
            except SplitveilError as error:
                if self._random.random() < 0.05:
                    self.session.end(error)

    def _calls(self) -> list[Callable[[], object]]:
        training = [self._train] * 8
        return [
            self._open,
            self._open_again,
            self._resume,
            self._resume,
            self._align,
            self._align,
            self._align_with_another_nonce,
            self._restart,
            self._ask_nonsense,
            self._leave,
            *training,
        ]

    def _started(self) -> ActiveSession:
        session = build_parties(self._example, OVERRIDES, OVERRIDES, runs=self._folder).session
        session.reopen()
        return session

    def _restart(self) -> None:
        self.session = self._started()

    def _open(self) -> None:
        nonce = self._random.randbytes(32)
        self._shake_hands(nonce, None)
        self._nonce = nonce

    def _open_again(self) -> None:
        self._shake_hands(self._nonce, None)

    def _resume(self) -> None:
        numbers = self.session.lifecycle.checkpoints
        chosen = {number for number in numbers if self._random.random() < 0.7}
        self._shake_hands(self._nonce, Offer(self.session.run_id, frozenset(chosen)))

    def _shake_hands(self, nonce: bytes, offer: Offer | None) -> None:
        canonical = self.session.contract.canonical_json()
        commitment = hashlib.sha256(nonce).digest()
        self.session.handshake("passive", canonical, commitment, offer)

    def _align(self) -> None:
        self.session.aligned(np.arange(len(self.session.ids)), self._nonce)

    def _align_with_another_nonce(self) -> None:
        self.session.aligned(np.arange(len(self.session.ids)), b"?" * 32)

    def _train(self) -> None:
        due = self.session.lifecycle.answering.progress.due
        if due is not None:
            self._ask(due)

    def _ask(self, batch: Batch) -> None:
        values = torch.full((len(batch.positions), 4), 0.5)
        activation = Activation(batch.identity(self.session.run_id), values)
        ask = self.session.exchange if batch.split == "train" else self.session.evaluate
        ask(activation)
        self.session.finish_step()

    def _ask_nonsense(self) -> None:
        batch = Batch(0, "train", 99, np.arange(3), b"-" * 16, False, False)
        self._ask(batch)

    def _leave(self) -> None:
        if self._random.random() < 0.2:
            self.session.leave(self.session.run_id, self._random.choice(list(LeaveReason)))


def test_random_calls_take_every_transition_and_no_other(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that tried another one would raise an error that is not ours, and end the walk."""
    seen: set[Transition] = set()
    move_to = RunStages.move_to

    def noting(machine: RunStages, stage: Stage) -> None:
        before = machine.current
        move_to(machine, stage)
        seen.add((before, stage))

    monkeypatch.setattr(RunStages, "move_to", noting)
    for seed in range(WALKS):
        Walk(example, tmp_path / str(seed), seed).go()
    assert seen == {(one, other) for one, following in TRANSITIONS.items() for other in following}
