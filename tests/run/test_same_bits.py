"""A run has the same bits whatever happens on its way: answers, answer log, charges and weights.

Replies are lost and asked for again, old questions and other bytes come and are refused, either
side is killed before or after an answer, with its newest checkpoints or without, or is stopped by
a person, and the active party fails halfway through a step, which it must not save. What is left is
compared with a run in which each reply is awaited and nothing happens.
"""

import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.run.session import ActiveSession
from splitveil.common.errors import (
    Interrupted,
    NotOpen,
    OutOfStep,
    PeerLeft,
    PeerRestarted,
    StorageError,
)
from splitveil.common.record.answer_log import FIRST_RESUMPTION_NUMBER
from splitveil.common.run.course import evaluations_ahead
from splitveil.common.run.messages import Activation, Answer, Course, LeaveReason, Offer, Opening
from tests.support.equality import same
from tests.support.peers import Lost
from tests.support.runs import (
    Parties,
    PartyPeer,
    build_parties,
    build_passive,
    finish,
    in_background,
    write_example,
    write_several,
)

DEFENSES = [
    f"{defense}, insecure_noise_seed: 7}}"
    for defense in (
        "{name: iso",
        "{name: max_norm",
        "{name: marvell",
        "{name: marvell, statistics: running",
        "{name: marvell, noise: persistent",
        "{name: max_norm_positive",
        "{name: noisy_label",
        "{name: noisy_label, mechanism: {kind: alibi, epsilon: 2}",
        "{name: gafm",
        "{name: gafm, response: persistent, composed_with: {name: marvell, statistics: running}",
    )
]
RUNNING = DEFENSES[3]
TROUBLES = (
    "reply lost",
    "asked again",
    "other bytes",
    "other bytes after a return",
    "too early",
    "too old",
    "passive killed before",
    "passive killed after",
    "passive set back",
    "active killed before",
    "active killed after",
    "active killed before it learns",
    "active set back",
    "passive stopped",
    "learning fails",
    "observing a step fails",
    "observing an evaluation fails",
    "a defense that has seen the batch fails",
)


class Way(NamedTuple):
    """The settings of a run."""

    defense: str = RUNNING
    depth: int = 1
    checkpoint_steps: int = 2
    parties: int = 1

    @property
    def both(self) -> list[str]:
        return [
            "contract.batch_size=16",
            "contract.evaluation_batch_size=5",
            f"contract.pipeline_depth={self.depth}",
            f"contract.checkpoint_steps={self.checkpoint_steps}",
        ]


class Trouble(NamedTuple):
    kind: str
    at: int
    """The number of the message, over all processes of a party; 0 is the last one."""
    party: int = 0


class Left(NamedTuple):
    """What a run leaves behind, and what it has sent."""

    replies: dict[tuple[Any, ...], Any]
    log: list[Any]
    charges: torch.Tensor
    bounds: Any
    weights: dict[str, torch.Tensor]
    figures: list[Any]
    """The last ones of an evaluation and of the ledger, unless the process began after them."""


