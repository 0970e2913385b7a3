"""The labels for which a noise key has drawn noise: an example keeps the one that it had first.

Noise of a key belongs to an example. Two runs with the same noise on two labels of an example would
reveal their difference exactly. So a later run with the same key trains on the label that was used
first, whatever the label is now: it repeats what the first run released about the example and
nothing else. New noise for a changed label would reveal that it has changed, which no charge
covers; and so would a refusal, or leaving out the row.

The labels lie beside the key, which undoes its noise: whoever may not read the one may not read
the other. Examples are named by digests under the derived key, so that each strength and each
meaning of the labels has labels of its own.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from splitveil.active_party.defenses.example_keys import NoiseKey, used_labels_file
from splitveil.active_party.ledger.account_book import Names, indices_of
from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.run.sample_order import keyed_digests
from splitveil.common.text.files import only_one_process

_logger = logging.getLogger(__name__)

_PURPOSE = b"first used label"


def labels_first_used(path: Path, key: NoiseKey, ids: Sequence[str], labels: Tensor) -> Tensor:
    """Return the label with which each example was first used; those of new ones are now written.

    The path is that of the noise key, and ``key`` is derived from it. The labels, (ids,) float32,
    are the present ones of the training rows.

    Raises:
        SettingsError: the file of labels cannot be read.
        StorageError: it cannot be written.
    """
    digests = keyed_digests(ids, key, _PURPOSE)
    names = np.frombuffer(digests, dtype=np.uint8).reshape(len(ids), -1)
    file = used_labels_file(path)
    try:
        with only_one_process(path):
            known, used = _read(file)
            is_new = indices_of(names, known) < 0
            if not is_new.all():
                _logger.info(
                    "noise key: %d of %d training rows were used with it before, and are "
                    "trained on the labels that they had then",
                    int((~is_new).sum()),
                    len(ids),
                )
            if is_new.any():
                known = np.concatenate([known, names[is_new]])
                used = torch.cat([used, labels[torch.from_numpy(is_new)]])
                parts = {"examples": torch.from_numpy(known), "labels": used}
                write_bytes_atomically(file, save(parts))
    except OSError as error:
        raise StorageError(f"{path}: cannot be used: {error.strerror}") from error
    return used[torch.from_numpy(indices_of(names, known))]


def _read(file: Path) -> tuple[Names, Tensor]:
    """Return names and labels, none of an empty file."""
    content = file.read_bytes()
    try:
        parts = load(content) if content else {}
    except SafetensorError as error:
        raise SettingsError(
            f"{file}: cannot be read: restore it, or name another noise_key_path; what a new key "
            f"draws is charged on top"
        ) from error
    names = parts.get("examples", torch.empty(0, 16, dtype=torch.uint8)).numpy()
    return names, parts.get("labels", torch.empty(0))
