"""Runs that exchange each row once: what is sent, charged, refused, and resumed."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from splitveil.common.errors import Interrupted, InvalidMessage, OutOfStep, SettingsError
from splitveil.common.run.messages import Activation, Answer, Course, DefendedGradient, LeaveReason
from splitveil.library.recorded import clear_engine
from tests.support import simulation
from tests.support.peers import DiesAt, InProcessPeer, Lost
from tests.support.runs import Parties, build_parties, run_in_process, write_example

ONE_SHOT = ("contract.exchange=one_shot",)
PCA = "bottom_model={kind: pca}"
NOISY = (*ONE_SHOT, "contract.noisy_labels=true")
RELEASE = "defense={name: noisy_label, mechanism: {kind: gaussian}, insecure_noise_seed: 7}"
SCORE = "bottom_model={kind: score}"


def one_shot(folder: Path, *, noisy: bool = True, runs: Path | None = None) -> Parties:
    both = NOISY if noisy else ONE_SHOT
    active = [*both, *([RELEASE] if noisy else [])]
    passive = [*both, SCORE if noisy else PCA, "adversary=null"]
    return build_parties(folder, active, passive, runs=runs)


def of_run(parties: Parties) -> dict[str, Tensor]:
    """Return all that a run leaves: both models, and each row's activation as it was received."""
    trainer = parties.session.lifecycle.answering.trainer
    assert trainer.memory is not None
    return parties.weights() | {"received": trainer.memory.state_dict()["values"]}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# ---- resuming ----


class Ends(DiesAt):
    """Ends at one of its messages: killed, or interrupted by its operator."""

    error: type[BaseException] = Lost

    def _maybe_die(self, *, after: bool) -> None:
        if after is self.after and self._calls == self.at:
            raise self.error

    def leave(self, run_id: str, reason: LeaveReason) -> None:
        if self.error is Interrupted:  # which saves both parties' states
            InProcessPeer.leave(self, run_id, reason)
        else:
            super().leave(run_id, reason)


