"""The number of worker processes of an alignment that a party does not set itself."""

import os
from pathlib import Path

import pytest

from splitveil.common.alignment import engine_of
from splitveil.common.alignment import exchange as exchange_module
from splitveil.common.party.party_settings import load_party_settings
from splitveil.passive_party.settings import PassiveSettings
from tests.support.runs import write_example


def settings_of(folder: Path, *overrides: str) -> PassiveSettings:
    folder.mkdir()
    write_example(folder, rows=60)
    return load_party_settings(PassiveSettings, folder / "passive.yaml", list(overrides))


@pytest.mark.parametrize(
    ("cores", "num_ids", "expected"),
    [(1, 10**6, 0), (2, 10**6, 0), (3, 50_000, 0), (3, 50_001, 3), (64, 10**6, 8)],
)
def test_many_ids_on_many_cores_have_workers_by_default(
    cores: int, num_ids: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    monkeypatch.setattr(exchange_module, "EcdhEngine", lambda workers, **_: built.append(workers))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    by_default = settings_of(tmp_path / "default")
    without = settings_of(tmp_path / "without", "alignment_workers=0")
    many = settings_of(tmp_path / "many", "alignment_workers=9")
    for settings in (by_default, without, many):
        engine_of(settings, num_ids)
    assert built == [expected, 0, 9]
