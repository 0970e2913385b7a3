"""Answers stay charged when a run goes back to a checkpoint or a process is killed.

The peers here take answers, go back to an earlier checkpoint, and leave, which costs them nothing.
"""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.active_party.defenses import AnswerKeys
from splitveil.active_party.ledger.account_book import LEDGER
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.report.run_files import read_run
from splitveil.active_party.run.session import ActiveSession
from splitveil.common.errors import BudgetExhausted, OtherAnswer, ProtocolError
from splitveil.common.privacy.charge import Adversary
from splitveil.common.record.assessment import bounds_by_peers
from splitveil.common.record.model_files import save_tensors
from tests.support.peers import MARVELL, Lost, Silent, answered, go_back, leave, parties_in
from tests.support.runs import run_in_process

PERSISTENT = "defense={name: marvell, noise: persistent, insecure_noise_seed: 1}"
ISO = "defense={name: iso, noise_ratio: 4, insecure_noise_seed: 1}"
NOISY = (
    "defense={name: noisy_label, top_labels: noisy, insecure_noise_seed: 1, "
    "mechanism: {kind: randomized_response, epsilon: 1}}"
)

Accounts = dict[str, torch.Tensor]


def accounts(session: ActiveSession) -> Accounts:
    state = session.lifecycle.account_book().state_dict()
    return {name: value.clone() for name, value in state.items() if name != "runs"}


def charges(saved: Accounts) -> torch.Tensor:
    return saved["settled_sum_kl"] + saved.get("current_sum_kl", 0)


def states(folder: Path, party: str = "passive") -> list[Path]:
    return sorted((folder / party / "checkpoint").glob("at-*.state"))


@pytest.mark.parametrize("defense", [MARVELL, PERSISTENT, ISO, NOISY])
def test_a_peer_that_goes_back_and_leaves_takes_no_charge_with_it(
    example: Path, tmp_path: Path, defense: str
) -> None:
    parties = answered(example, tmp_path, defense)
    charged, bounds = accounts(parties.session), parties.session.leak_bounds()
    assert charges(charged).max() > 0
    go_back(parties.session)
    assert parties.session.leak_bounds() == bounds
    leave(parties.session)
    assert torch.equal(charges(accounts(parties.session)), charges(charged))
    assert parties.session.leak_bounds() == bounds


@pytest.mark.parametrize("resumes", [False, True])
def test_nor_does_one_whose_leaving_is_found_by_a_process_that_was_killed(
    example: Path, tmp_path: Path, *, resumes: bool
) -> None:
    """The newest checkpoint is one step behind the answers, and it resumes from checkpoint 0."""
    charged = accounts(answered(example, tmp_path, MARVELL, messages=4).session)
    again = parties_in(example, tmp_path, MARVELL)
    assert again.session.reopen()
    assert torch.equal(charges(accounts(again.session)), charges(charged))
    if resumes:
        go_back(again.session)
        assert (
            again.session.lifecycle.answering.budget.course.accounts(np.arange(10)).sum_kl.max()
            == 0
        )
    leave(again.session)
    assert torch.equal(charges(accounts(again.session)), charges(charged))


def test_the_next_run_begins_with_what_was_answered_and_its_budget_counts_it(
    example: Path, tmp_path: Path
) -> None:
    """Each run goes back and leaves after an epoch of 1/16: two of them are in .13, a third not."""
    budget, earlier = (
        "run_budget={sum_kl: 0.13, adversary: knows class means only}",
        "earlier_ledgers=[]",
    )
    for number in range(2):
        parties = answered(example, tmp_path / str(number), MARVELL, budget, earlier)
        before = parties.active.earlier
        assert (before is None) is (number == 0)
        go_back(parties.session)
        leave(parties.session)
        folder = tmp_path / f"left-{number}"
        folder.mkdir()
        save_tensors(folder, LEDGER, accounts(parties.session))
        earlier = f"earlier_ledgers=[{folder / 'checkpoint'}]"
    third = parties_in(example, tmp_path / "third", MARVELL, budget, earlier)
    with pytest.raises(BudgetExhausted, match="epoch 1 step 1"):
        run_in_process(third)
    assert third.active.sent == []


