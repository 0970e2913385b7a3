"""The leak figures that both parties record: per batch, per epoch, over the run."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.privacy.figures import LeakFigures
from splitveil.common.privacy.settings import DEFAULT_ATTACKS, AuditSettings
from splitveil.common.record import leak_recorder
from splitveil.common.record.leak_recorder import AuditedRun, LeakRecorder
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.run_record import LeakLine
from splitveil.common.run.course import Batch
from tests.support.equality import stored
from tests.support.peers import Lost, dying
from tests.support.recorders import record
from tests.support.runs import EVERY_2, build_parties, run_in_process, write_example
from tests.support.waiting import wait_until


class FullDisk:
    def write(self, *_: object, **__: object) -> None:
        raise StorageError("metrics.jsonl: cannot be written: No space left on device")


LABELS = torch.tensor([0.0, 1.0, 0.0, 1.0])
GRADIENTS = {"cut": torch.randn(4, 2, generator=torch.Generator().manual_seed(1))}


def small_batch(step: int) -> Batch:
    return Batch(0, "train", step, np.arange(4), b"", closes_split=False, closes_epoch=False)


def test_a_full_disk_ends_the_run_at_the_next_batch_though_another_thread_met_it() -> None:
    metrics = cast("MetricsLog", FullDisk())
    recorder = LeakRecorder(AuditSettings(attacks=("norm",)), metrics, AuditedRun(b"seed", 4))
    recorder.submit(small_batch(0), GRADIENTS, LABELS)
    wait_until(lambda: recorder._unwritten is not None)
    with pytest.raises(StorageError, match="No space"):
        recorder.submit(small_batch(0), GRADIENTS, LABELS)
    with pytest.raises(StorageError, match="No space"):
        recorder.__exit__(None, None, None)


@pytest.mark.parametrize("every_s", [0.0, 1e9])
def test_every_batch_has_a_line_and_charts_have_a_batch_now_and_then(
    monkeypatch: pytest.MonkeyPatch, every_s: float
) -> None:
    monkeypatch.setattr("splitveil.common.record.metrics_log.CHARTED_EVERY_S", every_s)
    metrics, settings = Mock(MetricsLog), AuditSettings(attacks=("norm",))
    with LeakRecorder(settings, metrics, AuditedRun(b"seed", 4)) as recorder:
        for step in range(5):
            recorder.submit(small_batch(step), GRADIENTS, LABELS)
    written = [call for call in metrics.write.call_args_list if isinstance(call.args[0], LeakLine)]
    assert [call.kwargs["charted"] for call in written] == [True, *[every_s == 0] * 4]


EPOCHS, STEPS = 3, 4


def epochs_of_batches() -> Iterator[Batch]:
    """Yield the training batches of a run of which each example has a place in each epoch."""
    for epoch, step in itertools.product(range(EPOCHS), range(STEPS)):
        positions = np.random.default_rng(epoch).permutation(32)[8 * step : 8 * step + 8]
        last = step == STEPS - 1
        yield Batch(epoch, "train", step, positions, b"", closes_split=last, closes_epoch=last)


def record_batches(
    folder: Path, cut: int | None, state_of: Callable[[LeakRecorder], Any] = LeakRecorder.state_dict
) -> tuple[list[dict[str, Any]], LeakFigures]:
    """Record a run with every attack, by a recorder that is new from batch ``cut`` on."""
    attacks = ("norm", "cosine", "lda", "hint_combiner_50", *DEFAULT_ATTACKS[3:])
    settings = AuditSettings(attacks=attacks)
    with MetricsLog(folder) as metrics:
        recorder = LeakRecorder(settings, metrics, AuditedRun(b"seed", 32), copied_with=dict)
        for number, batch in enumerate(epochs_of_batches()):
            if number == cut:
                state = stored(state_of(recorder))
                recorder._worker.close()  # a process that is killed writes nothing more
                recorder = LeakRecorder(settings, metrics, AuditedRun(b"seed", 32))
                recorder.load_state_dict(state)
            generator = torch.Generator().manual_seed(number)
            labels = (torch.from_numpy(batch.positions) % 3 == 0).float()
            gradients = torch.randn(8, 3, generator=generator) + labels[:, None]
            recorder.submit(batch, {"cut": gradients}, labels)
            if batch.closes_epoch:
                recorder.end_epoch(batch.epoch)
            recorder.wait_until_idle()  # the queue is shorter than the run
        recorder.__exit__(None, None, None)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["time_s"]
    return lines, recorder.summary()


def test_a_recorder_cut_at_any_batch_writes_each_line_once_and_the_same(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    expected, summary = record_batches(whole, None)
    kinds = [line["kind"] for line in expected]
    assert (kinds.count("leak"), kinds.count("epoch_leak")) == (EPOCHS * STEPS, EPOCHS)
    for cut in range(EPOCHS * STEPS):
        folder = tmp_path / str(cut)
        folder.mkdir()
        lines, figures = record_batches(folder, cut)
        assert lines == expected, cut
        assert figures == summary, cut


def test_what_its_thread_has_copied_between_two_batches_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leak_recorder, "_COPYING", 0)
    found = []
    for name, cut in (("whole", None), ("cut", 5)):
        (tmp_path / name).mkdir()
        found.append(record_batches(tmp_path / name, cut, LeakRecorder.latest_copy))
    assert found[0] == found[1]


def test_a_peer_that_goes_back_after_every_checkpoint_hides_nothing_from_the_monitor(
    tmp_path: Path,
) -> None:
    """And leaves every line of the monitor's in the metrics, once."""
    write_example(tmp_path)
    own = [EVERY_2, "leak_monitor.max_cpu_share=null"]
    peer, found = [EVERY_2, "adversary=null"], []
    for name, returns in (("whole", 0), ("returning", 4)):
        folder = tmp_path / name
        folder.mkdir()
        first = build_parties(tmp_path, own, peer, runs=folder / "runs")
        with ActiveRecorder(first.active_settings, folder) as recorder:
            first.session.lifecycle.observer = recorder
            for at in range(returns):
                parties = build_parties(tmp_path, own, peer, runs=folder / "runs")
                parties.session = first.session
                with pytest.raises(Lost):
                    run_in_process(parties, dying(2 + at % 2, after=True))
            parties = build_parties(tmp_path, own, peer, runs=folder / "runs")
            parties.session = first.session
            run_in_process(parties)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        of_monitor = [line | {"time_s": 0} for line in lines if "leak" in line["kind"]]
        found.append((recorder.summary({}).form()["leak"], of_monitor))
    assert found[0] == found[1]


