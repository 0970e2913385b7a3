"""Labels and targets that a later run uses again, by example.

**Targets** that a run's releases led to (`TARGETS`). A target is computed only from releases. A
later run that trains on it again, instead of summing the label once more, reveals nothing new about
that label; neither does one that computes other targets from the same releases. An example is
recognised by its id; whether its label has changed since must not matter, because the choice of
rows would then reveal that.

**Labels** for which a noise key has drawn noise: an example keeps the one that it had first. Noise
of a key belongs to an example. Two runs with the same noise on two labels of an example would
reveal their difference exactly. So a later run with the same key trains on the label that was used
first, whatever the label is now: it repeats what the first run released about the example and
nothing else. New noise for a changed label would reveal that it has changed, which no charge
covers; and so would a refusal, or leaving out the row.

The labels lie beside the key, which undoes its noise: whoever may not read the one may not read
the other. Examples are named by digests under the derived key, so that each strength and each
meaning of the labels has labels of its own.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor

from splitveil.active_party.defenses import example_keys
from splitveil.active_party.defenses.projected.posterior import Posterior
from splitveil.active_party.ledger import account_book
from splitveil.common.errors import SettingsError, StorageError
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.run.sample_order import keyed_digests
from splitveil.common.text.files import only_one_process

TARGETS = "targets.safetensors"  # file in the active party's ``checkpoint`` folder, mode 0600
SETTING = "defense.earlier"
_RELEASES = "posterior."

_logger = logging.getLogger(__name__)


class ReleasedTargets(NamedTuple):
    """Targets together with the names of their examples."""

    names: account_book.Names  # each once
    targets: Tensor  # (examples,) or (examples, classes) float32, in the order of the names
    id_rules: bytes = b""  # `rules_as_bytes` of the ids' canonical form
    bounds: tuple[float, float] | None = None
    """Of labels that are numbers: targets are shares of this range. None for classes."""
    releases: Mapping[str, Tensor] = MappingProxyType({})
    """From which other targets of the first examples can be computed (`Posterior.state_dict`, in
    which ``steps.*`` have a row for each of these); empty without."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the tensors that ``read_targets`` reads."""
        named = {"examples": torch.from_numpy(self.names), "targets": self.targets}
        if self.bounds is not None:
            named["bounds"] = torch.tensor(self.bounds, dtype=torch.float64)
        releases = {f"{_RELEASES}{name}": one for name, one in self.releases.items()}
        return named | account_book.id_rules_as_tensor(self.id_rules) | releases

    def releases_of(self, ids: Iterable[str]) -> Mapping[str, Tensor]:
        """Return the releases, if they are about just these canonical ids, in their order."""
        at = torch.from_numpy(account_book.indices_of(account_book.names_of(ids), self.names))
        num_rows = {len(one) for name, one in self.releases.items() if name.startswith("steps.")}
        if num_rows != {len(at)} or bool(((at < 0) | (at >= len(at))).any()):
            return {}
        return {n: one[at] if n.startswith("steps.") else one for n, one in self.releases.items()}

    def of(self, ids: Iterable[str]) -> Tensor:
        """Return the targets of some canonical ids, NaN for those that have none."""
        at = torch.from_numpy(account_book.indices_of(account_book.names_of(ids), self.names))
        targets = self.targets[at.clamp_min(0)].clone()
        targets[at < 0] = torch.nan
        return targets


def read_targets(
    folders: Sequence[Path],
    num_classes: int,
    id_rules: bytes = b"",
    bounds: tuple[float, float] | None = None,
) -> ReleasedTargets | None:
    """Read the targets of earlier runs from their ``checkpoint`` folders; None without any.

    The later folder counts for an example of several. Raises SettingsError if a folder has no such
    file, it cannot be read, or it is of other classes, rules for ids, or bounds of numbers.
    """
    runs: list[ReleasedTargets] = []
    for folder in folders:
        runs = [run._replace(releases={}) for run in runs]  # large, and only the last one's count
        runs.append(_read_targets(folder / TARGETS, num_classes, bounds))
        account_book.check_id_rules(runs[-1].id_rules, id_rules, f"{SETTING}: {folder}")
    if not runs:
        return None
    together = runs[-1]
    for earlier in reversed(runs[:-1]):
        others = np.flatnonzero(account_book.indices_of(earlier.names, together.names) < 0)
        together = ReleasedTargets(
            np.concatenate([together.names, earlier.names[others]]),
            torch.cat([together.targets, earlier.targets[torch.from_numpy(others)]]),
            id_rules,
            bounds,
            together.releases,
        )
    return together


def _read_targets(
    path: Path, num_classes: int, bounds: tuple[float, float] | None
) -> ReleasedTargets:
    tensors = account_book.tensors_of_run(path, SETTING, "with projected_labels that has ended")
    names, targets = tensors.get("examples"), tensors.get("targets")
    shape = () if num_classes <= 2 else (num_classes,)
    of_run = tensors.get("bounds")
    if (
        names is None
        or targets is None
        or names.dtype != torch.uint8
        or names.ndim != 2
        or targets.shape != (len(names), *shape)
        or not bool(torch.isfinite(targets).all())
        or (None if of_run is None else tuple(of_run.tolist())) != bounds
    ):
        what = f"{num_classes} classes" if bounds is None else "numbers within these bounds"
        raise SettingsError(f"{SETTING}: {path}: does not hold targets of {what}")
    try:
        id_rules = account_book.id_rules_of(tensors)
        starts = (name for name in tensors if name.startswith(_RELEASES))
        releases = {name.removeprefix(_RELEASES): tensors[name] for name in starts}
        if releases:
            Posterior().load_state_dict(releases, len(names))
    except ValueError as error:
        raise SettingsError(f"{SETTING}: {path}: {error}") from error
    return ReleasedTargets(names.numpy(), targets.float(), id_rules, bounds, releases)


def labels_first_used(
    path: Path, key: example_keys.NoiseKey, ids: Sequence[str], labels: Tensor
) -> Tensor:
    """Return the label with which each example was first used; those of new ones are now written.

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