class World:
    """A run's processes: threads that begin again, from their checkpoints, when they are killed."""

    def __init__(
        self, way: Way, runs: Path, troubles: Sequence[Trouble] = (), messages: int = 1
    ) -> None:
        self.way, self.runs = way, runs
        self.parties = self._build()
        self.is_eager = bool(troubles)
        """Whether held-out rows are asked about as soon as they are sent."""
        names = list(self.parties.peers)
        self._due: dict[tuple[str, int], str] = {}
        for kind, at, party in troubles:
            number = 1 + (at - 1) % messages
            # In the first message of several parties, others may still be aligning.
            number = number if way.parties == 1 else max(number, 2)
            self._due.setdefault((names[party % way.parties], number), kind)
        self._messages = dict.fromkeys(names, 0)
        self._charged = torch.zeros(0)
        self._errors: list[BaseException] = []
        self.stops = 0
        """How often a party was stopped, and no new session has begun for it yet."""
        self.replies: dict[tuple[Any, ...], Any] = {}

    def _build(self) -> Parties:
        active = [*self.way.both, f"defense={self.way.defense}"]
        return build_parties(folder_of(self.way.parties), active, self.way.both, runs=self.runs)

    def trouble(self, party: str) -> str:
        self._messages[party] += 1
        kind = self._due.get((party, self._messages[party]), "")
        if kind:
            with self.parties.session._stages:
                charged, self._charged = self._charged, charges(self.parties.session)
            assert len(charged) == 0 or bool((self._charged >= charged).all())
        return kind

    def run(self) -> Left:
        while self.parties.session.stage is not Stage.FINISHED:
            if self.parties.session.stage is Stage.ENDED:  # a goodbye ended all processes
                assert self.stops > 0, "the run has ended without a cause"
                self.stops = 0
                self.parties = self._build()
                self.parties.session.reopen()
            finish([in_background(lambda name=name: self._live(name)) for name in self._messages])  # type: ignore[misc]
            for error in self._errors:
                raise error
        log = self.parties.session.lifecycle.answering.questions.log
        active = self.parties.active
        return Left(
            self.replies,
            [record for record in log.since(0) if record.number < FIRST_RESUMPTION_NUMBER],
            charges(self.parties.session),
            self.parties.session.leak_bounds(),
            self.parties.weights(),
            [*active.evaluations[-1:], *active.ledger[-1:]],
        )

    def _live(self, name: str) -> None:
        while True:
            try:
                return self.parties.peers[name].run.run(Troubled(self, name))
            except Lost:
                folder = folder_of(self.way.parties)
                again = build_passive(folder, name, self.way.both, runs=self.runs)
                self.parties.peers[name] = again
            except (Interrupted, PeerLeft):
                return None
            except BaseException as error:
                self._errors.append(error)
                self.parties.session.end(PeerLeft("the test has failed"))
                return None

    def states(self, party: str) -> dict[Path, bytes]:
        paths = sorted((self.runs / party / "checkpoint").glob("at-*.state"))
        return {path: path.read_bytes() for path in paths}

    def set_back(self, party: str) -> None:
        """Lose all checkpoints but the first."""
        for state in list(self.states(party))[1:]:
            state.unlink()

    def kill_active(self, *, sets_back: bool = False) -> bool:
        """Kill it, unless the run is over for another party, which does not come back."""
        old = self.parties.session
        with old._stages:
            if self.way.parties > 1 and old.stage is Stage.FINISHED:
                return False
            known = charges(old)
            old.lifecycle._answering = None  # so that it saves nothing more
            old.lifecycle.error = NotOpen("killed")
            old._stages.current = Stage.ENDED
            old._stages.wake()
            if sets_back:
                self.set_back("active")
            again = self._build()
            assert again.session.reopen()
            assert torch.equal(charges(again.session), known)
            self.parties.session, self.parties.active = again.session, again.active
            return True


def charges(session: ActiveSession) -> torch.Tensor:
    state = session.lifecycle.account_book().state_dict()
    charged: torch.Tensor = state["settled_sum_kl"] + state.get("current_sum_kl", 0)
    return charged


