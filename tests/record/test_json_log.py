"""The log as JSON objects: one per line, whatever a message holds."""

import io
import json
import logging
import math
import re
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from splitveil.active_party.commands.program import main as active_main
from splitveil.common.record.assessment import print_summary
from splitveil.common.record.metrics_log import RunRecorder
from splitveil.common.run.contract import Contract
from splitveil.common.run.course import AlignedRows
from splitveil.common.text import log_lines
from splitveil.passive_party.commands.run import leave_summary
from tests.support.records import summary_of
from tests.support.runs import write_example

Lines = Callable[[], list[dict[str, Any]]]
logger = logging.getLogger("splitveil.active_party.run")


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Lines:
    log_lines.configure_logging("active", form="json")
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_has_date_level_party_run_and_message(lines: Lines) -> None:
    log_lines.add_to_log_lines(run="monday", run_id="0123456789abcdef")
    logger.warning("epoch %d", 3, extra=log_lines.log_fields(epoch=3))
    (line,) = lines()
    when = datetime.fromisoformat(line.pop("time"))
    assert when.utcoffset() == timedelta(0)
    assert line == {
        "level": "WARNING",
        "party": "active",
        "run": "monday",
        "run_id": "0123456789abcdef",
        "logger": "splitveil.active_party.run",
        "message": "epoch 3",
        "epoch": 3,
    }


@pytest.mark.parametrize("evil", ['a\n{"level": "INFO"}', "a\x1b[31m", "a\u2028b", 'a"}\r\n'])
def test_no_message_passes_for_another_line(capsys: pytest.CaptureFixture[str], evil: str) -> None:
    log_lines.configure_logging("active", form="json")
    logger.warning("%s", evil)
    text = capsys.readouterr().err
    assert text.isascii()
    assert len(text.splitlines()) == 1
    assert json.loads(text)["message"] == evil


def test_a_field_replaces_none_that_every_line_has_and_is_plain_json(lines: Lines) -> None:
    logger.warning("a", extra=log_lines.log_fields(message="b", level="DEBUG", party="passive"))
    logger.warning("a", extra=log_lines.log_fields(sum_kl=math.inf, loss=math.nan, path=Path("x")))
    line, other = lines()
    assert (line["message"], line["level"], line["party"]) == ("a", "WARNING", "active")
    assert (other["sum_kl"], other["loss"], other["path"]) == ("inf", "nan", "x")


def test_a_traceback_is_a_field(lines: Lines) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("a fault")
    (line,) = lines()
    assert line["message"] == "a fault"
    assert "ValueError: why" in line["exception"]


def test_what_a_signal_says_is_a_line_like_the_others(lines: Lines) -> None:
    """It is written without the logging, which the signal may have interrupted."""
    assert json.loads(log_lines.raw_line("stopping"))["message"] == "stopping"
    log_lines.configure_logging("active")
    assert log_lines.raw_line("stopping") == b"stopping\n"


@pytest.mark.parametrize(
    ("form", "is_terminal", "variable", "coloured"),
    [
        ("text", True, "OTHER", True),
        ("text", True, "NO_COLOR", False),
        ("text", False, "OTHER", False),
        ("json", True, "OTHER", False),
    ],
)
def test_warnings_and_errors_have_a_colour_on_a_terminal_alone(
    form: Any,
    is_terminal: bool,
    variable: str,
    coloured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv(variable, "1")
    log_lines.configure_logging("active", 0, form)
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger("splitveil.x").log(level, "said")
    colours = [re.match(r"\x1b\[(\d+)m", line) for line in screen.getvalue().splitlines()]
    found = [None if colour is None else colour[1] for colour in colours]
    assert found == ([None, "33", "31"] if coloured else [None] * 3)


@pytest.mark.parametrize(("form", "verbosity"), [("text", 0), ("json", 0), ("text", -1)])
def test_no_progress_bar_is_drawn_between_objects_or_where_it_should_be_quiet(
    form: Any, verbosity: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    log_lines.configure_logging("active", verbosity, form)
    contract = Contract(run_name="small", cut_shape=(4,), batch_size=8, epochs=1)
    ids = [f"person {number}" for number in range(300)]
    rows = AlignedRows.derive(contract, b"s" * 32, ids, np.arange(300))
    with RunRecorder(tmp_path) as recorder:
        recorder._begin_run(rows)
        recorder._show_progress(rows, contract)
        assert recorder._progress is not None
        recorder._progress.advance(loss=0.5)
    drawn = "\x1b[" in screen.getvalue()
    assert drawn is (form == "text" and verbosity == 0)


@pytest.mark.parametrize("verbosity", [-1, 0])
def test_a_quiet_run_prints_no_table(
    verbosity: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log_lines.configure_logging("passive", verbosity)
    leave_summary(tmp_path, summary_of({"steps": 3}), None, None, "cpu")
    assert bool(capsys.readouterr().out) is (verbosity == 0)


def test_the_summary_is_an_object_and_no_table(
    lines: Lines, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary("active", summary_of({"steps": 3, "aligned_rows": 569}))
    (line,) = lines()
    assert (line["message"], line["steps"], line["aligned_rows"]) == ("summary", 3, 569)
    assert capsys.readouterr().out == ""
    screen = io.StringIO()
    print_summary("active", summary_of({"steps": 3}), console=Console(file=screen, width=80))
    assert "steps" in screen.getvalue()


def test_with_the_flag_problems_of_the_settings_are_objects(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_example(tmp_path)
    words = ["check", str(tmp_path / "active.yaml")]
    listen = ["--set", "listen=127.0.0.1:1", "--set", "device=cuda:9"]
    wrong = ["--set", "lisen=127.0.0.1:1", "--log-format"]
    for options, is_json in (
        (listen, False),
        ([*listen, "--log-format", "json"], True),
        ([*wrong, "json"], True),
    ):
        with pytest.raises(SystemExit) as end:
            active_main([*words, *options])
        assert log_lines.writes_json() is is_json
        shown = capsys.readouterr().err
        assert shown.startswith("{") is is_json
    assert end.value.code == 2
    (found,) = map(json.loads, shown.splitlines())
    assert (found["exit_code"], found["error"]) == (2, "SettingsError")
    assert "lisen" in found["message"]
