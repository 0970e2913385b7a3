"""A model that an earlier run has saved, for another run to begin with: weights and features.

The weights belong to what was fitted to the features then: a category's slot in an embedding, the
mean that was subtracted. So vocabularies and scalers are taken over with them, nothing is fitted
anew, and a category that is new since is unknown.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.data.table import Table
from splitveil.common.errors import SettingsError
from splitveil.common.storage.model_files import ENCODER, WEIGHTS
from splitveil.common.text.files import check_regular, read_bytes

SETTING = "initial_weights"

_UNREADABLE = (
    *(SafetensorError, ValueError, LookupError, TypeError, AttributeError),
    *(RuntimeError, MemoryError),
)
"""What the libraries raise for files that are no such files; not those of the disk."""
_MAX_ENCODER_BYTES = 2**31
"""Twice what the vocabularies of a hundred million categories take."""


@dataclass(frozen=True)
class EarlierModel:
    """What lies in the ``checkpoint`` folder of one party of an earlier run."""

    folder: Path

    encoder: FeatureEncoder | None
    """None for an active party without features."""

    @classmethod
    def open(cls, folder: Path) -> "EarlierModel":
        """Look into a folder; the weights are checked now and used when they are needed.

        Raises:
            SettingsError: it has no model that can be read, or one with a weight that is no finite
                number, naming the first tensor that has.
        """
        try:
            check_regular(folder / WEIGHTS)
            spoilt = _first_not_finite(folder / WEIGHTS)
            encoder = _read_encoder(folder / ENCODER)
        except FileNotFoundError as error:
            raise SettingsError(
                f"{SETTING}: {folder}: there is no {WEIGHTS}: expected the checkpoint folder of "
                f"this party in a run that has ended, as RUN/PARTY/checkpoint"
            ) from error
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise SettingsError(f"{SETTING}: {folder}: cannot be read: {reason}") from error
        except _UNREADABLE as error:
            raise SettingsError(
                f"{SETTING}: {folder}: cannot be read ({type(error).__name__})"
            ) from error
        if spoilt is not None:
            raise SettingsError(
                f"{SETTING}: {folder / WEIGHTS}: tensor {spoilt!r} holds NaN or infinity"
            )
        return cls(folder, encoder)

    def encoder_for(self, table: Table | None, source: str) -> FeatureEncoder | None:
        """Return how features are encoded, once it is sure that they are those of that run.

        Args:
            table: with this party's features; None where it has none.
            source: the table's name, for messages.

        Raises:
            SettingsError: the model was trained with other columns.
            DataError: the table lacks one of them, or has other images.
        """
        if (table is None) != (self.encoder is None):
            had, has = ("features", "none") if table is None else ("no features", "some")
            raise SettingsError(
                f"{SETTING}: {self.folder}: that run's party had {had}, data.features has {has}"
            )
        if table is None or self.encoder is None:
            return None
        self.encoder.check_same_columns(table)
        known = {column.name for column in self.encoder.numeric}
        known |= {column.name for column in self.encoder.categorical}
        new = [name for name in (*table.numeric, *table.categorical) if name not in known]
        if new:
            raise SettingsError(
                f"{SETTING}: {source}: the model was trained without {', '.join(new)}: leave the "
                f"column out of data.features"
            )
        return self.encoder

    def put_into(self, model: nn.Module) -> None:
        """Give a model the weights.

        Raises:
            SettingsError: they are not this model's, naming the first tensor that differs.
        """
        path = self.folder / WEIGHTS
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise SettingsError(f"{SETTING}: {path}: cannot be read") from error
        expected = model.state_dict()
        for name in dict.fromkeys((*expected, *found)):
            for form in (_shape, _dtype):
                there, here = form(found.get(name)), form(expected.get(name))
                if there != here:
                    raise SettingsError(
                        f"{SETTING}: {path}: tensor {name!r} is {there} there and {here} in the "
                        f"model of these settings"
                    )
        model.load_state_dict(found)


def _first_not_finite(path: Path) -> str | None:
    """Name the first tensor with a number that is not finite; one tensor is read at a time."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            tensor = file.get_tensor(name)
            if tensor.dtype.itemsize == 1:
                tensor = tensor.float()  # torch looks for NaN in no smaller type
            if not tensor.isfinite().all():
                return str(name)
    return None


def _read_encoder(path: Path) -> FeatureEncoder | None:
    try:
        text = read_bytes(path, _MAX_ENCODER_BYTES)
    except FileNotFoundError:
        return None
    return FeatureEncoder.from_state(from_json(text))


def _dtype(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    return " x ".join(map(str, tensor.shape)) or "a single number"
