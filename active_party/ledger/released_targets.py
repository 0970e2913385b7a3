"""The targets that a run's releases led to, by example, for later runs on some of the same rows.

A target is computed from releases alone. A later run that trains on it again, instead of summing
the label once more, tells nothing new about that label. An example is recognised by its id; whether
its label has changed since must not matter, because the choice of rows would then tell that.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from splitveil.active_party.ledger.account_book import (
    Names,
    check_id_rules,
    id_rules_as_tensor,
    id_rules_of,
    indices_of,
    names_of,
)
from splitveil.common.errors import SettingsError
from splitveil.common.text.files import check_regular

TARGETS = "targets.safetensors"
"""File in the active party's ``checkpoint`` folder, mode 0600."""
SETTING = "defense.earlier"


class ReleasedTargets(NamedTuple):
    """Targets together with the names of their examples."""

    names: Names
    """Each name once."""

    targets: Tensor
    """(examples,) or (examples, classes) float32, in the order of the names."""

    id_rules: bytes = b""
    """``rules_as_bytes`` of the rules by which the ids were brought into canonical form."""

    bounds: tuple[float, float] | None = None
    """Of labels that are numbers: targets are shares of this range. None for classes."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Return the tensors that ``read_targets`` reads."""
        named = {"examples": torch.from_numpy(self.names), "targets": self.targets}
        if self.bounds is not None:
            named["bounds"] = torch.tensor(self.bounds, dtype=torch.float64)
        return named | id_rules_as_tensor(self.id_rules)

    def of(self, ids: Iterable[str]) -> Tensor:
        """Return the targets of some canonical ids, NaN for those that have none."""
        at = torch.from_numpy(indices_of(names_of(ids), self.names))
        found = self.targets[at.clamp_min(0)].clone()
        found[at < 0] = torch.nan
        return found


def targets_by_id(
    ids: Iterable[str],
    targets: Tensor,
    id_rules: bytes = b"",
    bounds: tuple[float, float] | None = None,
) -> ReleasedTargets:
    """Return the targets of these canonical ids with the names of their examples."""
    return ReleasedTargets(names_of(ids), targets.detach().cpu().float(), id_rules, bounds)


def read_targets(
    folders: Sequence[Path],
    num_classes: int,
    id_rules: bytes = b"",
    bounds: tuple[float, float] | None = None,
) -> ReleasedTargets | None:
    """Read the targets of earlier runs from their ``checkpoint`` folders; None without any.

    The later folder counts for an example of several. Classes, rules for ids, and bounds of numbers
    have to be those of this run.

    Raises:
        SettingsError: a folder has no such file, or it cannot be read or is of other classes
            or bounds, or its ids were compared by other rules.
    """
    found = [_read(folder / TARGETS, num_classes, bounds) for folder in folders]
    for folder, one in zip(folders, found, strict=True):
        check_id_rules(one.id_rules, id_rules, f"{SETTING}: {folder}")
    if not found:
        return None
    together = found[-1]
    for earlier in reversed(found[:-1]):
        others = np.flatnonzero(indices_of(earlier.names, together.names) < 0)
        together = ReleasedTargets(
            np.concatenate([together.names, earlier.names[others]]),
            torch.cat([together.targets, earlier.targets[torch.from_numpy(others)]]),
            id_rules,
            bounds,
        )
    return together


def _read(path: Path, num_classes: int, bounds: tuple[float, float] | None) -> ReleasedTargets:
    try:
        check_regular(path)
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise SettingsError(
            f"{SETTING}: {path.parent}: there is no {TARGETS}: expected the active party's "
            f"checkpoint folder of a run with projected_labels that has ended"
        ) from error
    except (OSError, SafetensorError) as error:
        raise SettingsError(f"{SETTING}: {path}: cannot be read") from error
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
        id_rules = id_rules_of(tensors)
    except ValueError as error:
        raise SettingsError(f"{SETTING}: {path}: {error}") from error
    return ReleasedTargets(names.numpy(), targets.float(), id_rules, bounds)
