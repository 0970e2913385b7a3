"""A run with projected labels begins with a survey, and ends with the same bits after any loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from splitveil.active_party.defenses.projected.features import CutMemory
from splitveil.active_party.defenses.projected.stages import StageRelease, stage_epochs
from splitveil.active_party.run.questions import AnsweredQuestions
from splitveil.active_party.training.top_trainer import StepResult, TopTrainer
from splitveil.common.errors import (
    Interrupted,
    OutOfStep,
    PeerRestarted,
    SettingsError,
    SplitveilError,
)
from splitveil.common.record.answer_log import AnswerLog
from splitveil.common.record.release_file import ReleaseFile
from splitveil.common.record.run_store import RunStore
from splitveil.common.run import course
from splitveil.common.run.course import AlignedRows, run_course
from splitveil.common.run.messages import Activation, Answer, Course
from tests.support.peers import FaultyPeer, InProcessPeer, Lost, dying
from tests.support.projected import (
    SMALL,
    SURVEY_BATCHES,
    Outcome,
    Silent,
    Strike,
    assert_same,
    build,
    note_draws,
    outcome,
    releases_in,
    resume,
)
from tests.support.runs import Parties, run_in_process, run_over_grpc

STAGES = [0, 1]
MESSAGES = 20
NONE = "defense={name: none}"


class Whole(NamedTuple):
    """An undisturbed run."""

    outcome: Outcome
    releases: dict[str, torch.Tensor]
    parties: Parties


@pytest.fixture(scope="module")
def whole(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    runs = tmp_path_factory.mktemp("whole")
    parties = build(example, runs=runs)
    run_in_process(parties)
    return Whole(outcome(parties), releases_in(runs), parties)


def assert_as_if_nothing_had_happened(found: Parties, runs: Path, whole: Whole) -> None:
    assert_same(outcome(found), whole.outcome)
    releases = releases_in(runs)
    assert releases.keys() == whole.releases.keys()
    assert all(torch.equal(releases[name], value) for name, value in whole.releases.items())


# ---- the survey ----


def rows_of(parties: Parties) -> tuple[AlignedRows, AlignedRows]:
    one, other = parties.active.rows, parties.passive.rows
    assert one is not None
    assert other is not None
    return one, other


def test_both_parties_derive_the_same_survey_of_every_training_row_once(whole: Whole) -> None:
    courses = [
        list(run_course(whole.parties.run.contract, rows)) for rows in rows_of(whole.parties)
    ]
    names = [[(batch.key, batch.digest) for batch in course] for course in courses]
    assert names[0] == names[1]
    assert len(names[0]) == MESSAGES
    survey = [batch for batch in courses[0] if batch.split == "survey"]
    assert courses[0][:SURVEY_BATCHES] == survey
    seen = [row for batch in survey for row in batch.positions]
    assert seen == list(rows_of(whole.parties)[0].splits["train"])
    assert not any(batch.closes_epoch for batch in survey)


@pytest.mark.parametrize("has_survey", [False, True])
def test_the_course_from_any_batch_on_is_the_rest_of_the_whole_course(
    whole: Whole, *, has_survey: bool
) -> None:
    contract = whole.parties.run.contract
    rows = replace(rows_of(whole.parties)[0], has_survey=has_survey)
    keys = [batch.key for batch in run_course(contract, rows)]
    assert len(keys) == MESSAGES - (0 if has_survey else SURVEY_BATCHES)
    for number in range(len(keys) + 1):
        assert [batch.key for batch in run_course(contract, rows, number)] == keys[number:]


def test_only_a_defense_that_needs_it_begins_a_run_with_a_survey(example: Path) -> None:
    parties = build(example, NONE)
    run_in_process(parties)
    assert not any(rows.has_survey for rows in rows_of(parties))
    assert parties.session.lifecycle.answering.batch_number == MESSAGES - SURVEY_BATCHES


class Skips(InProcessPeer):
    """Sends its first training batch while the survey is still going on."""

    at = 2
    _calls = 0

    def evaluate(self, activation: Activation) -> Course:
        self._calls += 1
        if self._calls == self.at:
            training = activation.batch._replace(split="train", step=0)
            self.session.exchange(replace(activation, batch=training))
        return super().evaluate(activation)


class EndsEarly(InProcessPeer):
    """Names a batch of the survey as one of another pass."""

    def evaluate(self, activation: Activation) -> Course:
        held_out = activation.batch._replace(split="validation")
        return super().evaluate(replace(activation, batch=held_out))


class Repeats(InProcessPeer):
    """Sends an earlier batch of the survey again, with other bytes or with the same ones."""

    changes = True
    _first: Activation | None = None

    def evaluate(self, activation: Activation) -> Course:
        if self._first is None:
            self._first = activation
        super().evaluate(activation)
        return super().evaluate(
            replace(activation, values=activation.values + 1) if self.changes else self._first
        )


class Invents(InProcessPeer):
    """Sends its first training batch as one of a survey that the run does not have."""

    def receive_gradient(self) -> Answer:
        sent = self._sent[0]
        self.session.evaluate(replace(sent, batch=sent.batch._replace(split="survey")))
        return super().receive_gradient()


@pytest.mark.parametrize(
    ("peer", "overrides"),
    [
        (Skips, []),
        (type("SkipsAll", (Skips,), {"at": 1}), []),
        (EndsEarly, []),
        (Repeats, []),
        (type("GoesBack", (Repeats,), {"changes": False, "_calls": 0}), []),
        (Invents, [NONE]),
    ],
)
def test_a_peer_that_skips_changes_repeats_or_invents_a_survey_is_refused(
    example: Path, monkeypatch: pytest.MonkeyPatch, peer: type[InProcessPeer], overrides: list[str]
) -> None:
    monkeypatch.setattr(course, "MAX_EVALUATIONS_AHEAD", 2)  # replies that are kept
    drawn = note_draws(monkeypatch)
    parties = build(example, *overrides)
    with pytest.raises(OutOfStep):
        run_in_process(parties, peer)
    assert parties.active.sent == []
    assert drawn == []


def test_the_same_bytes_of_the_survey_again_change_nothing(example: Path, whole: Whole) -> None:
    class Twice(InProcessPeer):
        def evaluate(self, activation: Activation) -> Course:
            first = super().evaluate(activation)
            assert super().evaluate(activation) is first
            return first

    parties = build(example)
    run_in_process(parties, Twice)
    assert_same(outcome(parties), whole.outcome)


def test_a_run_without_a_survey_does_not_go_on_with_projected_labels(
    example: Path, tmp_path: Path
) -> None:
    with pytest.raises(Lost):
        run_in_process(build(example, NONE, runs=tmp_path), dying(5, after=True))
    second = build(example, runs=tmp_path)
    with pytest.raises(SplitveilError):
        resume(second)
    assert second.active.sent == []


# ---- the same bits ----


def test_the_comparison_notices_another_run(example: Path, whole: Whole) -> None:
    other = build(example, "defense.insecure_noise_seed=8")
    run_in_process(other)
    with pytest.raises(AssertionError):
        assert_same(outcome(other), whole.outcome)


def test_each_stage_is_drawn_once_at_the_first_step_of_its_epoch(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = note_draws(monkeypatch)
    at: list[int] = []
    keep = ReleaseFile.keep

    def noting(self: ReleaseFile, stage: int, release: dict[str, torch.Tensor]) -> None:
        at.append(parties.session.lifecycle.answering.batch_number)
        keep(self, stage, release)

    monkeypatch.setattr(ReleaseFile, "keep", noting)
    parties = build(example)
    run_in_process(parties)
    assert drawn == STAGES
    assert at == [4, 12]


def test_no_answer_waits_for_its_activations_to_be_noted(
    example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    gradient, note = TopTrainer.gradient, CutMemory.note

    def answer(self: TopTrainer, *given: Any) -> StepResult:
        events.append("asked")
        result = gradient(self, *given)
        events.append("answered")
        return result

    def noting(self: CutMemory, *given: torch.Tensor) -> None:
        events.append("noted")
        note(self, *given)

    monkeypatch.setattr(TopTrainer, "gradient", answer)
    monkeypatch.setattr(CutMemory, "note", noting)
    run_in_process(build(example))
    after = [events[at + 1 : at + 3] for at, event in enumerate(events) if event == "asked"]
    assert after == [["answered", "noted"]] * 8


@pytest.mark.parametrize(
    ("stages", "epochs", "expected"),
    [
        (1, 1, (0,)),
        (5, 1, (0,)),
        (1, 7, (0,)),
        (3, 7, (0, 1, 3)),
        (8, 20, (0, 1, 2, 4, 7, 9, 12, 16)),
        (7, 7, tuple(range(7))),
        (4, 1000, (0, 125, 353, 649)),
        (10_000, 3, (0, 1, 2)),
    ],
)
def test_stages_begin_at_growing_distances_and_never_twice_in_an_epoch(
    stages: int, epochs: int, expected: tuple[int, ...]
) -> None:
    assert stage_epochs(stages, epochs) == expected


def test_over_grpc_the_run_has_the_same_bits(example: Path, port: int, whole: Whole) -> None:
    parties = build(example)
    run_over_grpc(parties, port)
    assert_same(outcome(parties), whole.outcome)


def test_lost_messages_change_no_bit(
    example: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    drawn = note_draws(monkeypatch)
    parties = build(example)
    run_in_process(parties, lambda s, e: FaultyPeer(s, e, loses=lambda count: count % 2 == 1))
    assert_same(outcome(parties), whole.outcome)
    assert drawn == STAGES


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("at", [1, 4, 5, 12, 13, 20])
def test_with_both_parties_killed_at_a_message_the_run_ends_as_if_nothing_had_happened(
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: Whole,
    at: int,
    *,
    after: bool,
) -> None:
    drawn = note_draws(monkeypatch)
    with pytest.raises(Lost):
        run_in_process(build(example, runs=tmp_path), dying(at, after=after))
    second = build(example, runs=tmp_path)
    resume(second)
    assert second.active.resumed != []
    assert drawn == STAGES
    assert_as_if_nothing_had_happened(second, tmp_path, whole)


@pytest.mark.parametrize("at", [2, 5, 13, 20])
def test_with_the_passive_party_killed_the_active_one_goes_back_with_it(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Whole, at: int
) -> None:
    drawn = note_draws(monkeypatch)
    first = build(example, runs=tmp_path)
    with pytest.raises(Lost):
        run_in_process(first, dying(at, after=True))
    second = build(example, runs=tmp_path)
    second.session, second.active = first.session, first.active
    run_in_process(second, Silent)
    assert drawn == STAGES
    assert_as_if_nothing_had_happened(second, tmp_path, whole)


@pytest.mark.parametrize("at", [2, 3, 4, 9])
def test_a_run_that_is_interrupted_goes_on_from_the_very_batch(
    example: Path, tmp_path: Path, whole: Whole, at: int
) -> None:
    """Both parties save where they are, also in the middle of the survey."""

    class Interrupts(InProcessPeer):
        """Is asked to stop before one of its messages about held-out rows or in the survey."""

        calls = 0

        def receive_gradient(self) -> Answer:
            self.calls += 1
            return super().receive_gradient()

        def evaluate(self, activation: Activation) -> Course:
            self.calls += 1
            if self.calls == at:
                raise Interrupted
            return super().evaluate(activation)

    with pytest.raises(Interrupted):
        run_in_process(build(example, runs=tmp_path), Interrupts)
    for party in ("active", "passive"):
        assert RunStore(tmp_path / party, keep=100).checkpoints()[-1] == at - 1
    second = build(example, runs=tmp_path)
    resume(second)
    assert_as_if_nothing_had_happened(second, tmp_path, whole)


BLOWS: list[Callable[[], Strike]] = [
    lambda: Strike(StageRelease, "draw", 1),
    lambda: Strike(StageRelease, "draw", 2, after=True),
    lambda: Strike(ReleaseFile, "keep", 1),
    lambda: Strike(ReleaseFile, "keep", 2),
    lambda: Strike(ReleaseFile, "keep", 2, after=True),
    lambda: Strike(AnsweredQuestions, "record_release", 1, after=True),
    lambda: Strike(AnsweredQuestions, "record_release", 2, after=True),
    lambda: Strike(StageRelease, "use", 1, after=True),
    lambda: Strike(StageRelease, "use", 2, after=True),
    lambda: Strike(AnswerLog, "record", 5),
    lambda: Strike(AnswerLog, "record", 5, after=True),
    lambda: Strike(TopTrainer, "survey", 3),
    lambda: Strike(RunStore, "save", 3),
    lambda: Strike(RunStore, "save", 4, after=True),
]


@pytest.mark.parametrize("blow", range(len(BLOWS)))
@pytest.mark.parametrize("killed", ["both", "active"])
def test_with_the_active_party_killed_in_the_middle_of_a_call_no_bit_changes(
    example: Path, tmp_path: Path, whole: Whole, blow: int, killed: str
) -> None:
    """Each stage is drawn once more only if it was not written before."""
    second = build(example, runs=tmp_path)

    class SeesARestart(Silent):
        """Finds a new active party where the one before was killed."""

        def receive_gradient(self) -> Answer:
            with self._restarting():
                return super().receive_gradient()
            raise AssertionError

        def evaluate(self, activation: Activation) -> Course:
            with self._restarting():
                return super().evaluate(activation)
            raise AssertionError

        @contextmanager
        def _restarting(self) -> Iterator[None]:
            try:
                yield
            except Lost:
                second.session.reopen()
                self._session = second.session
                raise PeerRestarted from None

    first = build(example, runs=tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        strike = BLOWS[blow]().arm(patched)
        if killed == "both":
            with pytest.raises(Lost):
                run_in_process(first, Silent)
            resume(second)
        else:
            try:
                run_in_process(first, SeesARestart)
            except Lost:  # between two of the passive party's calls: it is killed as well
                resume(second)
            else:
                second.run, second.passive = first.run, first.passive
    assert strike.calls >= strike.at
    assert_as_if_nothing_had_happened(second, tmp_path, whole)


# ---- when a run ends ----


STOPPING = "early_stopping={patience_epochs: 1, min_gain: 0.02}"
LONG = (*SMALL, "contract.epochs=12")


def test_a_run_stops_early_once_predictions_no_longer_come_closer_to_the_targets(
    example: Path, tmp_path: Path
) -> None:
    """Also one whose parties were killed: the same epoch, and the same bits."""
    whole = build(example, "contract.epochs=12", STOPPING, both=LONG)
    run_in_process(whole)
    epochs = len(whole.active.epochs)
    assert 1 < epochs < 12
    first = build(example, "contract.epochs=12", STOPPING, both=LONG, runs=tmp_path)
    with pytest.raises(Lost):
        run_in_process(first, dying(SURVEY_BATCHES + 8 * (epochs - 1) + 6, after=True))
    second = build(example, "contract.epochs=12", STOPPING, both=LONG, runs=tmp_path)
    resume(second)
    assert second.active.resumed == [epochs - 1]
    assert_same(outcome(second), outcome(whole))


def test_it_needs_no_validation_rows_for_that(example: Path) -> None:
    without = (
        "contract.split={kind: hash, train: 0.8, validation: 0, test: 0.2}",
        "contract.epochs=8",
    )
    parties = build(example, *without, STOPPING, both=[*SMALL, *without])
    run_in_process(parties)
    assert 1 < len(parties.active.epochs) < 8
    with pytest.raises(SettingsError, match=r"early_stopping needs contract\.split\.validation"):
        build(example, *without, STOPPING, NONE, both=[*SMALL, *without])
