"""The output of a run: metrics, progress, log lines, tables, and damaged files."""

import errno
import io
import json
import logging
import math
import os
import re
import resource
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.privacy.attacks import ATTACKS
from splitveil.common.privacy.figures import (
    BatchFigures,
    LeakFigures,
    PredictionFigures,
    RunFigures,
)
from splitveil.common.record import run_folder
from splitveil.common.record.assessment import print_summary
from splitveil.common.record.metrics_log import MetricsLog
from splitveil.common.record.model_files import save_tensors
from splitveil.common.record.progress import ProgressBar
from splitveil.common.record.run_record import (
    AlignmentLine,
    EvaluationLine,
    RunCounts,
    Summary,
    TrainingLine,
)
from splitveil.common.record.transcript import Transcript
from splitveil.common.text import system
from splitveil.common.text.files import only_one_process, sync
from splitveil.common.text.log_lines import configure_logging
from tests.support.records import summary_of


def _lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_reach_tensorboard_on_one_axis(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, steps_per_epoch=10) as log:
        log.write(TrainingLine(2, 3, loss=0.5, noise_power=None))
        assert len(_lines(tmp_path)) == 1  # at once, and not only at the end
        log.write(EvaluationLine(2, "test", PredictionFigures(auc=0.75)))
        log.write(EvaluationLine(3, "test", PredictionFigures(auc=math.nan)))
    log.write(TrainingLine(9, 0, loss=0.5, noise_power=None))  # closed
    assert len(_lines(tmp_path)) == 3
    events = EventAccumulator(str(tmp_path)).Reload()
    points = {
        tag: [(point.step, point.value) for point in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    assert points == {"train/loss": [(23, 0.5)], "test/auc": [(29, 0.75)]}


@pytest.mark.parametrize("value", [torch.ones(3), [1.0], "0.5"])
def test_what_is_not_a_plain_number_is_not_logged(tmp_path: Path, value: object) -> None:
    with MetricsLog(tmp_path) as log, pytest.raises(TypeError, match="loss: expected a number"):
        log.write(TrainingLine(0, 0, loss=value, noise_power=None))  # type: ignore[arg-type]
    assert _lines(tmp_path) == []


def test_metrics_from_many_threads_stay_whole_lines(tmp_path: Path) -> None:
    def write(epoch: int) -> None:
        for step in range(100):
            log.write(TrainingLine(epoch, step, loss=1.0, noise_power=0.0))

    with MetricsLog(tmp_path) as log, ThreadPoolExecutor(4) as executor:
        list(executor.map(write, range(4)))
    places = {(line["epoch"], line["step"]) for line in _lines(tmp_path)}
    assert len(places) == 400


@pytest.mark.parametrize("lost", [1, 45, 400])
def test_a_metrics_file_that_was_cut_in_a_line_has_whole_lines_when_a_run_resumes(
    tmp_path: Path, lost: int
) -> None:
    """A run writes its first line before it goes back to its state."""
    with MetricsLog(tmp_path) as log:
        for step in range(6):
            log.write(TrainingLine(0, step, loss=0.5, noise_power=0.0))
        state = log.state_dict()
        log.write(TrainingLine(0, 6, loss=0.5, noise_power=0.0))
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, max(state["bytes"] - lost, 10))
    with MetricsLog(tmp_path) as log:
        log.write(AlignmentLine(360))
        log.load_state_dict(state)
        log.write(TrainingLine(0, 6, loss=0.25, noise_power=0.0))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["loss"] == 0.25
    assert [line["step"] for line in lines if line["kind"] == "train"][-1] == 6


def test_a_metrics_file_resumes_after_the_lines_of_its_state(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(TrainingLine(0, 0, loss=0.5, noise_power=1 / 3))
        state = log.state_dict()
        before = (tmp_path / "metrics.jsonl").read_bytes()
        log.write(TrainingLine(0, 1, loss=0.5, noise_power=0.0))
        log.load_state_dict(state)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


_MANY = {
    "loss": 0.00012345,
    "ledger_leak_auc": 0.9876,
    "norm_leak_auc": 0.5123,
    "cosine_leak_auc": 0.5234,
    "spectral_leak_auc": 0.6456,
}


@pytest.mark.parametrize(
    ("party", "steps", "numbers", "figures"),
    [
        ("training", 150, _MANY, ["epoch 11/20", "left"]),
        ("active", 123_456, _MANY, ["epoch 8,231/16,460", "left"]),
        ("passive", 150, dict(list(_MANY.items())[2:]), ["epoch 11/20", "left"]),
        ("passive", 150, {}, ["epoch 11/20", "left"]),
    ],
)
def test_the_bar_and_the_essential_figures_stay_on_one_line_at_every_width(
    party: str, steps: int, numbers: dict[str, float], figures: list[str]
) -> None:
    for width in (60, 61, 79, 80, 81, 100, 137, 240):
        screen = io.StringIO()
        console = Console(file=screen, force_terminal=True, color_system="truecolor", width=width)
        bar = ProgressBar(party, "steps", 2 * steps, per_epoch=15, console=console)
        with bar as progress:
            progress.advance(**numbers)
            progress.advance(steps - 1, **numbers)
        last_picture = screen.getvalue().rpartition("\r")[2]
        (line,) = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", last_picture).splitlines()
        assert len(line) <= width
        assert line.startswith(f"{party} ")
        assert sum(line.count(part) for part in "━╸╺") >= 10
        assert "…" not in line
        for figure in figures:
            assert figure in line
    # A wide terminal shows every number, and the speed that the summary will have.
    assert f", {progress.per_s:,.1f} steps/s" in line
    for name, number in numbers.items():
        assert f"{name.replace('_', ' ').replace('auc', 'AUC')} {number:.4g}" in line


def test_progress_elsewhere_is_a_log_line_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    screen = io.StringIO()
    caplog.set_level(logging.DEBUG)
    console = Console(file=screen, force_terminal=False)
    with ProgressBar("training", "steps", 4000, console=console, log_every_s=0) as progress:
        progress.advance(loss=0.25)
        with ProgressBar("inside", console=console, log_every_s=0) as inside:
            inside.advance()
    with ProgressBar("aligning", console=console, log_every_s=3600) as progress:
        progress.note(1, 4)
        progress.note(3, 4)
    assert screen.getvalue().strip() == ""
    firsts = [message.split(", ")[0] for message in caplog.messages]
    training = "training: 1 of 4,000 steps"
    assert firsts == [training, training, "aligning: 3 of 4 ids"]
    assert caplog.messages[0].endswith("steps/s, loss 0.25")
    assert progress.per_s == progress.per_s > 0  # stands still after the end


class GoneTerminal(io.StringIO):
    """Was a terminal, and takes nothing more."""

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def flush(self) -> None:
        self.write("")

    def isatty(self) -> bool:
        return True


def test_what_cannot_be_printed_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar, the lines of the log and the tables at the end."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, GoneTerminal())
    configure_logging("active")
    with ProgressBar("training", "steps", 3) as progress:
        for _ in range(3):
            progress.advance(loss=0.5)
            logging.getLogger("splitveil.active_party").warning("a line")
    print_summary("active", summary_of({"steps": 3, "test_auc": 0.5}))
    assert progress.done == 3
    # Nor do tables whose frames the output has no codes for.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    print_summary("active", summary_of({"defense": {"name": "märvell"}}))


@pytest.mark.parametrize("failed", [True, False])
def test_a_thread_of_tensorboard_that_cannot_write_says_so_to_the_writer(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failed: bool,
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: print("fault", file=sys.stderr))
    configure_logging("active")
    with MetricsLog(tmp_path) as log:
        thread = log._charts.file_writer.event_writer._async_writer._worker
        arguments = (OSError, OSError(errno.ENOSPC, "full"), None, thread if failed else None)
        threading.excepthook(threading.ExceptHookArgs(arguments))
    assert ("fault" in capsys.readouterr().err) is not failed


@pytest.mark.parametrize(
    ("verbosity", "expected"), [(-1, ["WARNING"]), (0, ["INFO", "WARNING"]), (1, None)]
)
def test_log_lines_are_short_and_name_the_party(
    capsys: pytest.CaptureFixture[str], verbosity: int, expected: list[str] | None
) -> None:
    configure_logging("active", verbosity)
    configure_logging("active", verbosity)  # a second call adds no second line
    own = logging.getLogger("splitveil.active_party.run.session")
    own.debug("a")
    own.info("b")
    own.warning("c")
    logging.getLogger("somewhere.else").info("d")
    lines = [line.split(" ") for line in capsys.readouterr().err.splitlines()]
    assert [line[2] for line in lines] == (expected or ["DEBUG", "INFO", "WARNING"])
    assert {line[1] for line in lines} == {"active"}
    assert lines[-1][3] == "c"


def test_words_of_others_steer_no_terminal_and_begin_no_log_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging("active")
    own = logging.getLogger("splitveil.active_party")
    own.warning("refused %s", "\x1b[2J\r\n12:00:00 active INFO all is well\u202e\ud800")
    try:
        raise ValueError("\x1b]0;title\x07")
    except ValueError:
        own.exception("failed")
    shown = capsys.readouterr().err
    first, second, *traceback = shown.splitlines()
    assert first.endswith("refused \\x1b[2J\\r\\n12:00:00 active INFO all is well\\u202e\\ud800")
    assert second.endswith("failed")
    assert traceback[-1] == "ValueError: \\x1b]0;title\\x07"
    assert shown.replace("\n", "").isprintable()


def test_the_final_table_speaks_no_python_and_its_names_are_no_markup() -> None:
    screen = io.StringIO()
    summary = {
        "test_auc": None,
        "test_average_precision": 0.25,
        "steps_per_s": 12.345678,
        "refused_messages": {"[/red]\x1b[2J": 1},
        "leak_alarms": 2,
    }
    print_summary("active", summary_of(summary), console=Console(file=screen, width=120))
    text = screen.getvalue()
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in text.splitlines()]
    assert ["test average precision", "0.25"] in rows
    assert ["steps/s", "12.35"] in rows
    assert ["leak alarms", "2"] in rows
    assert ["refused messages", "[/red]\\x1b[2J 1"] in rows
    assert not re.search("None|test AUC|test_", text)


def test_a_passive_party_ends_with_what_attacks_found_at_each_layer_in_whole_names() -> None:
    """Also beside its name in the launcher, which leaves it 70 columns of 80."""
    console = Console(width=70, file=io.StringIO(), record=True, highlight=False)
    of_run = ("accumulated_spectral", "accumulated_residual_energy", "accumulated_cosine")
    batches = dict.fromkeys(ATTACKS, BatchFigures(0.8, 0.7, 0.75, 0.73))
    whole_run = dict.fromkeys(of_run, RunFigures(0.8, 0.7, 0.9, 445))
    layers = ("cut", "first")
    leak = LeakFigures(
        batches=dict.fromkeys(layers, batches), run_level=dict.fromkeys(layers, whole_run)
    )
    summary = Summary(counts=RunCounts(aligned_rows=24_000), leak=leak)
    print_summary("passive", summary, console=console)
    lines = console.export_text().splitlines()
    assert "adversary: raw leak AUC; given: labels for evaluation" in " ".join(
        map(str.strip, lines)
    )
    assert max(map(len, lines)) <= 70
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line[:1] == "│"]
    assert {row[0] for row in cells} >= {*ATTACKS, *of_run}
    assert ["norm", "0.700", "0.700"] in cells
    assert ["accumulated_cosine", "0.800", "0.800"] in cells


