"""``splitveil schema``: the JSON Schema of a settings file, for editors and other programs."""

import argparse
from importlib import import_module

from splitveil.common.party.json_output import print_json


def parser(program: str) -> argparse.ArgumentParser:
    schema = argparse.ArgumentParser(
        prog=program, description="Print the JSON Schema of a settings file."
    )
    schema.add_argument(
        "file",
        nargs="?",
        choices=("active", "passive", "contract"),
        help="the kind of file (default: all three, by their names)",
    )
    return schema


def run(parsed: argparse.Namespace) -> int:
    print_json(import_module("splitveil.library.loading").settings_schema(parsed.file))
    return 0
