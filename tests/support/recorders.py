"""Runs that both parties' recorders observe, as they do in a process of their own."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.common.party.party_data import PartyData
from splitveil.passive_party.recorder import PassiveRecorder
from tests.support.runs import Parties, build_parties, run_in_process, write_example


class Recorders(NamedTuple):
    active: ActiveRecorder
    passive: PassiveRecorder
    folders: tuple[Path, Path]

    def lines(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        active, passive = (
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in self.folders
        )
        return active, passive


@contextmanager
def recorders(parties: Parties, runs: Path) -> Iterator[Recorders]:
    """Let recorders observe both parties; the adversary knows the labels that its settings name."""
    folders = runs / "active", runs / "passive"
    for folder in folders:
        folder.mkdir(exist_ok=True)
    settings = parties.passive_settings
    known = None if settings.adversary is None else settings.adversary.labels
    labels = None if known is None else PartyData.load(known, settings.base_dir)
    ids = PartyData.load(settings.data, settings.base_dir).ids
    with (
        ActiveRecorder(parties.active_settings, folders[0]) as monitor,
        PassiveRecorder(settings, folders[1], ids, labels) as adversary,
    ):
        parties.session.lifecycle.observer = monitor
        parties.run.observer = adversary
        yield Recorders(monitor, adversary, folders)


class Recorded(NamedTuple):
    lines: list[dict[str, Any]]
    summary: dict[str, Any]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def record(
    folder: Path, active: Sequence[str] = (), passive: Sequence[str] = (), rows: int = 400
) -> tuple[Recorded, Recorded]:
    write_example(folder, rows)
    parties = build_parties(folder, active, passive)
    with recorders(parties, folder) as both:
        run_in_process(parties)
    active_lines, passive_lines = both.lines()
    return (
        Recorded(active_lines, both.active.summary({}).form()),
        Recorded(passive_lines, both.passive.summary().form()),
    )
