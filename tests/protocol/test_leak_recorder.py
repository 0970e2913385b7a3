"""What both parties write down of the leak: per batch, per epoch, over the run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from active_party.recorder import ActiveRecorder
from common.party_data import PartyData
from passive_party.recorder import PassiveRecorder
from tests.runs import build_parties, run_in_process, write_example


class Recorded(NamedTuple):
    """What one party left behind."""

    lines: list[dict[str, Any]]
    summary: dict[str, Any]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def record(
    folder: Path, active: Sequence[str] = (), passive: Sequence[str] = ()
) -> tuple[Recorded, Recorded]:
    """Run both parties with their recorders, each with room for every batch in its queue."""
    write_example(folder)
    roomy = ("leak_monitor.queue_batches=512", "adversary.queue_batches=512")
    parties = build_parties(folder, (roomy[0], *active), (roomy[1], *passive))
    settings = parties.passive_settings
    assert settings.adversary is not None
    assert settings.adversary.labels is not None
    labels = PartyData.load(settings.adversary.labels, folder)
    ids = PartyData.load(settings.data, folder).ids
    folders = folder / "active", folder / "passive"
    for party in folders:
        party.mkdir()
    with (
        ActiveRecorder(parties.active_settings, folders[0]) as monitor,
        PassiveRecorder(settings, folders[1], ids, labels) as adversary,
    ):
        parties.session._observer = monitor
        parties.run._observer = adversary
        run_in_process(parties)
    active_lines, passive_lines = (
        [json.loads(line) for line in (party / "metrics.jsonl").read_text().splitlines()]
        for party in folders
    )
    return (
        Recorded(active_lines, monitor.summary({})),
        Recorded(passive_lines, adversary.summary()),
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorded, Recorded]:
    return record(tmp_path_factory.mktemp("recorded"))


def test_each_epoch_s_leak_is_written_once_whatever_is_evaluated(
    recorded: tuple[Recorded, Recorded],
) -> None:
    active, _ = recorded
    assert active.of_kind("validation")
    for party in recorded:
        assert [line["epoch"] for line in party.of_kind("epoch_leak")] == [0, 1]


def test_both_parties_measure_the_same_on_the_same_gradients(
    recorded: tuple[Recorded, Recorded],
) -> None:
    """Without a defense even the oracle's clean gradient is one that both sides know."""
    active, passive = recorded
    assert active.of_kind("leak")
    for sent, received in zip(active.of_kind("leak"), passive.of_kind("leak"), strict=True):
        for name in ("epoch", "step", "random_leak_auc"):
            assert sent[name] == received[name]
        for attack in ("norm", "cosine", "spectral"):
            name = f"cut/{attack}_leak_auc"
            assert sent.get(name) == pytest.approx(received.get(name), abs=1e-12)
    for attack, figures in active.summary["leak"]["cut"].items():
        assert figures == pytest.approx(passive.summary["leak"]["cut"][attack], abs=1e-12)
    assert set(passive.summary["leak"]) == {"cut", "first"}
    assert active.summary["leak_batches"] == passive.summary["leak_batches"]
