"""Audits as an oracle: a peer that chooses its scores so that the answers name single labels."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from splitveil.active_party.run.audit_service import MAX_LAYERS, AuditService
from splitveil.common.errors import AuditRefused, OutOfStep, TooLarge
from splitveil.common.privacy.attacks import LABEL_FREE
from splitveil.common.privacy.leakage import leak_auc
from splitveil.common.run.messages import AuditQuestion
from splitveil.common.run.sample_order import positions_digest
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


def test_an_answer_is_one_of_51_figures() -> None:
    generator = torch.Generator().manual_seed(1)
    labels, answers = torch.arange(4000) % 2, set()
    for seed in range(60):
        scores = torch.rand(4000, generator=generator) + labels * (seed / 40 - 0.5)
        answers.add(answer_to(scores.float(), labels.float()))
    assert len(answers) > 20
    assert answers <= {round(0.5 + n / 100, 2) for n in range(51)}
    assert math.log2(51) < 5.7
