"""The command ``splitveil``: the examples that come with the package.

    splitveil demo [EXAMPLE] [--defense DEFENSE ...] [--set PARTY.NAME=VALUE ...] [--runs DIR]
    splitveil init {active,passive} FILE [--label-column NAME] [--id-column NAME] ...
    splitveil --version

``demo`` runs an example as ``splitveil-local`` does, from the copy inside the package: it needs
neither the repository nor a download.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from splitveil.common.text.version import add_version
from splitveil.deploy import local
from splitveil.deploy.init import command as init

EXAMPLES = Path(__file__).parent / "examples"
"""The examples, as package data."""

DEMO = "breast_cancer"
DEMO_DEFENSES = ("none", "marvell", "projected_labels")
"""Run one after the other and compared where the command line names no defense."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a sub-command and return its exit code."""
    options = _parser().parse_args(arguments)
    if options.command == "init":
        return init.run(options)
    if options.example == DEMO:
        options.defense = options.defense or list(DEMO_DEFENSES)
    return local.run_example(EXAMPLES / options.example, options, "splitveil demo")


def names_of_examples() -> list[str]:
    """Return the names of the packaged examples."""
    return sorted(path.parent.name for path in EXAMPLES.glob("*/active.yaml"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="splitveil", description="Two-party split learning with defended gradients."
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True)
    purpose = "run both parties of an example on this machine, and compare defenses"
    demo = commands.add_parser("demo", help=purpose, description=purpose)
    demo.add_argument(
        "example",
        nargs="?",
        choices=names_of_examples(),
        default=DEMO,
        help=f"an example (default: {DEMO}); breast_cancer, breast_cancer_two_labs and digits need "
        "no download",
    )
    local.add_run_arguments(demo)
    purpose = "look at a table, and write commented settings that fit it"
    init.add_arguments(commands.add_parser("init", help=purpose, description=purpose))
    return parser
