"""The sub-commands of ``splitveil`` that work on files of no single party: audit, schema."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from splitveil.common.errors import DataError
from splitveil.common.party.arguments import Parser, add_json, print_json
from splitveil.common.text.files import check_regular, why_unreadable

if TYPE_CHECKING:
    from splitveil.library.auditing import Audit

NEEDED = ("gradients", "labels")
OPTIONAL = ("batches", "examples", "activations", "covariates", "predictions")


def parser(program: str) -> argparse.ArgumentParser:
    """Return the parser of the sub-command that is the last word of ``program``."""
    add, example = _PARSERS[program.rsplit(maxsplit=1)[-1]]
    made = Parser(prog=program, example=example)
    add(made)
    return made


def run(parsed: argparse.Namespace) -> int:
    parsed.action(parsed)
    return 0


def _add_audit(audit: argparse.ArgumentParser) -> None:
    audit.epilog = (
        f"{audit.epilog}\n\nFILE is an npz archive with arrays {' and '.join(NEEDED)} and perhaps "
        f"\n{', '.join(OPTIONAL)}, one entry per row;\nthe rows of several files are put together."
    )
    audit.add_argument("files", type=Path, nargs="+", metavar="FILE", help="an npz archive")
    audit.add_argument(
        "--batch-size",
        type=int,
        metavar="ROWS",
        help="rows per batch, for a file without batches (default: one batch)",
    )
    audit.add_argument(
        "--attacks", nargs="+", metavar="ATTACK", help="default: all that the arrays suffice for"
    )
    add_json(audit)
    audit.set_defaults(action=_audit)


def _audit(parsed: argparse.Namespace) -> None:
    import numpy as np  # noqa: PLC0415 - completion needs none

    parts = [_arrays(path) for path in parsed.files]
    if len({tuple(part) for part in parts}) > 1:
        raise DataError("the files have different arrays")
    if parsed.batch_size is not None and "batches" in parts[0]:
        raise DataError(f"{parsed.files[0]}: has batches: leave --batch-size out")
    arrays: dict[str, Any] = {
        name: np.concatenate([part[name] for part in parts]) for name in parts[0]
    }
    size = parsed.batch_size
    if size is not None and size < 1:
        raise DataError(f"--batch-size: expected at least 1, got {size}")
    numbers = [
        part.get("batches", np.arange(len(part["labels"])) // (size or sys.maxsize))
        for part in parts
    ]
    # No batch has rows of two files.
    files = np.repeat(np.arange(len(parts)), [len(one) for one in numbers])
    pairs = np.column_stack([files, np.concatenate(numbers)])
    arrays["batches"] = np.unique(pairs, axis=0, return_inverse=True)[1]
    audit = resolve_name("splitveil.library.auditing:audit")
    try:
        result: Audit = audit(**arrays, attacks=parsed.attacks)
    except ValueError as error:
        raise DataError(f"{parsed.files[0]}: {error}") from error
    if parsed.json:
        print_json(result.to_json())
    else:
        print(result)


def _arrays(path: Path) -> dict[str, Any]:
    import numpy as np  # noqa: PLC0415 - completion needs none

    try:
        check_regular(path)
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            missing = [name for name in NEEDED if name not in archive]
            found = {name: archive[name] for name in (*NEEDED, *OPTIONAL) if name in archive}
        if not all(array.nbytes for array in found.values()):
            raise ValueError("rows without content may be as many as a header says")
    except OSError as error:
        raise DataError(f"{path}: {why_unreadable(path, error)}") from error
    except Exception as error:  # numpy and zipfile raise a dozen classes for damaged files
        raise DataError(
            f"{path}: expected an npz archive of arrays of numbers, never pickled objects "
            f"({type(error).__name__})"
        ) from error
    if missing:
        raise DataError(f"{path}: expected an array {' and one '.join(missing)}")
    return found


def _add_schema(schema: argparse.ArgumentParser) -> None:
    schema.add_argument(
        "file",
        nargs="?",
        choices=("active", "passive", "contract"),
        help="the kind of file (default: all three, by their names)",
    )
    of = resolve_name
    schema.set_defaults(
        action=lambda parsed: print_json(
            of("splitveil.library.loading:settings_schema")(parsed.file)
        )
    )


_PARSERS: Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], str]] = {
    "audit": (_add_audit, "gradients.npz --batch-size 128"),
    "schema": (_add_schema, "active"),
}