def open_in_a_process_of_its_own(runs_dir: Path, party: str) -> str:
    """Open a run's folder as a command does, which holds it until it ends; returns its log."""
    code = (
        "import logging, pathlib, sys; "
        "from splitveil.common.record.run_folder import open_run_folder; "
        "logging.basicConfig(level=logging.INFO, format='%(message)s'); "
        "folder = open_run_folder(pathlib.Path(sys.argv[1]), 'demo', sys.argv[2]); "
        "assert list(folder.iterdir()) == []"
    )
    command = [sys.executable, "-c", code, str(runs_dir), party]
    return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def test_earlier_results_are_moved_aside(tmp_path: Path) -> None:
    open_in_a_process_of_its_own(tmp_path, "passive")  # is left where it is
    open_in_a_process_of_its_own(tmp_path, "active")  # and so is an empty folder
    logs = []
    for run in ("first", "second", "third"):
        logs.append(open_in_a_process_of_its_own(tmp_path, "active"))
        run_folder.write_text_atomically(tmp_path / "demo" / "active" / "summary.json", run)
    contents = {path.parent.name: path.read_text() for path in tmp_path.glob("*/*/summary.json")}
    assert contents == {
        "active": "third",
        "active.previous-1": "first",
        "active.previous-2": "second",
    }
    visible = {path.name for path in (tmp_path / "demo").iterdir() if path.name[0] != "."}
    assert visible == {"passive", *contents}
    assert logs[0] == ""
    assert "active.previous-1" in logs[1]
    assert "active.previous-2" in logs[2]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_results_are_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = run_folder.open_run_folder(tmp_path, "demo", "active")
        run_folder.write_text_atomically(folder / "report.html", "who is positive")
        run_folder.write_json_atomically(folder / "summary.json", {})
        save_tensors(folder, "model.safetensors", {"w": torch.zeros(1)})
        with only_one_process(tmp_path / ".counting.lock"):
            pass
        with MetricsLog(folder) as metrics, Transcript(folder, "active"):
            metrics.load_state_dict(metrics.state_dict())
    finally:
        os.umask(before)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.name.split(".")[0] for path in files} == {
        *("events", "metrics", "model", "report", "summary", "transcript")
    }
    assert mode_of(folder) == 0o700
    assert {mode_of(path) for path in (*files, tmp_path / ".counting.lock")} == {0o600}


