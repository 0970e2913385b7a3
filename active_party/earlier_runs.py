"""Finds the account books of earlier runs about the same labels, where the settings name none.

They lie under ``runs_dir``, whatever the names of the runs, and also in folders that were moved
aside. A run that was killed has left none: what it has charged follows from its last state and from
its log of answers, as when it is resumed.

A run may wait for its peer for long after its start, so it counts them twice: at its start, and
when it begins (`counting`). Whoever counts in order to begin or resume holds a lock of
``runs_dir``. A run that begins stores its state under the lock, and one that resumes has claimed
its folder before: so of two runs, the later one finds the earlier one.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from splitveil.active_party.assembly import HAS_KNOWN_NOISE, build_session
from splitveil.active_party.ledger.account_book import (
    LEDGER,
    SETTING,
    AccountBook,
    check_id_rules,
    open_book,
)
from splitveil.active_party.ledger.ledger import auc_bound
from splitveil.active_party.run.lifecycle import Unobserved
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder
from splitveil.common.data.settings import DataSettings
from splitveil.common.errors import SettingsError, SplitveilError
from splitveil.common.party.command_line import stored_settings
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.model_files import save_tensors
from splitveil.common.record.run_folder import claimed, has_finished, storage_errors
from splitveil.common.record.run_store import ANSWERED, RUN_STATE, RunStore
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.id_rules import rules_as_bytes
from splitveil.common.settings import Mark, marked, validate, without
from splitveil.common.text.files import only_one_process
from splitveil.common.text.wording import auc_at_most

logger = logging.getLogger(__name__)

_FOLDER = re.compile(rf"{ACTIVE}(\.previous-[0-9]+)?")
_IS_RUNNING = "a run about the same labels has this folder: wait for its end"
_LOCK = ".counting.lock"  # file in ``runs_dir``
_NOTHING = AccountBook.empty()


@contextmanager
def counting(settings: ActiveSettings, own: Path, said: AccountBook) -> Iterator[AccountBook]:
    """Count earlier runs for a run that begins in this context, or whose folder has a state.

    Runs in ``said`` are not named in the log again. Raises SettingsError as ``earlier_answers``,
    and StorageError if ``runs_dir`` cannot be locked.
    """
    runs = settings.runs_dir
    with ExitStack() as lock:
        with storage_errors(runs, "cannot be locked"):
            lock.enter_context(only_one_process(runs / _LOCK))
        yield earlier_answers(settings, own, leaves_books=True, said=said)


def earlier_answers(
    settings: ActiveSettings,
    own: Path | None,
    *,
    leaves_books: bool,
    said: AccountBook = _NOTHING,
) -> AccountBook:
    """Return what earlier runs have charged: those that the settings name, or else all."""
    if settings.earlier_ledgers is not None:
        return settings.earlier_answers()
    rules = rules_as_bytes(settings.contract.ids)
    books, counted, folders = dict[Path, AccountBook](), None, _folders(settings, own)
    while folders != counted:  # a run that begins now may have moved an earlier one aside
        books, counted = {}, folders
        for folder in folders:
            try:
                book = _book_in(folder, settings, leaves_books=leaves_books)
                if book is not None and not book.ledger.reveals_nothing:
                    check_id_rules(book.id_rules, rules, str(folder))
                    books[folder] = book
            except (SplitveilError, OSError) as error:
                raise SettingsError(
                    f"{SETTING}: {folder}: what this run has charged cannot be counted: {error}. "
                    f"Expected the run to be resumed to its end, its files as they were, another "
                    f"runs_dir, or {SETTING} with exactly the ledgers that count, [] for none"
                ) from error
        folders = _folders(settings, own)
    newest = AccountBook.uncontained(books.values())
    for folder, book in books.items():
        if not book.runs <= said.runs and any(book is one for one in newest):
            _say(folder, book)
    return AccountBook.together(newest, rules)


def _folders(settings: ActiveSettings, own: Path | None) -> list[Path]:
    found = settings.runs_dir.glob(f"*/{ACTIVE}*")
    return sorted(path for path in found if path != own and _FOLDER.fullmatch(path.name))


def answers_before(settings: ActiveSettings) -> AccountBook:
    """Return a run's initial accounts; a finished run of this name counts, as with --fresh."""
    own = settings.run_folder(ACTIVE)
    return earlier_answers(settings, None if has_finished(own) else own, leaves_books=False)


def _say(folder: Path, book: AccountBook) -> None:
    written_s = max(path.stat().st_mtime for path in (folder / "checkpoint").iterdir())
    logger.info(
        "these labels were released at a leak AUC of %s for %s in %s (%s)",
        auc_at_most(auc_bound(book.worst())),
        book.worst().adversary.in_words,
        folder,
        datetime.fromtimestamp(written_s, UTC).date(),
    )


def _book_in(folder: Path, settings: ActiveSettings, *, leaves_books: bool) -> AccountBook | None:
    checkpoint = folder / "checkpoint"
    if not any((checkpoint / name).exists() for name in (LEDGER, RUN_STATE, ANSWERED)):
        return None
    values = stored_settings(folder)
    if not _is_about_labels_of(settings, values["data"]):
        return None
    is_real = settings.defense.noise_seed is None
    if is_real and values["defense"].get("insecure_noise_seed") is not None:
        raise SettingsError(HAS_KNOWN_NOISE)
    with claimed(folder, _IS_RUNNING):
        if (checkpoint / LEDGER).exists():
            return open_book(checkpoint)
        store = RunStore(folder, keep=1)
        if store.run() is None:
            store.refuse_if_answered()
            return None
        with torch.random.fork_rng(devices=[]):
            book = _charged_by(folder, values | {"base_dir": settings.base_dir})
        if leaves_books:
            save_tensors(folder, LEDGER, book.state_dict())
        return book


def _is_about_labels_of(settings: ActiveSettings, data: dict[str, Any]) -> bool:
    own = settings.data.model_dump(mode="json")
    if data.get("label_column") != own["label_column"]:
        return False
    have_ids = [one.get("id_column") is not None for one in (data, own)]
    if all(have_ids):
        return True
    # The number of a row names an example in one file only.
    same = marked(DataSettings, Mark.SAME_ROWS)
    one, other = (without(same, whole)["source"] for whole in (data, own))
    if one != other:
        return False
    if any(have_ids):
        raise SettingsError("data.id_column: only one of the runs names examples by ids")
    return True


def _charged_by(folder: Path, values: dict[str, Any]) -> AccountBook:
    run = validate(ActiveSettings, values, f"{folder}/settings.yaml")
    key = run.noise_key_path or (folder / "checkpoint" / "noise.key").resolve()
    run = run.model_copy(update={"noise_key_path": key, "compile": False})
    data = PartyData.of(run)
    builder = TrainerBuilder(run, data, torch.device("cpu"))
    store = RunStore(folder, len(run.contract.passive_parties))
    session = build_session(run, data, builder, Unobserved(), lambda: bytes(32), store)
    session.reopen()
    return session.lifecycle.account_book()
