"""Reads the account books that earlier runs left."""

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from splitveil.active_party.ledger.account_book import AccountBook, check_id_rules
from splitveil.common.errors import SettingsError
from splitveil.common.text.files import check_regular

LEDGER = "ledger.safetensors"
"""File in the active party's ``checkpoint`` folder."""
SETTING = "earlier_ledgers"


def open_books(folders: Sequence[Path], id_rules: bytes = b"") -> AccountBook:
    """Read the account books of earlier runs, and return them as one; a chain's counts once.

    Args:
        folders: the active party's ``checkpoint`` folder of each run.
        id_rules: ``rules_as_bytes`` of this run's contract.

    Raises:
        SettingsError: a folder has no book, or the book cannot be read, or its ids were compared by
            other rules.
    """
    books = [open_book(folder) for folder in folders]
    for folder, book in zip(folders, books, strict=True):
        check_id_rules(book.id_rules, id_rules, f"{SETTING}: {folder}")
    return AccountBook.together(books, id_rules)


def open_book(folder: Path) -> AccountBook:
    """Read the account book of one run, whatever its rules for ids.

    Args:
        folder: the active party's ``checkpoint`` folder.

    Raises:
        SettingsError: the folder has no book, or the book cannot be read.
    """
    path = folder / LEDGER
    try:
        check_regular(path)
        return AccountBook.from_state(load_file(path))
    except FileNotFoundError as error:
        raise SettingsError(
            f"{SETTING}: {folder}: there is no {LEDGER}: expected the active party's checkpoint "
            f"folder of a run that has ended. A run that was killed leaves none: start it again "
            f"to resume it"
        ) from error
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{SETTING}: {path}: cannot be read") from error
    except ValueError as error:
        raise SettingsError(f"{SETTING}: {path}: {error}") from error
