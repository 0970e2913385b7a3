"""The report of a run: one self-contained HTML file that needs neither network nor scripts.

The charts are drawn by ``svg.py`` rather than by a plotting library: SVG inside the page follows
its style sheet, so that it can be dark on a screen and black on paper, keeps text as text, and
avoids a dependency of the size of the rest of the program.
"""

from splitveil.active_party.report.page import (
    comparison_page,
    report_page,
    try_to_report,
    write_comparison,
    write_report,
)
from splitveil.active_party.report.run_files import RunFiles, read_run

__all__ = [
    "RunFiles",
    "comparison_page",
    "read_run",
    "report_page",
    "try_to_report",
    "write_comparison",
    "write_report",
]
