"""Without the libraries of an extra, what needs them says so in one line, and all else works."""

import sys
from pathlib import Path

import pytest

from splitveil.active_party.commands.program import main as active_main
from splitveil.common.data import kinds
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.run_record import TrainingLine
from splitveil.passive_party.commands.program import main as passive_main
from tests.support.commands import exit_code_of
from tests.support.runs import write_example

SQL = "data.source={kind: sql, driver: sqlite, uri: x.sqlite, query: select 1}"
IMAGES = "data.source={kind: images, path: x, table: x.csv, file_column: x, size: [9, 9]}"


@pytest.mark.parametrize(
    ("library", "extra", "words"),
    [
        ("adbc_driver_sqlite.dbapi", "sql", ["passive", "check", SQL]),
        ("PIL", "images", ["passive", "check", IMAGES]),
        ("phonenumbers", "ids", ["passive", "check", "contract.ids={kind: phone}"]),
        ("fastapi", "serve", ["active", "serve", "status=null"]),
    ],
)
def test_a_missing_extra_is_named_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    library: str,
    extra: str,
    words: list[str],
) -> None:
    write_example(tmp_path, rows=60)
    (tmp_path / "x.sqlite").touch()
    for name in list(sys.modules):
        if name.startswith(("splitveil.active_party.http.", "splitveil.active_party.commands.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    if library == "PIL":  # imported already
        monkeypatch.setattr(kinds, "Image", None)
    party, command, override = words
    main = active_main if party == "active" else passive_main
    words_of_command = command, tmp_path / f"{party}.yaml", "-q", "--set", override
    assert exit_code_of(main, *words_of_command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"needs the extra {extra} (pip install 'splitveil[{extra}]')" in line


def test_without_tensorboard_the_metrics_are_written_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with MetricsLog(tmp_path) as metrics:
        metrics.write(TrainingLine(0, 0, loss=0.5, noise_power=None))
        metrics.load_state_dict(metrics.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
