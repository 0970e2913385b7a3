"""The audit: its measurements and state, and that its worker never delays training."""

import dataclasses
import itertools
import math
import os
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from splitveil.common.privacy.attacks import ATTACKS, BUILT_IN_NAMES, FINAL_ATTACKS, RUN_ATTACKS
from splitveil.common.privacy.audit import AuditedBatch, LeakAudit
from splitveil.common.privacy.audit_worker import AuditWorker, CpuBudget
from splitveil.common.privacy.informed import KnownPredictions
from splitveil.common.privacy.observation import (
    Clues,
    Observation,
    pick_clues,
    pick_hint_rows,
    pick_reference_row,
)
from tests.support.equality import same, stored
from tests.support.waiting import HANGS_AFTER_S

_SEED = bytes(32)

CELL = 2.6e-5
"""How far a quantile may be off: half a cell of the counts, and rounding."""


def _observation(epoch: int, step: int) -> Observation:
    """Noisy logistic gradients of a batch of 64, with all that attacks may know."""
    generator = torch.Generator().manual_seed(1000 * epoch + step)
    labels = (torch.rand(64, generator=generator) < 0.3).float()
    coefficients = (0.4 - labels)[:, None]
    layers = {}
    for layer, layer_dim in {"cut": 8, "first": 12}.items():
        weight = torch.randn(layer_dim, generator=generator)
        noise = torch.randn(64, layer_dim, generator=generator)
        layers[layer] = coefficients * weight + 0.5 * noise
    seen = Observation(
        epoch,
        step,
        layers,
        labels,
        positions=torch.arange(64) + 64 * step,
        activations=layers["first"][:, :4] ** 2,
        predictions=KnownPredictions(torch.full((64,), 0.3), layers["cut"]),
    )
    return dataclasses.replace(seen, clues={1: pick_clues(seen, layers, _SEED, 5)})


def _run(num_epochs: int = 2, num_steps: int = 5) -> Iterator[Observation]:
    places = itertools.product(range(num_epochs), range(num_steps))
    return (_observation(epoch, step) for epoch, step in places)


class _GatedAudit(LeakAudit):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.entered = threading.Event(), threading.Event()

    def observe(self, observation: Observation) -> AuditedBatch | None:
        self.entered.set()
        assert self.gate.wait(HANGS_AFTER_S)
        return super().observe(observation)


def test_a_batch_gets_scikit_learns_leak_aucs() -> None:
    observation = _observation(0, 3)
    measured = LeakAudit().observe(observation)
    assert measured is not None
    labels = observation.labels.numpy()
    chosen = np.arange(64) != observation.clues[1].reference_row
    for layer, gradients in observation.gradients.items():
        rows = gradients.double().numpy()
        lengths = np.sqrt((rows**2).sum(axis=1))
        cosines = rows @ rows[observation.clues[1].reference_row] / lengths
        scores = {"norm": lengths, "spectral": rows @ np.linalg.svd(rows)[2][0]}
        expected = {name: roc_auc_score(labels, values) for name, values in scores.items()}
        expected["cosine"] = roc_auc_score(labels[chosen], cosines[chosen])
        assert measured.leak[layer].keys() == expected.keys()
        for name, value in expected.items():
            leak = max(value, 1 - value)
            assert measured.leak[layer][name] == pytest.approx(leak, abs=1e-12), name


def test_cosine_is_measured_only_where_there_is_another_positive() -> None:
    gradients = _observation(0, 0).gradients
    labels = (torch.arange(64) == 7).float()
    references = {layer: rows[7] for layer, rows in gradients.items()}
    audit = LeakAudit()
    measured = audit.observe(Observation(0, 1, gradients, labels, {1: Clues(references, 7)}))
    assert measured is not None
    assert measured.leak["cut"].keys() == {"norm", "spectral"}
    assert "cosine" not in audit.summary()["cut"]
    audit.observe(_observation(0, 2))
    found = audit.summary()["cut"]["cosine"]
    assert found.q95 == pytest.approx(found.mean, abs=CELL)


@pytest.mark.parametrize("labels", [torch.zeros(64), torch.ones(64)], ids=["negative", "positive"])
def test_a_batch_of_one_class_is_skipped_and_counted(labels: torch.Tensor) -> None:
    audit = LeakAudit()
    observation = _observation(0, 0)
    assert audit.observe(Observation(0, 0, observation.gradients, labels)) is None
    assert audit.counts() == (0, 1, 0)
    assert audit.summary() == {}
    assert audit.latest() is None


