"""What ``splitveil local -v`` shows on a terminal of 80 columns: a table of lines, and bars."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from splitveil.common.record.progress import VARIABLE, TrainingProgress, progress_pipe

CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\]8;[^\x1b]*\x1b\\)")

LEADER = """
import logging, sys, time
from splitveil.common.record.progress import TrainingProgress
from splitveil.common.text.log_lines import configure_logging
configure_logging("active")
log = logging.getLogger("splitveil.x")
log.info("a long line that does not fit beside the time and the name of its party on a terminal")
with TrainingProgress("active", 1_234_567, log_every_s=0.0) as bar:
    for step in range(1000):
        bar.advance(1234, loss=0.25 + step / 1e6, norm_leak_auc=0.5)
log.info("the last link is %s", "0123456789abcdef" * 4)
log.info("written to /a/folder/of_long_names/and_more/breast_cancer-none/active/report.html")
log.warning("this is the end \\x1b[2J")
"""
OTHER = """
import sys
from splitveil.common.record.progress import TrainingProgress
with TrainingProgress("passive", 5) as bar:
    bar.advance(5, norm_leak_auc=0.5)
print("a plain line")
"""
LAUNCHER = f"""
import sys
from splitveil.deploy.party_processes import run_parties
python = [sys.executable, "-c"]
raise SystemExit(run_parties(
    {{"active": [*python, {LEADER!r}], "passive": [*python, {OTHER!r}]}}))
"""


def on_terminal(program: str, columns: int) -> str:
    """Run a program on a terminal, and return all that it wrote."""
    own, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {name: one for name, one in os.environ.items() if name != "COLUMNS"}
    environment |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=its, stdout=its, stderr=its, env=environment
    ) as process:
        os.close(its)
        written = b""
        try:
            while data := os.read(own, 65536):
                written += data
        except OSError:  # the other end is closed
            pass
        os.close(own)
    assert process.returncode == 0, written
    return written.decode()


@pytest.fixture(scope="module")
def shown() -> str:
    return on_terminal(LAUNCHER, 80)


def rows(shown: str) -> list[str]:
    """Return the lines as a terminal leaves them, without colours and movements."""
    return [line.split("\r")[-1].rstrip() for line in CONTROL.sub("", shown).split("\r\n")]


def test_no_line_is_wider_than_the_terminal(shown: str) -> None:
    assert max(map(len, rows(shown))) <= 80


def test_a_line_has_time_party_and_message_wrapped_beneath_itself(shown: str) -> None:
    found = rows(shown)
    (first,) = (number for number, line in enumerate(found) if "a long line that does" in line)
    assert re.match(r"\d\d:\d\d:\d\d active  a long line", found[first])
    assert found[first + 1].startswith(" " * 17)
    assert found[first + 1].lstrip().endswith("on a terminal")
    assert any(re.fullmatch(r" *passive a plain line", line) for line in found)


def test_nothing_of_a_path_or_a_digest_is_lost(shown: str) -> None:
    together = "".join(line.strip() for line in rows(shown))
    assert "breast_cancer-none/active/report.html" in together
    assert "0123456789abcdef" * 4 in together


def test_each_party_has_one_bar_with_count_time_left_and_one_figure(shown: str) -> None:
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", CONTROL.sub("", shown))]
    bars = [line for line in lines if "━" in line]
    assert {line.split()[0] for line in bars} == {"starting,", "active", "passive"}
    last, other = (
        next(line for line in reversed(bars) if line.startswith(party))
        for party in ("active", "passive")
    )
    assert "1234000/1234567" in last
    assert " left" in last
    assert "loss 0.25" in last
    assert other.endswith("norm leak AUC 0.5")
    assert shown.endswith("\x1b[2K")  # they go with the run


def test_parties_do_not_repeat_their_steps_beside_the_bar(shown: str) -> None:
    assert len(re.findall(r"steps/s", "\n".join(rows(shown)))) < 20
    assert not [line for line in rows(shown) if "INFO" in line]


def test_nothing_that_a_party_writes_controls_the_terminal(shown: str) -> None:
    assert "\x1b[2J" not in shown
    assert "this is the end" in shown


def test_without_a_launcher_nothing_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert progress_pipe() is None
    monkeypatch.setenv(VARIABLE, "nonsense")
    assert progress_pipe() is None


def test_a_launcher_that_is_gone_does_not_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setenv(VARIABLE, str(writer))
    with TrainingProgress("active", 3) as bar:
        bar.advance(3, loss=1.0)
    os.close(writer)
    assert bar.steps_done == 3