class Troubled(PartyPeer):
    """Meets the troubles of a party."""

    def __init__(self, world: World, party: str) -> None:
        super().__init__(world.parties, party)
        self._world, self._name = world, party
        self._courses: deque[Course] = deque()
        self._asked: deque[tuple[Activation, Any]] = deque()
        """The questions whose replies are kept, as many as may be on their way at once."""
        self._old: Activation | None = None

    def handshake(
        self, party: str, contract_json: str, commitment: bytes, offer: Offer | None = None
    ) -> Opening:
        self._courses.clear()
        self._asked.clear()
        self._old = None
        try:
            return super().handshake(party, contract_json, commitment, offer)
        except NotOpen:  # killed meanwhile: asks again, as after a lost connection
            return self.handshake(party, contract_json, commitment, offer)

    def send_held_out(self, activation: Activation) -> None:
        if self._world.is_eager:
            self._courses.append(self.evaluate(activation))
        else:
            super().send_held_out(activation)

    def receive_course(self) -> Course:
        return self._courses.popleft() if self._courses else super().receive_course()

    def evaluate(self, activation: Activation) -> Course:
        reply = self._meet(activation)
        assert isinstance(reply, Course)
        return reply

    def _exchange(self, activation: Activation) -> Answer:
        reply = self._meet(activation)
        assert isinstance(reply, Answer)
        return reply

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        if reason is not LeaveReason.FAILED:  # a killed process says nothing
            super().leave(run_id, reason)

    def _meet(self, activation: Activation) -> Any:
        world, session, batch = self._world, self.session, activation.batch
        trouble = world.trouble(self._name)
        key = (self._name, batch.epoch, batch.split, batch.step)
        self._before(trouble, activation, key in world.replies)
        if trouble.endswith("fails") and world.way.parties == 1:
            self._fail(trouble, activation)
        reply = self._ask(activation)
        if trouble == "passive killed after":
            raise Lost
        is_set_back = trouble == "active set back"
        if trouble == "active killed before it learns" or is_set_back:
            is_killed = world.kill_active(sets_back=is_set_back)
            if is_killed:
                self._ask(activation)  # its reply was lost on the way
        session.finish_step()
        self._keep(activation, reply)
        for asked, answered in self._asked if trouble == "asked again" else ():
            assert same_reply(self._ask(asked), answered)
        for asked, _ in self._asked if trouble == "other bytes" else ():
            self._refused(with_other_bytes(asked))
        if trouble == "reply lost":
            reply = self._ask(activation)
        assert same_reply(world.replies.setdefault(key, reply), reply)
        if trouble == "active killed after":
            world.kill_active()
        return reply

    def _before(self, trouble: str, activation: Activation, was_answered: bool) -> None:
        batch = activation.batch
        match trouble:
            case "passive killed before":
                raise Lost
            case "passive set back":
                self._world.set_back(self._name)
                raise Lost
            case "passive stopped":
                self._world.stops += 1
                raise Interrupted
            case "active killed before":
                self._world.kill_active()
            case "too early":
                self._refused(activation, step=batch.step + 1)
                self._refused(activation, split="test" if batch.split == "train" else "train")
            case "too old" if self._old is not None:
                self._refused(self._old)
            case "other bytes after a return" if was_answered:
                self._refused(with_other_bytes(activation))

    def _fail(self, trouble: str, activation: Activation) -> None:
        """Let the active party fail at this message, and end as it does when it is served."""
        session = self.session
        observer, trainer = session.lifecycle.observer, session.lifecycle.answering.trainer
        at: tuple[Any, str] = {
            "learning fails": (trainer._objective, "learn"),
            "observing a step fails": (observer, "on_step"),
            "observing an evaluation fails": (observer, "on_evaluation"),
            "a defense that has seen the batch fails": (trainer.defense, "defend"),
        }[trouble]
        act = getattr(*at)

        def act_and_fail(*arguments: Any, **named: Any) -> None:
            act(*arguments, **named)
            raise StorageError("no room")

        saved = self._world.states("active")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(*at, act_and_fail)
            try:
                self._ask(activation)
                session.finish_step()
            except StorageError as error:
                session.end(error)
                assert self._world.states("active") == saved
                self._world.kill_active()

    def _keep(self, activation: Activation, reply: Any) -> None:
        is_training = isinstance(reply, Answer)
        limit = self._world.way.depth if is_training else evaluations_ahead(self.session.contract)
        if self._asked and isinstance(self._asked[-1][1], Answer) is not is_training:
            self._old, _ = self._asked[-1]
            self._asked.clear()
        self._asked.append((activation, reply))
        if len(self._asked) > limit:
            self._old, _ = self._asked.popleft()

    def _ask(self, activation: Activation) -> Any:
        session = self.session
        ask = session.exchange if activation.batch.split == "train" else session.evaluate
        try:
            return ask(activation, self._name, self._is_connected(session))
        except NotOpen as error:
            raise PeerRestarted from error  # as the status of this error means on the other side

    def _refused(self, activation: Activation, **changes: Any) -> None:
        with pytest.raises(OutOfStep):
            self._ask(replace(activation, batch=activation.batch._replace(**changes)))