@pytest.mark.parametrize(("noisy", "places"), [(False, (2,)), (True, range(1, 7))])
def test_a_run_that_ends_at_any_message_resumes_with_the_same_bits(
    tmp_path: Path, noisy: bool, places: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passive party is interrupted or killed, and both of them once more in what is left."""
    monkeypatch.setattr(simulation, "build_engine", clear_engine)
    write_example(tmp_path, rows=160)
    whole = one_shot(tmp_path, noisy=noisy)
    run_in_process(whole)
    expected, bounds = of_run(whole), whole.session.leak_bounds()
    assert whole.session.lifecycle.answering.batch_number == (6 if noisy else 4)
    for at in places:
        for error, after in ((Interrupted, False), (Lost, True)):
            runs = tmp_path / f"runs-{at}-{after}"
            peer = type("Ending", (Ends,), {"at": at, "after": after, "error": error})
            first = one_shot(tmp_path, noisy=noisy, runs=runs)
            with pytest.raises(error):
                run_in_process(first, peer)
            both = one_shot(tmp_path, noisy=noisy, runs=runs)
            if error is Lost:
                both.session = first.session
            else:
                both.session.reopen()
            killed = type("Killed", (Ends,), {"at": 1, "after": not after})
            with suppress(Lost):  # a run that is over asks nothing
                run_in_process(both, killed)
            resumed = one_shot(tmp_path, noisy=noisy, runs=runs)
            resumed.session.reopen()
            run_in_process(resumed)
            assert_equal(of_run(resumed), expected)
            assert resumed.session.leak_bounds() == bounds


# ---- what is refused before anything is sent ----

GRADIENTS = "expected none, as contract.noisy_labels: false says"
REFUSED: dict[str, tuple[Sequence[str], Sequence[str], str]] = {
    "a bottom model that would have to learn": (ONE_SHOT, [], "bottom_model.kind: mlp learns"),
    "a defense of gradients": ([*ONE_SHOT, "defense={name: marvell}"], [PCA], GRADIENTS),
    "a release that nobody agreed on": ([*ONE_SHOT, RELEASE], [PCA], GRADIENTS),
    "labels without a defense": (NOISY, [SCORE], "expected noisy_label by gaussian noise"),
    "noise of another kind": (
        [*NOISY, "defense={name: noisy_label, mechanism: {kind: laplace, epsilon: 1}}"],
        [SCORE],
        "expected noisy_label by gaussian noise",
    ),
    "an early end": (
        [*ONE_SHOT, "early_stopping={patience_epochs: 1}"],
        [PCA],
        "early_stopping: a one-shot run ends with its last row",
    ),
    "a score without labels": (ONE_SHOT, [SCORE], "bottom_model.kind: a score is fitted to noisy"),
    "labels in a run with gradients": (["contract.noisy_labels=true"], [], "noisy_labels: only"),
    "more classes than values": (
        [*NOISY, RELEASE, "data.classes=[a, b, c, d, e, f]"],
        [SCORE],
        "a score of each of 6 classes but one needs at least 5 values, got 4",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_settings_that_do_not_fit_are_refused(example: Path, what: str) -> None:
    active, passive, reads = REFUSED[what]
    agreed = [one for one in active if one.startswith("contract.")]
    with pytest.raises(SettingsError, match=re.escape(reads)):
        build_parties(example, active, [*agreed, *passive])


UNFIT: dict[str, tuple[Sequence[str], str]] = {
    "more values than directions": (
        [SCORE, "contract.cut_shape=[90]"],
        "have 80 independent directions; expected contract.cut_shape of at most [80], got [90]",
    ),
    "columns that are not there": (
        ["bottom_model={kind: score, columns: 1, columns_from: [x1, y1]}"],
        "bottom_model.columns_from: no columns of data.features: y1",
    ),
}


@pytest.mark.parametrize("what", UNFIT)
def test_what_cannot_be_fitted_is_refused_before_any_label_is_released(
    example: Path, what: str
) -> None:
    passive, reads = UNFIT[what]
    both = [*NOISY, *(one for one in passive if one.startswith("contract."))]
    parties = build_parties(example, [*both, RELEASE], [*both, *passive])
    with pytest.raises(SettingsError, match=re.escape(reads)):
        run_in_process(parties)
    assert not parties.session.lifecycle.phase.has_answered
    assert parties.session.leak_bounds().sum_kl.max == 0


# ---- a peer that does not keep to the course ----


class Altering(InProcessPeer):
    """Sends something else in place of the first question of a pass."""

    split: ClassVar[str]
    altered: ClassVar[Callable[[Activation], Sequence[Activation]]]

    def _instead(self, activation: Activation) -> Sequence[Activation]:
        batch = activation.batch
        is_first = batch.split == self.split and batch.step == 0
        return type(self).altered(activation) if is_first else [activation]

    def _exchange(self, activation: Activation) -> Answer:
        return [super(Altering, self)._exchange(one) for one in self._instead(activation)][-1]

    def evaluate(self, activation: Activation) -> Course:
        return [super(Altering, self).evaluate(one) for one in self._instead(activation)][-1]


def with_values(change: Callable[[Tensor], Tensor]) -> Callable[[Activation], Activation]:
    return lambda sent: replace(sent, values=change(sent.values))


def of_batch(**changes: Any) -> Callable[[Activation], Activation]:
    return lambda sent: replace(sent, batch=sent.batch._replace(**changes))


Sent = Sequence[Callable[[Activation], Activation]]
ONCE_MORE: Callable[[Activation], Activation] = lambda sent: sent  # noqa: E731
STRAY: dict[str, tuple[str, Sent]] = {
    "rows again with other values": ("survey", [ONCE_MORE, with_values(lambda one: one + 1)]),
    "rows again as the next ones": ("survey", [ONCE_MORE, of_batch(step=1)]),
    "other rows": ("survey", [of_batch(rows_digest=bytes(16))]),
    "too many rows": ("survey", [with_values(lambda one: torch.cat([one, one]))]),
    "no rows": ("survey", [with_values(lambda one: one[:0])]),
    "labels again with other bytes": (
        "labels",
        [ONCE_MORE, with_values(lambda one: torch.ones(len(one), 4))],
    ),
    "labels of other rows": ("labels", [of_batch(rows_digest=bytes(16))]),
    "labels of fewer rows": ("labels", [with_values(lambda one: one[1:])]),
    "training rows for a gradient": ("labels", [of_batch(split="train")]),
}


@pytest.mark.parametrize("what", STRAY)
def test_a_question_that_is_not_due_is_refused(example: Path, what: str) -> None:
    """Its labels are charged at most once, and the error names no row."""
    split, sent = STRAY[what]
    parties = one_shot(example)

    def altered(activation: Activation) -> Sequence[Activation]:
        return [change(activation) for change in sent]

    peer = type("Strays", (Altering,), {"split": split, "altered": staticmethod(altered)})
    with pytest.raises(OutOfStep) as refused:
        run_in_process(parties, peer)
    assert "person-" not in str(refused.value)
    assert parties.session.leak_bounds().sum_kl.max in (0, 0.25)


def test_labels_are_not_given_in_a_run_without_them(example: Path) -> None:
    parties = one_shot(example, noisy=False)

    class Asks(InProcessPeer):
        def evaluate(self, activation: Activation) -> Course:
            batch = activation.batch._replace(split="labels")
            self._exchange(Activation(batch, activation.values[:, :0]))
            return Course.STOP

    with pytest.raises(OutOfStep, match="expected the survey rows now"):
        run_in_process(parties, Asks)
    assert parties.session.leak_bounds().sum_kl.max == 0


def test_labels_of_another_width_than_before_end_the_run(example: Path) -> None:
    class Widens(InProcessPeer):
        def receive_gradient(self) -> Answer:
            found = super().receive_gradient()
            wider = torch.cat([found.values] * (1 + found.batch.step), dim=1)
            return Answer(found.batch, DefendedGradient(wider))

    with pytest.raises(InvalidMessage, match="other numbers of values"):
        run_in_process(one_shot(example), Widens)
