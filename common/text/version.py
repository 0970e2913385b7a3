"""The version of the installed package."""

import argparse
from importlib.metadata import version

VERSION = version("splitveil")
"""As ``--version`` prints it, and as a run's summary, report and transcript name it."""


def add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
