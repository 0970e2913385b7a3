"""The report of a real run, opened in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from splitveil.active_party.report import write_report
from tests.support.waiting import HANGS_AFTER_S
from tests.system.conftest import LocalRun

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DEFENDED = "breast_cancer-marvell-power_ratio-4"
LEAK_CHARTS = 4  # one per attack, with a line for each of two layers
COMPARED_CHARTS = 1  # trade-off
PASSIVE_BARS = 10  # of 20 columns
WIDTH, HEIGHT = 1280, 4200

OVERLAPS = """<script>
for (const chart of document.querySelectorAll("svg[role=img]")) {
  const boxes = [...chart.querySelectorAll("text")].map(t => [t, t.getBoundingClientRect()]);
  boxes.forEach(([one, a], index) => boxes.slice(index + 1).forEach(([other, b]) => {
    const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (across > 1 && down > 4)
      chart.setAttribute("data-overlap", one.textContent + " | " + other.textContent);
  }));
}
</script>"""

WIDTHS = """<script>
const root = document.documentElement;
parent.postMessage(`${root.clientWidth} ${root.scrollWidth}`, "*");
</script>"""
HEARD = """<script>
addEventListener("message", one => document.body.setAttribute("data-widths", one.data));
</script>"""

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")


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
        timeout=HANGS_AFTER_S,
        check=True,
    )


def open_page(page: Path, profile: Path) -> tuple[str, list[str]]:
    done = browse(page, profile, "--dump-dom")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def with_script(page: Path, more: str, changed: Path) -> Path:
    """Write a copy of a page without its policy, with its details open, and more at its end."""
    text = page.read_text(encoding="utf-8")
    policy = re.search(r'<meta http-equiv="Content-Security-Policy"[^>]*>', text)
    assert policy is not None
    text = text.replace(policy[0], "").replace("<details", "<details open")
    changed.write_text(text.replace("</body>", more + "</body>"))
    return changed


@pytest.fixture(scope="module")
def report(compared: LocalRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert compared.exit_code == 0, compared.output
    return write_report(compared.runs_dir / DEFENDED, tmp_path_factory.mktemp("page") / "r.html")


@needs_browser
def test_the_report_opens_with_all_its_charts_and_no_complaint(
    report: Path, tmp_path: Path
) -> None:
    dom, complaints = open_page(report, tmp_path / "profile")
    assert complaints == []
    expected = 1 + LEAK_CHARTS + 1 + 2  # picture, ledger, training
    assert dom.count('role="img"') == expected
    for layer in ("s0", "s1"):
        assert dom.count(f'class="line {layer}"') == LEAK_CHARTS + 1  # and in the legend
    broken = tmp_path / "broken.html"  # which asks for something from elsewhere
    text = report.read_text(encoding="utf-8")
    broken.write_text(text.replace("</main>", '<img src="file:///missing.png"></main>'))
    assert open_page(broken, tmp_path / "other")[1]


@needs_browser
@pytest.mark.parametrize(
    ("page", "drawn", "number"),
    [
        (f"{DEFENDED}/passive/report.html", 'class="bar"', PASSIVE_BARS),
        ("breast_cancer-comparison.html", 'role="img"', COMPARED_CHARTS),
    ],
)
def test_the_other_pages_of_the_launcher_open_with_no_complaint(
    compared: LocalRun, tmp_path: Path, page: str, drawn: str, number: int
) -> None:
    dom, complaints = open_page(compared.runs_dir / page, tmp_path / "profile")
    assert complaints == []
    assert dom.count(drawn) == number


@needs_browser
def test_no_text_of_a_chart_lies_over_another(report: Path, tmp_path: Path) -> None:
    """Measured by the browser itself, chart by chart; it does notice a chart where two do."""
    control = '<svg role="img"><text x="9" y="20">one</text><text x="9" y="22">two</text></svg>'
    page = with_script(report, control + OVERLAPS, tmp_path / "measuring.html")
    dom, _ = open_page(page, tmp_path / "profile")
    assert re.findall(r'data-overlap="([^"]*)"', dom) == ["one | two"]


@needs_browser
def test_a_picture_of_the_report_shows_its_curves(report: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    page = with_script(report, "", tmp_path / "open.html")
    browse(page, tmp_path / "profile", f"--screenshot={picture}")
    with Image.open(picture) as image:
        colours = image.convert("RGB").getcolors(WIDTH * HEIGHT)
    found = {colour: count for count, colour in colours or ()}
    measured, guarantee = (0xC2, 0x37, 0x1E), (0x1F, 0x5F, 0xB4)
    assert found.get(measured, 0) > 800
    assert found.get(guarantee, 0) > 500
    assert found.get((0xFF, 0xFF, 0xFF), 0) > WIDTH * HEIGHT / 2


@needs_browser
@pytest.mark.parametrize("party", ["active", "passive"])
def test_a_phone_shows_a_report_without_scrolling_sideways(
    report: Path, compared: LocalRun, tmp_path: Path, party: str
) -> None:
    """At 390 px the page is no wider than the screen; only tables scroll, each in its own box."""
    left = compared.runs_dir / DEFENDED / "passive" / "report.html"  # the run wrote it
    page = with_script(report if party == "active" else left, WIDTHS, tmp_path / "page.html")
    # A headless window is at least 500 px wide, a frame is not.
    frame = tmp_path / "frame.html"
    frame.write_text(f'<iframe src="{page.name}" width="390" height="900"></iframe>{HEARD}')
    dom, _ = open_page(frame, tmp_path / "profile")
    assert re.findall(r'data-widths="([^"]*)"', dom) == ["390 390"]


@needs_browser
@pytest.mark.parametrize("party", ["active", "passive"])
def test_a_cover_page_opens_with_no_complaint_and_is_two_sheets_of_paper(
    compared: LocalRun, tmp_path: Path, party: str
) -> None:
    cover, printed = compared.runs_dir / DEFENDED / party / "cover.html", tmp_path / "cover.pdf"
    assert open_page(cover, tmp_path / "profile")[1] == []
    browse(cover, tmp_path / "profile", f"--print-to-pdf={printed}")
    assert len(re.findall(rb"/Type /Page\b", printed.read_bytes())) == 2


@needs_browser
def test_closed_details_are_printed(compared: LocalRun, tmp_path: Path) -> None:
    text = (compared.runs_dir / DEFENDED / "passive" / "report.html").read_text(encoding="utf-8")
    pages = []
    for number, beginning in enumerate(("<details>", "<details open>", "<details hidden>")):
        page, printed = tmp_path / f"{number}.html", tmp_path / f"{number}.pdf"
        page.write_text(text.replace("<details>", beginning))
        browse(page, tmp_path / "profile", f"--print-to-pdf={printed}")
        pages.append(len(re.findall(rb"/Type /Page\b", printed.read_bytes())))
    assert pages[0] == pages[1] > pages[2] >= 1
