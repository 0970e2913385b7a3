"""The report of a real run, opened in a real browser."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

from active_party.report import write_comparison, write_report
from tests.system.conftest import LocalRun

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WITHOUT, DEFENDED = "breast_cancer-none", "breast_cancer-marvell-power_ratio-4"
LEAK_CHARTS = 6  # three attacks at two layers
WIDTH, HEIGHT = 1280, 2400

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")


class Opened(NamedTuple):
    """What a browser made of a page."""

    dom: str
    console: list[str]
    """What it had to complain about."""


def browse(page: Path, profile: Path, *options: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    return subprocess.run(
        [
            BROWSER,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--hide-scrollbars", "--enable-logging=stderr", f"--user-data-dir={profile}"),
            *(f"--window-size={WIDTH},{HEIGHT}", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def open_page(page: Path, profile: Path) -> Opened:
    done = browse(page, profile, "--dump-dom")
    return Opened(done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line])


def colours(page: Path, profile: Path) -> Mapping[tuple[int, ...], int]:
    """Count the pixels of each colour in a picture of the page."""
    picture = profile.with_suffix(".png")
    browse(page, profile, f"--screenshot={picture}")
    with Image.open(picture) as image:
        assert image.size == (WIDTH, HEIGHT)
        found = image.convert("RGB").getcolors(WIDTH * HEIGHT)
    assert found is not None
    return {colour: count for count, colour in found if isinstance(colour, tuple)}


@pytest.fixture(scope="module")
def report(compared: LocalRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert compared.exit_code == 0, compared.output
    return write_report(compared.runs_dir / DEFENDED, tmp_path_factory.mktemp("page") / "r.html")


def test_each_run_leaves_a_report(compared: LocalRun) -> None:
    for name in (WITHOUT, DEFENDED):
        page = (compared.runs_dir / name / "active" / "report.html").read_text(encoding="utf-8")
        assert f"<h1>{name}</h1>" in page


def test_verdicts_of_real_runs_tell_a_defense_from_none(compared: LocalRun) -> None:
    pages = {
        name: write_report(compared.runs_dir / name).read_text(encoding="utf-8")
        for name in (WITHOUT, DEFENDED)
    }
    recovers = re.compile(r"Whoever keeps these gradients recovers the labels with AUC (1\.0|0\.9)")
    assert recovers.search(pages[WITHOUT])
    assert not recovers.search(pages[DEFENDED])
    assert "ledger guarantees at most 0.9" in pages[DEFENDED]


@needs_browser
def test_the_report_opens_with_all_its_charts_and_no_complaint(
    report: Path, tmp_path: Path
) -> None:
    opened = open_page(report, tmp_path / "profile")
    assert opened.console == []
    assert opened.dom.count('role="img"') == LEAK_CHARTS + 2 + 2  # ledger, training
    assert opened.dom.count('class="line measured"') == LEAK_CHARTS + 1  # and in the legend


@needs_browser
def test_the_browser_would_have_complained(report: Path, tmp_path: Path) -> None:
    """A page that asks for something from elsewhere is noticed by the test above."""
    page = report.read_text(encoding="utf-8")
    broken = tmp_path / "broken.html"
    broken.write_text(page.replace("</main>", '<img src="file:///missing.png"></main>'))
    assert open_page(broken, tmp_path / "profile").console


@needs_browser
def test_a_picture_of_the_report_shows_its_curves(report: Path, tmp_path: Path) -> None:
    found = colours(report, tmp_path / "profile")
    measured, guarantee = (0xC2, 0x37, 0x1E), (0x1F, 0x5F, 0xB4)
    assert found.get(measured, 0) > 800
    assert found.get(guarantee, 0) > 500
    assert found.get((0xFF, 0xFF, 0xFF), 0) > WIDTH * HEIGHT / 2


@needs_browser
def test_a_comparison_opens_with_no_complaint(compared: LocalRun, tmp_path: Path) -> None:
    folders = [compared.runs_dir / name for name in (WITHOUT, DEFENDED)]
    page = write_comparison(folders, tmp_path / "comparison.html")
    opened = open_page(page, tmp_path / "profile")
    assert opened.console == []
    assert opened.dom.count('role="img"') == LEAK_CHARTS + 1 + 1 + 2