def test_the_summary_is_that_of_the_batches() -> None:
    audit = LeakAudit()
    measured = [leak for leak in map(audit.observe, _run(num_epochs=3)) if leak]
    summary = audit.summary()
    assert {layer: set(attacks) for layer, attacks in summary.items()} == {
        layer: {"norm", "cosine", "spectral"} for layer in ("cut", "first")
    }
    values = [leak.leak["first"]["norm"] for leak in measured]
    assert summary["first"]["norm"] == pytest.approx(
        (
            np.quantile(values, 0.95),
            np.mean(values),
            np.mean(values[-5:]),
            np.quantile([leak.random for leak in measured], 0.95),
        ),
        abs=CELL,
    )
    assert audit.epoch_means(1)["first"]["norm"] == pytest.approx(np.mean(values[5:10]))
    assert audit.epoch_means(7) == {}
    assert audit.latest() == measured[-1]
    assert audit.counts() == (15, 0, 0)


def test_random_scores_are_a_floor_not_a_leak() -> None:
    """E|AUC - 1/2| of random scores is sqrt(2/pi) standard errors; a score that knows passes it."""
    audit = LeakAudit(["norm"])
    labels = (torch.arange(400) % 4 == 0).float()
    knows = torch.randn(400, 4, generator=torch.Generator().manual_seed(1)) * (1 + labels)[:, None]
    floors = []
    for step in range(300):
        measured = audit.observe(Observation(0, step, {"cut": knows}, labels))
        assert measured is not None
        floors.append(measured.random)
    error = np.sqrt((400 + 1) / (12 * 100 * 300))
    expected = 0.5 + np.sqrt(2 / np.pi) * error
    assert abs(np.mean(floors) - expected) < 5 * 0.61 * error / np.sqrt(300)
    assert len(set(floors)) > 250
    assert audit.summary()["cut"]["norm"].q95 > audit.summary()["cut"]["norm"].random_q95


def test_both_parties_pick_the_same_positive_and_not_always_the_same_place() -> None:
    labels = (torch.arange(100) % 3 == 0).int()
    picked = [pick_reference_row(labels, _SEED, epoch, 5) for epoch in range(50)]
    assert picked == [pick_reference_row(labels.bool(), _SEED, epoch, 5) for epoch in range(50)]
    assert all(row is not None and labels[row] == 1 for row in picked)
    assert len(set(picked)) > 20
    assert picked != [pick_reference_row(labels, bytes(31) + b"1", e, 5) for e in range(50)]
    assert pick_reference_row(torch.zeros(5), _SEED, 0, 0) is None
    drawn = [pick_hint_rows(labels, _SEED, epoch, 5, 5) for epoch in range(20)]
    assert drawn == [pick_hint_rows(labels.bool(), _SEED, epoch, 5, 5) for epoch in range(20)]
    assert all(len(set(rows)) == 5 and bool((labels[list(rows)] == 1).all()) for rows in drawn)
    assert len({rows[0] for rows in drawn}) > 10
    assert pick_hint_rows(labels, _SEED, 0, 5, 3) == drawn[0][:3]
    assert pick_hint_rows(torch.zeros(5), _SEED, 0, 0, 3) == ()


def test_every_attack_can_be_audited_at_every_layer() -> None:
    audit = LeakAudit(BUILT_IN_NAMES, num_examples=5 * 64)
    measured = [audit.observe(observation) for observation in _run(num_epochs=2)]
    assert all(leak is not None for leak in measured)
    audit.run.close_epoch()
    for layer in ("cut", "first"):
        at_cut = {"activation_spectral", "activation_kmeans", "informed", "accumulated_informed"}
        of_batches, of_run = (
            set(names) - (set() if layer == "cut" else at_cut.union(FINAL_ATTACKS))
            for names in (tuple(ATTACKS), tuple(RUN_ATTACKS))
        )
        assert set(audit.summary()[layer]) == of_batches
        assert set(audit.run.result()[0][layer]) == of_run - {"completion_400"}  # all examples
        added_up = {name for name in of_run if name.startswith("accumulated_")}
        assert set(audit.run.after_epoch(1)[layer]) == added_up
    for layer, attacks in audit.worst_epochs().items():
        for attack, worst in attacks.items():
            means = [audit.epoch_means(epoch)[layer][attack] for epoch in range(2)]
            assert worst == max(means)


def test_in_the_papers_convention_nothing_is_left_out_or_mirrored() -> None:
    observation = _observation(0, 0)
    short = observation.gradients["cut"] * (1 - 0.9 * observation.labels[:, None])
    observation = dataclasses.replace(observation, gradients={"cut": short})
    audit = LeakAudit(["norm", "cosine"], convention="paper")
    labels, rows = observation.labels.numpy(), observation.gradients["cut"].double().numpy()
    row = observation.clues[1].reference_row
    assert row is not None
    lengths = np.linalg.norm(rows, axis=1)
    scores = {"norm": lengths, "cosine": rows @ rows[row] / lengths}  # the positive's own is 1
    expected = {name: roc_auc_score(labels, values) for name, values in scores.items()}
    assert expected["norm"] < 0.5
    measured = audit.observe(observation)
    assert measured is not None
    assert measured.leak["cut"] == pytest.approx(expected, abs=1e-12)
    # Random scores: AUCs of n and m examples are nearly normal with variance (n + m + 1) / 12nm.
    for step in range(1, 1000):
        audit.observe(dataclasses.replace(observation, step=step))
    random = audit.summary()["cut"]["norm"].random_q95
    positives = int(labels.sum())
    spread = math.sqrt(65 / (12 * positives * (64 - positives)))
    assert random == pytest.approx(0.5 + 1.645 * spread, abs=0.25 * spread)  # mirrored: 1.96


