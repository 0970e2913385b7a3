"""``splitveil audit``: what attacks read of the labels in gradients of any trainer.

The file is an npz archive with the arguments of ``splitveil.audit`` as its arrays: ``gradients``
and ``labels``, and if they are there ``batches``, ``examples``, ``activations``, ``covariates`` and
``predictions``, one entry per row each.
"""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

from splitveil.common.errors import DataError
from splitveil.common.party.json_output import add_json, print_json

NEEDED = ("gradients", "labels")
OPTIONAL = ("batches", "examples", "activations", "covariates", "predictions")


def parser(program: str) -> argparse.ArgumentParser:
    audit = argparse.ArgumentParser(
        prog=program,
        description="Attack gradients of any trainer, and print what they tell of the labels.",
        epilog=f"FILE is an npz archive with arrays {' and '.join(NEEDED)} and perhaps "
        f"{', '.join(OPTIONAL)}, one entry per row.",
    )
    audit.add_argument("file", type=Path, metavar="FILE", help="an npz archive")
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
    return audit


def run(parsed: argparse.Namespace) -> int:
    """Print the audit.

    Raises:
        DataError: the file cannot be read, lacks an array, or holds values that do not fit.
        SettingsError: an attack is not known, or needs more.
    """
    arrays = _arrays(parsed.file)
    if parsed.batch_size is not None:
        if "batches" in arrays:
            raise DataError(f"{parsed.file}: has batches: leave --batch-size out")
        arrays["batches"] = parsed.batch_size
    library: Any = import_module("splitveil.library.auditing")
    try:
        found = library.audit(**arrays, attacks=parsed.attacks)
    except ValueError as error:
        raise DataError(f"{parsed.file}: {error}") from error
    if parsed.json:
        print_json(found.to_json())
    else:
        printing: Any = import_module("splitveil.library.printed_audit")
        printing.print_audit(found)
    return 0


def _arrays(path: Path) -> dict[str, Any]:
    source: Any = import_module("splitveil.common.data.npz_file").NpzFile(path)
    names = set(source.array_names())
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise DataError(f"{path}: expected an array {' and one '.join(missing)}")
    return {name: source.read_array(name) for name in (*NEEDED, *OPTIONAL) if name in names}
