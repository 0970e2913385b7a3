"""Writes a trained model into a run's ``checkpoint`` folder, for anyone who wants to use it.

checkpoint/model.safetensors     the weights
checkpoint/encoder.json          the encoding of the features
"""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.storage.run_folder import (
    checkpoint_folder,
    delete,
    write_bytes_atomically,
    write_json_atomically,
)

WEIGHTS = "model.safetensors"
ENCODER = "encoder.json"


def save_model(folder: Path, model: nn.Module, encoder: FeatureEncoder | None) -> Path:
    """Write ``checkpoint/model.safetensors`` and ``checkpoint/encoder.json`` into a run's folder.

    Raises:
        StorageError: a file cannot be written; its earlier version stays.
    """
    checkpoint = checkpoint_folder(folder)
    if encoder is not None:
        write_json_atomically(checkpoint / ENCODER, encoder.state())
    save_tensors(folder, WEIGHTS, model.state_dict())
    return checkpoint


def save_tensors(folder: Path, file_name: str, tensors: Mapping[str, Tensor]) -> Path:
    """Write named tensors as ``checkpoint/<file_name>`` into a run's folder.

    Raises:
        StorageError: the file cannot be written; its earlier version stays.
    """
    path = checkpoint_folder(folder) / file_name
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes_atomically(path, save(plain))
    return path


def delete_saved(folder: Path, file_name: str) -> None:
    """Delete ``checkpoint/<file_name>`` from a run's folder, if it is there.

    Raises:
        StorageError: it cannot be deleted.
    """
    delete(folder / "checkpoint" / file_name)
