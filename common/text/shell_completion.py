"""The option ``--print-completion`` of every command: its completion for a shell, made by shtab."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHELLS = ("bash", "zsh", "tcsh")


def add_completion(
    parser: argparse.ArgumentParser,
    whole: Callable[[], argparse.ArgumentParser] | None = None,
) -> None:
    """Let a command print what completes it in a shell.

    ``whole`` returns the parser to print, if ``parser`` lacks the arguments of sub-commands.
    """
    parser.add_argument(
        "--print-completion",
        action=_PrintCompletion,
        choices=SHELLS,
        const=whole,
        help="print a script that completes this command in a shell, and exit",
    )


class _PrintCompletion(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,  # noqa: ARG002
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        import shtab  # noqa: PLC0415 - only for those who ask for it

        whole = self.const() if self.const is not None else parser
        for action in _actions_of(whole):
            if action.type is Path:
                is_folder = str(action.metavar or action.dest).lower().endswith("dir")
                action.complete = shtab.DIRECTORY if is_folder else shtab.FILE  # type: ignore[attr-defined]
        sys.stdout.write(shtab.complete(whole, shell=values) + "\n")
        parser.exit()


def _actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of a command and of all its sub-commands."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no other way to list them
        yield action
        if isinstance(action.choices, dict):
            for of_sub_command in action.choices.values():
                yield from _actions_of(of_sub_command)
