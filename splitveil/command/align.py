"""``splitveil align``: the same as ``splitveil active align`` or ``splitveil passive align``."""

import argparse
from importlib import import_module
from typing import Any

from splitveil.common.party.arguments import ALIGN_PURPOSE, add_align_arguments, add_command

_MODULES = {
    "active": "splitveil.active_party.commands.program",
    "passive": "splitveil.passive_party.commands.program",
}


def parser(program: str) -> argparse.ArgumentParser:
    align = argparse.ArgumentParser(
        prog=program,
        description=f"{ALIGN_PURPOSE[0].upper()}{ALIGN_PURPOSE[1:]}. Every party runs it at once.",
    )
    parties = align.add_subparsers(dest="party", required=True, metavar="PARTY")
    add_align_arguments(add_command(parties, "active", "the label owner's part: it is called"))
    add_align_arguments(add_command(parties, "passive", "a feature owner's part: it calls"))
    align.set_defaults(command="align")
    return align


def run(parsed: argparse.Namespace) -> int:
    module: Any = import_module(_MODULES[parsed.party])
    exit_code: int = module.run(parsed)
    return exit_code
