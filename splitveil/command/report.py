"""``splitveil report``: the same as ``splitveil active report``."""

import argparse

from splitveil.active_party.commands.program import REPORT_PURPOSE, add_report_arguments
from splitveil.active_party.commands.program import run as run_active


def parser(program: str) -> argparse.ArgumentParser:
    report = argparse.ArgumentParser(prog=program, description=REPORT_PURPOSE)
    add_report_arguments(report)
    report.set_defaults(command="report")
    return report


def run(parsed: argparse.Namespace) -> int:
    return run_active(parsed)
