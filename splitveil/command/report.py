"""``splitveil report``: the same as ``active-party report``."""

import argparse

from splitveil.active_party.commands.program import REPORT_PURPOSE, add_report_arguments
from splitveil.active_party.commands.program import run as run_active


def parser(program: str) -> argparse.ArgumentParser:
    """Return the sub-command's parser.

    Args:
        program: the words with which it is called.
    """
    report = argparse.ArgumentParser(prog=program, description=REPORT_PURPOSE)
    add_report_arguments(report)
    report.set_defaults(command="report")
    return report


def run(parsed: argparse.Namespace) -> int:
    """Write the report, and return the exit code."""
    return run_active(parsed)
