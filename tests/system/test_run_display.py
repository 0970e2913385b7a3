"""What ``splitveil local`` shows on a terminal: a table of lines, or a bar."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

CONTROL = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\]8;[^\x1b]*\x1b\\)")

LEADER = """
import logging, sys, time
from splitveil.common.text.log_lines import configure_logging
configure_logging("active")
log = logging.getLogger("splitveil.x")
log.info("a long line that does not fit beside the time and the name of its party on a terminal")
log.info("the last link is %s", "0123456789abcdef" * 4)
log.info("written to /a/folder/of_long_names/and_more/breast_cancer-none/active/report.html")
log.warning("this is the end \\x1b[2J")
"""
OTHER = "print('a plain line')"
LAUNCHER = f"""
import sys
from splitveil.deploy.party_processes import run_parties
python = [sys.executable, "-c"]
raise SystemExit(run_parties(
    {{"active": [*python, {LEADER!r}], "passive": [*python, {OTHER!r}]}}))
"""


def on_terminal(program: str, columns: int) -> str:
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


def test_nothing_that_a_party_writes_controls_the_terminal(shown: str) -> None:
    assert "\x1b[2J" not in shown
    assert "this is the end" in shown


def test_a_quiet_launcher_shows_the_epoch_and_leaves_nothing() -> None:
    launcher = LAUNCHER.replace("a long line", "epoch 2/7: a long line")
    quiet = on_terminal(launcher.replace("}))", "}, quiet=True))"), 80)
    assert "epoch 3/7, " in CONTROL.sub("", quiet)
    assert "this is the end" not in quiet
    assert "\x1b[2J" not in quiet
    assert not rows(quiet)[-1]