def test_an_honest_return_to_a_checkpoint_is_not_charged_twice(
    example: Path, tmp_path: Path
) -> None:
    """Two epochs of 1/16 were answered about, and the budget has room for no more."""
    budget = "run_budget={sum_kl: 0.13, adversary: knows class means only}"
    bounds = answered(example, tmp_path, MARVELL, budget, messages=12).session.leak_bounds()
    again = parties_in(example, tmp_path, MARVELL, budget)
    for state in states(tmp_path)[1:]:
        state.unlink()
    assert again.session.reopen()
    run_in_process(again)
    assert again.session.leak_bounds() == again.active.ledger[-1][1] == bounds


def other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the noise of the same question be other than before, as on another kind of device."""
    begin = AnswerKeys.begin
    monkeypatch.setattr(AnswerKeys, "begin", lambda self, key: begin(self, key[::-1]))


UNSEEDED = "defense={name: marvell, strength: {power_ratio: 16}}"


@pytest.mark.parametrize("killed", [False, True])
def test_the_same_question_gets_no_other_answer_though_the_charge_is_the_same(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, killed: bool
) -> None:
    """Every answer of this defense is charged 1/16; what gave the first one goes on."""
    parties = answered(example, tmp_path, UNSEEDED, messages=2)
    charged = charges(accounts(parties.session))
    again = parties_in(example, tmp_path, UNSEEDED)
    if killed:
        assert again.session.reopen()
    else:
        again.session, again.active = parties.session, parties.active
    for state in states(tmp_path)[1:]:
        state.unlink()
    with monkeypatch.context() as patched:
        other_noise(patched)
        with pytest.raises(OtherAnswer, match=r"epoch 1 step 1: .*another device"):
            run_in_process(again)
    assert again.active.sent == []
    assert torch.equal(charges(accounts(again.session)), charged)
    third = parties_in(example, tmp_path, UNSEEDED)
    assert third.session.reopen()
    run_in_process(third)
    assert bool((charges(accounts(third.session)) >= charged).all())


class Steps(Silent):
    left = 0

    def receive_gradient(self):  # type: ignore[no-untyped-def]
        if not Steps.left:
            raise Lost
        Steps.left -= 1
        return super().receive_gradient()


def test_a_run_goes_back_over_its_answers_only_so_often(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitveil.active_party.run.answering.MAX_RESUMPTIONS", 3)
    parties = answered(example, tmp_path)
    for restarts in (False, False, True, False):
        for state in states(tmp_path)[1:]:
            state.unlink()
        again = parties_in(example, tmp_path)
        if restarts:
            again.session.reopen()
            parties = again
        again.session, Steps.left = parties.session, 1
        is_last = again.session.lifecycle.answering.questions.log.num_resumptions() == 3
        with pytest.raises(ProtocolError if is_last else Lost):
            run_in_process(again, Steps)
    assert is_last


def test_a_budget_that_was_lowered_holds_against_what_was_answered_before(
    example: Path, tmp_path: Path
) -> None:
    """Two epochs were answered about, and each of them alone would fit."""
    answered(example, tmp_path, MARVELL, messages=12)
    again = parties_in(
        example, tmp_path, MARVELL, "run_budget={sum_kl: 0.1, adversary: knows class means only}"
    )
    assert again.session.reopen()
    for state in states(tmp_path)[1:]:
        state.unlink()
    with pytest.raises(BudgetExhausted, match="epoch 1 step 1"):
        run_in_process(again)
    assert again.active.sent == []


def test_log_summary_and_report_say_what_was_answered_and_not_where_the_run_went_back_to(
    example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parties = answered(example, tmp_path / "runs", MARVELL)
    bounds = parties.session.leak_bounds()
    folder = tmp_path / "active"
    folder.mkdir()
    with ActiveRecorder(parties.active_settings, folder) as recorder:
        parties.session.lifecycle.observer = recorder
        parties.session.lifecycle.observer.load_state_dict = lambda state: None  # type: ignore[method-assign]
        with caplog.at_level(logging.INFO):
            go_back(parties.session)
        leave(parties.session)
    assert "the ledger keeps the later answers" in caplog.text
    assert recorder.summary({}).of_active.ledger == bounds
    found = {peers: bounds.against(peers).max for peers in Adversary}
    assert bounds_by_peers(read_run(folder).ledger) == found
    assert found[Adversary.CLASS_MEANS] < found[Adversary.ANYBODY] == 1
