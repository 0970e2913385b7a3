"""A party's checkpoint on disk: weights, feature encoder and other tensors, without pickle."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

from common.data.features import FeatureEncoder
from common.errors import StorageError
from common.run_folder import write_bytes_atomically, write_json_atomically

WEIGHTS = "model.safetensors"
ENCODER = "encoder.json"


def save_model(folder: Path, model: nn.Module, encoder: FeatureEncoder | None) -> Path:
    """Write ``checkpoint/model.safetensors`` and ``checkpoint/encoder.json`` into a run's folder.

    Raises:
        StorageError: something could not be written; what stood there before still does.
    """
    checkpoint = _checkpoint_folder(folder)
    if encoder is not None:
        write_json_atomically(checkpoint / ENCODER, encoder.state())
    save_tensors(folder, WEIGHTS, model.state_dict())
    return checkpoint


def save_tensors(folder: Path, file_name: str, tensors: Mapping[str, Tensor]) -> Path:
    """Write named tensors as ``checkpoint/<file_name>`` into a run's folder.

    Raises:
        StorageError: they cannot be written; what stood there before still does.
    """
    path = _checkpoint_folder(folder) / file_name
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    write_bytes_atomically(path, save(plain))
    return path


def _checkpoint_folder(folder: Path) -> Path:
    checkpoint = folder / "checkpoint"
    try:
        checkpoint.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{checkpoint}: cannot be made: {error.strerror}") from error
    return checkpoint
