"""Two processes side by side, with small programs instead of the parties."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from splitveil.deploy import party_processes
from splitveil.deploy.party_processes import run_parties
from tests.support.waiting import HANGS_AFTER_S

WAIT = f"import time; time.sleep({2 * HANGS_AFTER_S})"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(party_processes, "PEER_NOTICES_S", HANGS_AFTER_S)
    monkeypatch.setattr(party_processes, "STOP_S", HANGS_AFTER_S)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(("program", "shown"), [("", 0), ("raise SystemExit(3)", 2)])
def test_quiet_parties_are_heard_only_if_one_fails(
    program: str, shown: int, capfd: pytest.CaptureFixture[str]
) -> None:
    commands = {"active": python(f"print('top'); {program}"), "passive": python("print('bottom')")}
    run_parties(commands, quiet=True)
    assert len(capfd.readouterr().out.splitlines()) == shown


LATER = "import time; time.sleep(0.7); "


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize(
    ("active", "passive", "exit_code"),
    [
        (f"{LATER}raise SystemExit(4)", "raise SystemExit(3)", 3),  # the first failure
        (f"{LATER}raise SystemExit(5)", "raise SystemExit(4)", 5),  # whoever knows why
        ("", "raise SystemExit(4)", 4),
        ("import os; os.kill(os.getpid(), 9)", "", 128 + signal.SIGKILL),  # as a shell has it
    ],
)
def test_the_exit_code_is_that_of_the_cause(active: str, passive: str, exit_code: int) -> None:
    assert run_parties({"active": python(active), "passive": python(passive)}) == exit_code


def test_a_party_that_ignores_signals_is_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(party_processes, "PEER_NOTICES_S", 0.2)
    monkeypatch.setattr(party_processes, "STOP_S", 0.2)
    is_deaf = tmp_path / "deaf"
    ignore = "import pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    deaf = python(f"{ignore}; pathlib.Path({str(is_deaf)!r}).touch(); {WAIT}")
    failing = f"""
import pathlib, time
while not pathlib.Path({str(is_deaf)!r}).exists():
    time.sleep(0.02)
raise SystemExit(5)
"""
    assert run_parties({"active": python(failing), "passive": deaf}) == 5


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_each_party_once(number: signal.Signals, tmp_path: Path) -> None:
    program = f"""
import pathlib, signal, sys, time
seen = []
signal.signal({int(number)}, lambda number, frame: seen.append(number))
pathlib.Path(sys.argv[1]).touch()
while not seen:
    time.sleep(0.01)
time.sleep(0.5)
pathlib.Path(sys.argv[1]).write_text(str(len(seen)))
raise SystemExit(128 + {int(number)})
"""
    ready = [tmp_path / "active", tmp_path / "passive"]

    def interrupt_when_both_listen() -> None:
        while not all(path.exists() for path in ready):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt_when_both_listen, daemon=True).start()
    commands = {path.name: [*python(program), str(path)] for path in ready}
    assert run_parties(commands) == 128 + number
    assert [path.read_text() for path in ready] == ["1", "1"]
