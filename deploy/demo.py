"""``splitveil demo``: the examples that come with the package.

It runs an example as ``splitveil local`` does, from the copy inside the package: it needs neither
the repository nor a download.
"""

import argparse
from pathlib import Path

from splitveil.deploy import local

EXAMPLES = Path(__file__).parent / "examples"

DEMO = "breast_cancer"
DEMO_DEFENSES = ("none", "marvell", "projected_labels")
"""Run one after the other and compared where the command line names no defense."""


def run(options: argparse.Namespace) -> int:
    if options.example == DEMO:
        options.defense = options.defense or list(DEMO_DEFENSES)
    return local.run_example(EXAMPLES / options.example, options)


def names_of_examples() -> list[str]:
    return sorted(path.parent.name for path in EXAMPLES.glob("*/active.yaml"))


def parser(program: str) -> argparse.ArgumentParser:
    demo = argparse.ArgumentParser(
        prog=program,
        description="run both parties of an example on this machine, and compare defenses",
    )
    demo.add_argument(
        "example",
        nargs="?",
        choices=names_of_examples(),
        default=DEMO,
        help=f"an example (default: {DEMO}); breast_cancer, breast_cancer_two_labs and digits need "
        "no download",
    )
    local.add_run_arguments(demo)
    return demo