def test_a_checkpoint_holds_all_batches_handed_over_before_it_and_is_for_these_attacks_alone(
    tmp_path: Path,
) -> None:
    settings = AuditSettings(attacks=("norm", "spectral"), max_cpu_share=None)
    with (
        MetricsLog(tmp_path) as metrics,
        LeakRecorder(settings, metrics, AuditedRun(b"seed", 4)) as recorder,
    ):
        for batch in epochs_of_batches():
            recorder.submit(batch, {"cut": torch.randn(8, 3)}, torch.arange(8) % 2)
        state = recorder.state_dict()
        assert set(recorder.shown()) == {"raw_norm_leak_auc", "raw_spectral_leak_auc"}
        other = LeakRecorder(AuditSettings(attacks=("norm",)), metrics, AuditedRun(b"seed", 4))
        with other, pytest.raises(SettingsError, match="cannot change within a run"):
            other.load_state_dict(state)
    assert state["audit"]["observed"] == EPOCHS * STEPS


def test_the_adversary_uses_the_activations_that_it_sent(tmp_path: Path) -> None:
    """Once per batch, at the cut; what they tell differs from what gradients tell."""
    chosen = "attacks=[spectral, regress_out, activation_spectral]"
    _, passive = record(tmp_path, passive=[f"adversary.{chosen}"])
    summary = passive.summary["leak"]
    assert set(summary["cut"]) == {"spectral", "regress_out", "activation_spectral"}
    assert set(summary["first"]) == {"spectral", "regress_out"}
    means = [summary["cut"][attack]["mean"] for attack in summary["cut"]]
    assert len(set(means)) == 3
    # The gradients of an undefended run are known to tell everything; the activations are not.
    assert summary["cut"]["spectral"]["mean"] > 0.9
    assert summary["cut"]["activation_spectral"]["mean"] < 0.9


def test_an_attack_is_refused_where_there_are_no_activations_for_it(example: Path) -> None:
    for attack in ("regress_out", "activation_spectral"):
        with pytest.raises(SettingsError, match=f"{attack}: the leak monitor looks at gradients"):
            build_parties(example, [f"leak_monitor={{attacks: [norm, {attack}]}}"])
    chosen = "adversary={attacks: [activation_spectral], layers: [first]}"
    with pytest.raises(SettingsError, match="activation_spectral: measured at the cut"):
        build_parties(example, (), [chosen])
