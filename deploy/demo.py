"""``splitveil demo``: the examples that come with the package.

It runs an example as ``splitveil local`` does, from the copy inside the package.
"""

import argparse
import sys
from pathlib import Path

from splitveil.common.errors import SettingsError
from splitveil.common.party.arguments import Parser
from splitveil.deploy import flights, local
from splitveil.deploy.overrides import ONE_SHOT, override

EXAMPLES = Path(__file__).parent / "examples"

DEMO, WITHOUT_PACKAGE = "flights", "breast_cancer"
DEMO_DEFENSES = ("none", "marvell", "noisy_label", ONE_SHOT)
"""Run one after the other and compared where the command line names no defense."""

_INSTALL = f"pip install {flights.PACKAGE}, or this package as splitveil[demo]"


def run(options: argparse.Namespace) -> int:
    example = options.example or DEMO
    if example == DEMO and not flights.is_installed():
        missing = f"the data of the example {DEMO} are not installed: {_INSTALL}"
        if options.example is not None:
            raise SettingsError(missing)
        example = WITHOUT_PACKAGE
        sys.stderr.write(
            f"splitveil demo: {missing}\n"
            f"This is {example} instead: its 569 rows are too few to judge a defense.\n"
        )
    if example in {DEMO, WITHOUT_PACKAGE}:
        options.defense = options.defense or list(DEMO_DEFENSES)
    if example == DEMO:
        tables = (options.runs / ".flights").resolve()
        flights.write_tables(tables)
        sources = {
            "active.data": flights.AIRLINE,
            "passive.data": flights.AIRPORTS,
            "passive.adversary.labels": flights.AIRLINE,
        }
        own = [override(f"{one}.source.path", tables / name) for one, name in sources.items()]
        options.overrides = [*own, *options.overrides]
    code = local.run_example(EXAMPLES / example, options)
    if not options.json and not code:
        print("next    splitveil init active TABLE.csv, with a table of your own")
    return code


def names_of_examples() -> list[str]:
    return sorted(path.parent.name for path in EXAMPLES.glob("*/active.yaml"))


def parser(program: str) -> argparse.ArgumentParser:
    demo = Parser(prog=program, example="breast_cancer")
    demo.add_argument(
        "example",
        nargs="?",
        choices=names_of_examples(),
        help=f"an example (default: {DEMO}, whose data are an extra: splitveil[demo]); "
        "breast_cancer, breast_cancer_two_labs and digits need neither extra nor download",
    )
    local.add_run_arguments(demo)
    return demo
