"""Labels that a noise key has drawn noise for: an example keeps its first label.

Noise of a key belongs to an example. Two runs with the same noise on two labels of an example would
reveal their difference exactly. So a later run with the same key trains on the label that was used
first, whatever the label is now: it only repeats what the first run released about the example. New
noise for a changed label would reveal the change, which no charge covers; so would a refusal, or
leaving out the row.

The labels lie beside the key, which undoes its noise: whoever may not read one may not read the
other. Examples are named by digests under the derived key, so that each strength and each meaning
of the labels has labels of its own.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from splitveil.active_party.defenses import example_keys
from splitveil.active_party.ledger import account_book
from splitveil.common.errors import StorageError
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.run.sample_order import keyed_digests
from splitveil.common.text.files import only_one_process

_logger = logging.getLogger(__name__)


def labels_first_used(
    path: Path, key: example_keys.NoiseKey, ids: Sequence[str], labels: Tensor
) -> Tensor:
    """Return the first label of each example; labels of new examples are stored now.

    The path is that of the noise key, and ``key`` is derived from it. The labels, (ids,) float32,
    are the present ones of the training rows. Raises SettingsError if the file of labels is not as
    it was left, and StorageError if it cannot be written.
    """
    digests = keyed_digests(ids, key, b"first used label")
    names = np.frombuffer(digests, dtype=np.uint8).reshape(len(ids), -1)
    file = example_keys.used_labels_file(path)
    try:
        with only_one_process(path):
            content = example_keys.used_labels(path)
            parts = load(content) if content else {}
            known = parts.get("examples", torch.empty(0, 16, dtype=torch.uint8)).numpy()
            used = parts.get("labels", torch.empty(0))
            is_new = account_book.indices_of(names, known) < 0
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
                following = save({"examples": torch.from_numpy(known), "labels": used})
                example_keys.note_use(path, content, following)
                write_bytes_atomically(file, following)
                content = following
            example_keys.note_use(path, content, content)
    except OSError as error:
        raise StorageError(f"{path}: cannot be used: {error.strerror}") from error
    return used[torch.from_numpy(account_book.indices_of(names, known))]