@pytest.mark.parametrize("resumes", [True, False])
def test_an_open_folder_is_closed_before_a_run_uses_it_or_moves_it_aside(
    tmp_path: Path, resumes: bool
) -> None:
    earlier = tmp_path / "demo" / "active"
    earlier.mkdir(parents=True)
    earlier.chmod(0o755)
    (earlier / "summary.json").write_text("{}")
    folder = run_folder.open_run_folder(tmp_path, "demo", "active", lambda _: resumes)
    assert mode_of(folder) == 0o700
    assert (folder / "summary.json").exists() == resumes
    for aside in folder.parent.glob("active.previous-*"):
        assert mode_of(aside) == 0o700


def test_a_link_in_a_temporary_file_s_place_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / f".report.html.{os.getpid()}.tmp").symlink_to(precious)
    run_folder.write_text_atomically(tmp_path / "report.html", "new")
    assert precious.read_text() == "kept"
    assert (tmp_path / "report.html").read_text() == "new"
    assert not (tmp_path / "report.html").is_symlink()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    for name in ("", "..", "a/b", "/etc"):
        with pytest.raises(SettingsError, match="name a folder"):
            run_folder.open_run_folder(tmp_path, name, "active")
    (tmp_path / "demo").write_text("in the way")
    with pytest.raises(StorageError, match="cannot be used for results"):
        run_folder.open_run_folder(tmp_path, "demo", "active")
    with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written: No such file"):
        MetricsLog(tmp_path / "missing")