def with_other_bytes(activation: Activation) -> Activation:
    return replace(activation, values=activation.values + 1)


def same_reply(one: Any, other: Any) -> bool:
    if isinstance(one, Answer) and isinstance(other, Answer):
        return same(one.values, other.values)
    return bool(one == other)


@lru_cache(maxsize=4)
def folder_of(parties: int) -> Path:
    folder = Path(_folders[0].name) / str(parties)
    if parties == 1:
        write_example(folder, rows=120)
    else:
        write_several(folder, parties, rows=120)
    return folder


_folders: list[tempfile.TemporaryDirectory[str]] = []


@pytest.fixture(scope="module", autouse=True)
def _folder() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as name:
        _folders[:] = [tempfile.TemporaryDirectory(dir=name)]
        yield
        folder_of.cache_clear()
        undisturbed.cache_clear()


@lru_cache(maxsize=64)
def undisturbed(way: Way) -> Left:
    with tempfile.TemporaryDirectory() as runs:
        return World(way, Path(runs)).run()


def check(way: Way, troubles: Sequence[Trouble]) -> None:
    expected = undisturbed(way)
    with tempfile.TemporaryDirectory() as runs:
        messages = len(expected.replies) // way.parties
        found = World(way, Path(runs), troubles, messages).run()
    assert found.log == expected.log
    assert found.replies.keys() == expected.replies.keys()
    assert all(same_reply(found.replies[key], reply) for key, reply in expected.replies.items())
    assert torch.equal(found.charges, expected.charges)
    assert found.bounds == expected.bounds
    assert same(found.weights, expected.weights)
    assert all(figures in expected.figures for figures in found.figures)


WAYS = st.builds(
    Way,
    st.sampled_from(DEFENSES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 5]),
    st.sampled_from([1, 1, 2]),
)
SOME = st.lists(
    st.builds(Trouble, st.sampled_from(TROUBLES), st.integers(0, 30), st.integers(0, 1)),
    min_size=1,
    max_size=8,
)
KILLED_DURING_HANDSHAKES = [
    Trouble("active killed before", 2, 1),
    Trouble("active killed before", 3, 1),
    Trouble("passive set back", 2),
]
"""The active party's process ends while the first passive party waits for the second one."""

DERANDOMIZED = settings(
    derandomize=True, database=None, deadline=None, phases=[Phase.explicit, Phase.generate]
)


@settings(DERANDOMIZED, max_examples=10)
@example(Way(), [Trouble(kind, 2 * at) for at, kind in enumerate(TROUBLES, 1)])
@example(Way(depth=4), [Trouble(kind, 2 * at) for at, kind in enumerate(TROUBLES[::-1], 1)])
@example(Way(parties=2), [Trouble(kind, 2 * at, at) for at, kind in enumerate(TROUBLES, 1)])
@example(Way(), [Trouble("active killed before it learns", 0)])
@example(Way(), [Trouble("passive set back", 6), Trouble("other bytes after a return", 7)])
@example(Way(parties=2), [Trouble("passive killed after", 0, 1), Trouble("active set back", 0)])
@example(Way(depth=4, checkpoint_steps=5, parties=2), KILLED_DURING_HANDSHAKES)
@given(WAYS, SOME)
def test_whatever_happens_a_run_ends_as_if_nothing_had_happened(
    way: Way, troubles: Sequence[Trouble]
) -> None:
    check(way, troubles)


@pytest.mark.slow  # some hundred runs
@settings(DERANDOMIZED, max_examples=300)
@given(WAYS, SOME)
def test_whatever_happens_in_hundreds_of_runs(way: Way, troubles: Sequence[Trouble]) -> None:
    check(way, troubles)
