"""The option ``--json`` of commands: one JSON document on the standard output stream, for programs.

What people read goes to the standard error stream all the same: the log, and errors. Where a
command fails before it has found anything, the standard output stream is empty.
"""

import argparse
import sys
from collections.abc import Mapping

from splitveil.common.record.run_folder import json_text


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", action="store_true", help="print one JSON document instead of text"
    )


def print_json(value: Mapping[str, object]) -> None:
    sys.stdout.write(json_text(value))