def test_hints_are_left_out_of_their_own_attack_s_auc_alone() -> None:
    observation = _observation(0, 0)
    measured = LeakAudit(["hint_distance_3", "norm"]).observe(observation)
    assert measured is not None
    labels, known = observation.labels.numpy(), list(observation.clues[1].hint_rows[:3])
    rows = observation.gradients["cut"].double().numpy()
    scores = -np.linalg.norm(rows[:, None] - rows[known][None], axis=2).min(axis=1)
    others = np.delete(np.arange(64), known)
    expected = roc_auc_score(labels[others], scores[others])
    assert measured.leak["cut"]["hint_distance_3"] == pytest.approx(
        max(expected, 1 - expected), abs=1e-12
    )
    norms = roc_auc_score(labels, np.linalg.norm(rows, axis=1))
    assert measured.leak["cut"]["norm"] == pytest.approx(max(norms, 1 - norms), abs=1e-12)


def test_an_attack_without_what_it_needs_is_not_measured() -> None:
    labels = (torch.arange(64) == 7).float()
    bare = Observation(0, 0, _observation(0, 0).gradients, labels)
    measured = LeakAudit(BUILT_IN_NAMES, num_examples=64).observe(bare)
    assert measured is not None
    need_nothing = {"norm", "cosine_majority", "spectral", "residual_energy", "kmeans"}
    assert set(measured.leak["cut"]) == need_nothing


def test_class_oracles_find_nothing_in_noise_with_few_examples() -> None:
    """Each half is scored by the other's classes: an example never scores itself.

    Chance moves both halves the same way, which makes its deviation larger by the root of 2.
    """
    generator = torch.Generator().manual_seed(31)
    audit = LeakAudit(["mean", "median", "lda"])
    labels = (torch.arange(60) % 4 == 0).float()
    for step in range(60):
        noise = torch.randn(60, 50, generator=generator)
        audit.observe(Observation(0, step, {"cut": noise}, labels))
    for attack, figures in audit.summary()["cut"].items():
        chance = np.sqrt(2) * np.sqrt(2 / np.pi) * np.sqrt(61 / (12 * 15 * 45))
        assert figures.mean < 0.5 + chance + 0.02, attack


def test_a_worker_that_keeps_up_equals_the_inline_audit() -> None:
    inline, audit = LeakAudit(), LeakAudit()
    expected = [inline.observe(observation) for observation in _run()]
    results: list[AuditedBatch] = []
    with AuditWorker(audit, queue_batches=10, on_result=results.append) as worker:
        assert all(worker.submit(observation) for observation in _run())
    assert results == expected
    assert audit.summary() == inline.summary()
    assert audit.counts() == inline.counts() == (10, 0, 0)


def test_a_worker_that_is_behind_leaves_batches_out_and_never_blocks() -> None:
    audit = _GatedAudit()
    worker = AuditWorker(audit, queue_batches=2)
    assert worker.submit(_observation(0, 0))
    assert audit.entered.wait(HANGS_AFTER_S)
    observations = [_observation(0, step) for step in range(1, 50)]
    taken = [worker.submit(observation) for observation in observations]
    assert not audit.gate.is_set()  # a call that waits for the audit would wait for this test
    assert taken == [True, True] + [False] * 47
    audit.gate.set()
    worker.close()
    assert audit.counts() == (3, 0, 47)


def test_a_budget_is_a_share_of_the_time_of_which_no_more_than_a_second_is_saved() -> None:
    """Batches of 10 ms CPU every 20 ms, under a share of 4 %."""
    budget, taken = CpuBudget(0.04, now_s=100.0), []
    for number in range(10_000):
        now_s = 100 + 0.02 * number
        if budget.allows(now_s):
            taken.append(now_s)
            budget.pay(0.01)
    first_second = 0.01 * len([now_s for now_s in taken if now_s < 103])
    assert 1 < first_second < 1.2
    rest = 0.01 * len([now_s for now_s in taken if now_s >= 103]) / 197
    assert rest == pytest.approx(0.04, rel=0.01)
    endless = CpuBudget(None, now_s=0.0)
    for _ in range(1000):
        assert endless.allows(0.0)
        endless.pay(0.01)
    hoarding = CpuBudget(0.5, now_s=0.0)
    assert hoarding.allows(1e6)
    hoarding.pay(1.01)
    assert not hoarding.allows(1e6)


