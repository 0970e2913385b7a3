"""The version of the installed package."""

import argparse
from importlib.metadata import version

VERSION = version("splitveil")  # for ``--version``, summaries, reports and transcripts


def add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")