def test_a_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run_folder.write_bytes_atomically(path, b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match=r"checkpoint: cannot be written: File too large"):
            run_folder.write_bytes_atomically(path, bytes(100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    with pytest.raises(StorageError, match="No such file"):
        run_folder.write_text_atomically(tmp_path / "missing" / "file", "text")


def test_a_lock_of_windows_is_waited_for_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[str] = []

    def locking(_: int, mode: str, __: int) -> None:
        tries.append(mode)
        if len(tries) < 3:
            raise OSError(errno.EDEADLK, "tried for ten seconds")

    windows = SimpleNamespace(LK_LOCK="waits", LK_NBLCK="tries", locking=locking)
    monkeypatch.setattr(system, "_fcntl", None)
    monkeypatch.setattr(system, "_msvcrt", windows)
    with pytest.raises(BlockingIOError):
        system.lock(0, waits=False)
    system.lock(0)
    assert tries == ["tries", "waits", "waits"]


def test_files_are_synced_where_only_what_is_open_to_be_written_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows."""
    path = tmp_path / "column"
    path.write_bytes(b"1")

    def fsync(descriptor: int) -> None:
        os.write(descriptor, b"")  # EBADF where it is open to be read only

    monkeypatch.setattr(os, "fsync", fsync)
    sync(path)
    assert path.read_bytes() == b"1"
