"""A party's half of the model on disk: weights and feature encoder, without pickle."""

from pathlib import Path

from safetensors.torch import save
from torch import nn

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
    checkpoint = folder / "checkpoint"
    try:
        checkpoint.mkdir(exist_ok=True)
    except OSError as error:
        raise StorageError(f"{checkpoint}: cannot be made: {error.strerror}") from error
    weights = {
        name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()
    }
    if encoder is not None:
        write_json_atomically(checkpoint / ENCODER, encoder.state())
    write_bytes_atomically(checkpoint / WEIGHTS, save(weights))
    return checkpoint
