"""The releases of a run on disk: noisy sums over labels.

checkpoint/releases.safetensors    tensors ``<stage>.<name>``, mode 0600

A release is drawn once. It is written here before anything is computed from it, so that a party
that was killed never draws a second one: two noisy sums over the same labels would reveal
more than one. The file outlives the run, because a later run can use its releases again.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from splitveil.common.errors import StorageError
from splitveil.common.record.run_folder import checkpoint_folder, write_bytes_atomically

RELEASES = "releases.safetensors"

Tensors = Mapping[str, Tensor]  # the parts of one release, by name


class ReleaseFile:
    """The releases of one run, in the order of their stages; without a folder in memory only."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._stages: dict[int, dict[str, Tensor]] = {}

    @classmethod
    def read(cls, folder: Path) -> "ReleaseFile":
        found, path = cls(folder), folder / "checkpoint" / RELEASES
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return found
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            for name, values in load(content).items():
                stage, _, part = name.partition(".")
                found._stages.setdefault(int(stage), {})[part] = values
        except (SafetensorError, ValueError) as error:
            raise StorageError(f"{path}: is damaged: {LOST}") from error
        return found

    def __len__(self) -> int:
        return len(self._stages)

    def at(self, stage: int) -> Tensors | None:
        return self._stages.get(stage)

    def keep(self, stage: int, release: Tensors) -> None:
        """Write a stage's release, once and for all: it must not be used after a StorageError."""
        if stage in self._stages:
            raise ValueError(f"stage {stage} has a release already")
        parts = {name: values.detach().cpu().contiguous() for name, values in release.items()}
        if self._folder is not None:
            checkpoint = checkpoint_folder(self._folder)
            stages = self._stages | {stage: parts}
            content = save(
                {f"{one}.{name}": part for one, of in stages.items() for name, part in of.items()}
            )
            write_bytes_atomically(checkpoint / RELEASES, content, mode=0o600)
        self._stages[stage] = parts


LOST = (
    "what the run has released about the labels is no longer known, and no stage is drawn twice: "
    "restore a copy of the file, or start over with --fresh at both parties"
)
