"""Runs with several passive parties: what they learn together, and from whom they wait."""

from pathlib import Path

import pytest

from active_party.session import Stage
from tests.several import (
    NAMES,
    Several,
    build_several,
    run_in_process,
    write_several,
)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    write_several(folder, 3)
    return folder


def ids_at(several: Several, name: str) -> list[str]:
    """Return the common ids of a party in the common order."""
    seen = several.seen if name == "active" else several.passive[name].seen
    source = several.session if name == "active" else several.passive[name].run
    ids = source.ids if name == "active" else source._ids  # type: ignore[union-attr]
    assert seen.rows is not None
    return [ids[row] for row in seen.rows.file_rows]


def test_all_parties_train_on_the_ids_that_all_have(three: Path) -> None:
    several = build_several(three)
    run_in_process(several)
    assert several.session.stage is Stage.FINISHED
    files = [(three / f"{name}.csv").read_text().splitlines()[1:] for name in ("active", *NAMES)]
    expected = set.intersection(*({line.split(",")[0] for line in lines} for lines in files))
    common = ids_at(several, "active")
    assert set(common) == expected
    assert 0 < len(expected) < min(map(len, files))
    assert all(ids_at(several, name) == common for name in NAMES)
