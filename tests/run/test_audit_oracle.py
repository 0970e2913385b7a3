"""Audits as an oracle: a peer that chooses its scores so that the answers name single labels."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.active_party.run.audit_service import MAX_LAYERS, AuditService
from splitveil.common.errors import AuditRefused, OutOfStep, SettingsError, TooLarge
from splitveil.common.privacy.adversary import Adversary
from splitveil.common.privacy.attacks import LABEL_FREE
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.run.messages import AuditQuestion
from splitveil.common.run.sample_order import positions_digest
from tests.support.peers import Lost, dying
from tests.support.runs import Parties, build_parties, run_in_process, write_example

ROWS = 20_000
ALLOWED = ["contract.audits_allowed=true", "contract.batch_size=1024"]
EVERY_STEP = "contract.checkpoints={every_steps: 1, keep: 100}"


def answer_to(scores: torch.Tensor, labels: torch.Tensor) -> float:
    rows, service = np.arange(len(scores)), AuditService(is_open=True)
    service.open_epoch(0)
    question = AuditQuestion("run", 0, "norm", "cut", positions_digest(rows), scores)
    return service.answer(question, rows, labels.__getitem__, lambda *_: None)


@pytest.mark.parametrize("rare", [1, 11, 999])
def test_no_audit_is_answered_with_fewer_than_a_thousand_of_a_class(rare: int) -> None:
    rare_positives = (torch.arange(ROWS) < rare).float()
    for labels in (rare_positives, 1 - rare_positives):
        with pytest.raises(AuditRefused):
            answer_to(torch.rand(ROWS), labels)


@pytest.mark.parametrize("label", [0, 1])
def test_one_answer_reveals_the_last_label_to_a_peer_that_knows_the_others(label: int) -> None:
    """Audits are no protection of a single label, however many rows of each class there are."""
    last = 3999
    if_0 = (torch.arange(4000) < 1500).float()
    if_1 = if_0.clone()
    if_1[last] = 1

    def scores_with(negatives: int) -> torch.Tensor:
        first = (torch.arange(4000) >= 1500) & (torch.arange(4000) < 1500 + negatives)
        scores = (first | (torch.arange(4000) < 100)).float()
        scores[last] = 1
        return scores

    # Chosen before anything is asked, by what the answer would be for either label.
    revealing = next(
        scores
        for scores in map(scores_with, range(2000))
        if round(leak_auc(scores, if_0), 2) != round(leak_auc(scores, if_1), 2)
    )
    answer = answer_to(revealing, (if_0, if_1)[label])
    assert (answer == round(leak_auc(revealing, if_1), 2)) is bool(label)


def test_only_attacks_on_received_gradients_are_measured() -> None:
    assert set(LABEL_FREE) == {
        *("norm", "cosine_majority", "spectral", "residual_energy", "regress_out", "kmeans"),
        *("accumulated_spectral", "accumulated_residual_energy"),
    }


# ---- what is counted stays counted ----


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("example")
    write_example(folder, rows=7500)
    return folder


def parties_in(example: Path, runs: Path) -> Parties:
    overrides = [*ALLOWED, EVERY_STEP]
    return build_parties(example, [*overrides, "allow_audits=true"], overrides, runs=runs)


def question(parties: Parties, layer: str, attack: str = "norm") -> AuditQuestion:
    rows = parties.session.lifecycle.answering.rows.splits["train"]
    scores = torch.rand(len(rows), generator=torch.Generator().manual_seed(3))
    return AuditQuestion(parties.session.run_id, 1, attack, layer, positions_digest(rows), scores)


def test_answers_and_layers_outlive_a_killed_process(example: Path, tmp_path: Path) -> None:
    """The checkpoint from which it resumes was taken before any of the answers."""
    parties = parties_in(example, tmp_path)
    run_in_process(parties)
    for number in range(MAX_LAYERS):
        parties.session.audit(question(parties, f"layer{number}"))
        parties.session.audit(question(parties, f"layer{number}"))  # the same answer again
    assert parties.active.audits_answered == MAX_LAYERS
    for party in ("active", "passive"):
        for state in sorted((tmp_path / party / "checkpoint").glob("at-*.state"))[-2:]:
            state.unlink()
    again = parties_in(example, tmp_path)
    assert again.session.reopen()
    run_in_process(again)
    assert (
        again.session.lifecycle.phase.audits_answered == again.active.audits_answered == MAX_LAYERS
    )
    with pytest.raises(TooLarge):
        again.session.audit(question(again, "one-more"))
    asked = question(again, "layer0")
    with pytest.raises(OutOfStep, match="other bytes"):
        again.session.audit(replace(asked, scores=asked.scores.flip(0)))
    again.session.audit(question(again, "layer0", "spectral"))
    assert again.active.audits_answered == MAX_LAYERS + 1


VOIDING = ("allow_audits=true", "leak_gate={max_leak_auc: 0.9, action: stop}")


@pytest.mark.parametrize("setting", VOIDING)
def test_what_voids_a_bound_cannot_be_switched_on_after_the_answers_that_have_it(
    tmp_path: Path, setting: str
) -> None:
    """The accounts hold what each answer was charged, and nobody is charged for an audit."""
    write_example(tmp_path)
    both = [ALLOWED[0], EVERY_STEP]
    noisy = "defense={name: noisy_label, mechanism: {kind: randomized_response, epsilon: 0.5}}"

    def parties(name: str, *active: str) -> Parties:
        runs = tmp_path / name
        return build_parties(tmp_path, [*both, noisy, f"runs_dir={runs}", *active], both, runs=runs)

    first = parties("off")
    run_in_process(first)
    bound = first.session.leak_bounds().guarantee.max
    assert bound < 0.7
    with pytest.raises(SettingsError, match="allow_audits, leak_gate: the run began with bounds"):
        parties("off", setting).session.reopen()
    again = parties("off", "run_budget={leak_auc: 0.8}")  # other limits may change
    assert again.session.reopen()
    assert again.session.leak_bounds().guarantee.max == bound

    began_without = parties("on", setting)
    with pytest.raises(Lost):
        run_in_process(began_without, dying(7, after=True))
    resumed = parties("on")
    assert resumed.session.reopen()
    run_in_process(resumed)
    assert resumed.session.leak_bounds().guarantee.max == 1
    assert resumed.session.lifecycle.answering.budget.peers is Adversary.HONEST_BUT_CURIOUS


def test_an_answer_is_one_of_51_figures() -> None:
    generator = torch.Generator().manual_seed(1)
    labels, answers = torch.arange(4000) % 2, set()
    for seed in range(60):
        scores = torch.rand(4000, generator=generator) + labels * (seed / 40 - 0.5)
        answers.add(answer_to(scores.float(), labels.float()))
    assert len(answers) > 20
    assert answers <= {round(0.5 + n / 100, 2) for n in range(51)}
    assert math.log2(51) < 5.7