def test_a_batch_beyond_the_share_is_left_out_and_its_observation_not_put_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("splitveil.common.privacy.audit_worker._BURST_S", 1e-9)
    audit = LeakAudit(["norm"])
    observations = {step: _observation(0, step) for step in range(3)}
    built: list[int] = []

    def build(step: int) -> Observation:
        built.append(step)
        return observations[step]

    with AuditWorker(audit, max_cpu_share=1e-6) as worker:
        assert worker.submit_later(observations[0].gradients, partial(build, 0))
        assert worker.wait_until_idle(HANGS_AFTER_S)
        assert not worker.submit_later(observations[1].gradients, partial(build, 1))
    assert not worker.submit_later(observations[2].gradients, partial(build, 2))
    assert built == [0]
    assert audit.counts() == (1, 0, 2)


def test_what_cannot_be_audited_before_the_deadline_is_left_out() -> None:
    audit = _GatedAudit()
    worker = AuditWorker(audit, queue_batches=2)
    for observation in _run(num_epochs=1, num_steps=1):
        worker.submit(observation)
    assert audit.entered.wait(HANGS_AFTER_S)
    assert worker.submit(_observation(0, 1))
    assert worker.submit(_observation(0, 2))
    worker.close(timeout_s=0.1)
    assert worker._thread.is_alive()  # it is in the first batch until the gate opens
    assert audit.counts().left_out == 2
    audit.gate.set()
    worker._thread.join(HANGS_AFTER_S)
    assert not worker._thread.is_alive()
    assert audit.counts() == (1, 0, 2)


def test_an_error_in_the_worker_surfaces_at_close_and_costs_one_batch() -> None:
    audit = LeakAudit()
    worker = AuditWorker(audit)
    good = _observation(0, 0)
    assert worker.submit(Observation(0, 1, good.gradients, torch.ones(3)[:, None] * 2))
    assert worker.submit(good)
    with pytest.raises(ValueError, match="labels in"):
        worker.close()
    assert audit.counts() == (1, 0, 1)
    assert not worker.submit(good)
    assert audit.counts().left_out == 2


def test_a_worker_that_cannot_start_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("no such limit")

    monkeypatch.setattr("splitveil.common.privacy.audit_worker._give_way", fail)
    with pytest.raises(RuntimeError, match="no such limit"):
        AuditWorker(LeakAudit()).close()


def test_the_worker_gives_way_and_leaves_the_other_threads_alone() -> None:
    before = torch.get_num_threads()
    counts: dict[str, int] = {}
    niceness: list[int] = []

    def note(_: AuditedBatch) -> None:
        torch.ones(1_000_000).sin()  # torch would set the thread up here at the latest
        counts["worker"] = torch.get_num_threads()
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    torch.set_num_threads(3)
    try:
        with AuditWorker(LeakAudit(), on_result=note) as worker:
            worker.submit(_observation(0, 0))
            later = threading.Thread(
                target=lambda: counts.update(later=torch.get_num_threads()), daemon=True
            )
            later.start()
            later.join()
        counts["training"] = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert counts == {"worker": 1, "later": 3, "training": 3}
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert niceness == [min(own + 10, 19)]


def _whole_run(cut: int | None) -> tuple[LeakAudit, list[object]]:
    """Audit three epochs with every attack, in objects that are new from batch ``cut`` on."""
    audit = LeakAudit(BUILT_IN_NAMES, num_examples=5 * 64)
    for number, observation in enumerate(_run(num_epochs=3, num_steps=4)):
        if number == cut:
            state = audit.state_dict()
            copy = stored(state)
            audit.observe(_observation(9, 0))  # what comes later changes no copy
            assert same(stored(state), copy)
            audit = LeakAudit(BUILT_IN_NAMES, num_examples=5 * 64)
            audit.load_state_dict(copy)
            assert same(audit.state_dict(), state)
        if number % 7 == 3:
            audit.leave_out()
        labels = torch.zeros(64) if number % 6 == 2 else observation.labels
        audit.observe(dataclasses.replace(observation, labels=labels))
    audit.run.close_epoch()
    figures = [audit.summary(), audit.run.result()[0], audit.worst_epochs(), audit.counts()]
    figures += [audit.latest(), *map(audit.run.after_epoch, range(3))]
    return audit, figures


def test_a_run_cut_at_any_batch_resumes_bit_for_bit() -> None:
    uninterrupted, expected = _whole_run(None)
    for cut in (0, 4, 10):  # at the start, at the end of an epoch, and in its middle
        audit, figures = _whole_run(cut)
        assert figures == expected, cut
        assert same(audit.state_dict(), uninterrupted.state_dict()), cut
