"""A model that an earlier run has saved, for another run to begin with: weights and features.

The weights belong to what was fitted to the features then: a category's slot in an embedding, the
mean that was subtracted. So vocabularies and scalers are taken over with them, nothing is fitted
anew, and a category that is new since is unknown.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from common.checkpoint import ENCODER, WEIGHTS
from common.data.features import FeatureEncoder
from common.data.table import Table
from common.errors import SettingsError

SETTING = "initial_weights"


@dataclass(frozen=True)
class EarlierModel:
    """What lies in the ``checkpoint`` folder of one party of an earlier run."""

    folder: Path

    encoder: FeatureEncoder | None
    """None for an active party without features."""

    @classmethod
    def open(cls, folder: Path) -> "EarlierModel":
        """Look into a folder; the weights are read when they are needed.

        Raises:
            SettingsError: it has no model that can be read.
        """
        try:
            with safe_open(folder / WEIGHTS, framework="pt"):
                pass
            encoder = _read_encoder(folder / ENCODER)
        except FileNotFoundError as error:
            raise SettingsError(
                f"{SETTING}: {folder}: there is no {WEIGHTS}: expected the checkpoint folder of "
                f"this party in a run that has ended, as RUN/PARTY/checkpoint"
            ) from error
        except (OSError, ValueError, SafetensorError) as error:
            raise SettingsError(
                f"{SETTING}: {folder}: cannot be read ({type(error).__name__})"
            ) from error
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
            if _shape(expected.get(name)) != _shape(found.get(name)):
                raise SettingsError(
                    f"{SETTING}: {path}: tensor {name!r} is {_shape(found.get(name))} there and "
                    f"{_shape(expected.get(name))} in the model of these settings"
                )
        model.load_state_dict(found)


def _read_encoder(path: Path) -> FeatureEncoder | None:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return FeatureEncoder.from_state(json.loads(text))


def _shape(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    return " x ".join(map(str, tensor.shape)) or "a single number"
