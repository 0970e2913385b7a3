"""Writes a trained model into a run's ``checkpoint`` folder, for anyone who wants to use it.

checkpoint/model.safetensors     the weights
checkpoint/encoder.json          the encoding of the features

Each file of weights says in its metadata whether true labels were learned from, or only labels that
a defense had released.
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.record.run_folder import (
    checkpoint_folder,
    delete,
    write_bytes_atomically,
    write_json_atomically,
)

WEIGHTS = "model.safetensors"
REFITTED = "refitted.safetensors"
ALONE = "alone.safetensors"
ENCODER = "encoder.json"


def save_model(
    folder: Path,
    model: nn.Module,
    encoder: FeatureEncoder | None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write ``checkpoint/model.safetensors`` and ``checkpoint/encoder.json`` into a run."""
    checkpoint = checkpoint_folder(folder)
    if encoder is not None:
        write_json_atomically(checkpoint / ENCODER, encoder.state())
    save_tensors(folder, WEIGHTS, model.state_dict(), metadata)
    return checkpoint


def save_tensors(
    folder: Path,
    file_name: str,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write named tensors as ``checkpoint/<file_name>`` into a run's folder."""
    path = checkpoint_folder(folder) / file_name
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes_atomically(path, save(plain, None if metadata is None else dict(metadata)))
    return path


def delete_saved(folder: Path, file_name: str) -> None:
    """Delete ``checkpoint/<file_name>`` from a run's folder, if it is there."""
    delete(folder / "checkpoint" / file_name)
