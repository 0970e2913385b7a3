"""``splitveil find`` of the active party, whose account books and predictions name rows."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from splitveil.active_party.ledger.account_book import (
    LEDGER,
    SETTING,
    indices_of,
    names_of,
    open_book,
)
from splitveil.active_party.results import ACTIVATIONS, read_activations
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import PREDICTIONS, read_predictions
from splitveil.common.data.source_settings import expand_path
from splitveil.common.party import id_search
from splitveil.common.record.model_files import metadata_of


def find(parsed: argparse.Namespace) -> None:
    settings: ActiveSettings = parsed.loaded
    named = settings.earlier_ledgers or ()
    books = [expand_path(SETTING, one, settings.base_dir) for one in named]
    id_search.find(parsed, _DIGESTS, books)


def _predicted(checkpoint: Path, ids: Sequence[str]) -> id_search.Which:
    found = read_predictions(checkpoint.parent)
    return np.zeros(len(ids), np.bool_) if found is None else found.has(ids)


def _activated(checkpoint: Path, ids: Sequence[str]) -> id_search.Which:
    of_run = metadata_of(checkpoint, ACTIVATIONS)
    return indices_of(names_of(ids), read_activations(checkpoint.parent, of_run)[0]) >= 0


_KEEP = (
    f"before the run's folder is deleted, keep this file in a folder that {SETTING} lists, beside "
    f"those of all other runs that count: without it, later bounds are too small"
)
_DIGESTS: id_search.Digests = {
    LEDGER: ("what was released about a label", _KEEP, lambda one, ids: open_book(one).has(ids)),
    PREDICTIONS: ("prediction and label of a test row", id_search.AGAIN, _predicted),
    ACTIVATIONS: ("the last activation of a row", id_search.AGAIN, _activated),
}
