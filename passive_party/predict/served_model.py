"""The trained bottom model and the rows that it answers for."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from splitveil.common.data.source_settings import expand_path
from splitveil.common.data.stored_ids import ABSENT
from splitveil.common.data.table_files import read_id_list
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.factory import build_bottom_model
from splitveil.common.party.served_rows import ServedRows
from splitveil.common.record.trained_model import TrainedModel
from splitveil.common.run.messages import Embedded, ModelIdentity
from splitveil.passive_party.settings import PassiveSettings


class ServedModel:
    """Answers ids with activations. Several threads may ask; one at a time is answered."""

    def __init__(
        self,
        identity: ModelIdentity,
        model: nn.Module,
        rows: ServedRows,
        cut_shape: Sequence[int],
        device: torch.device,
    ) -> None:
        self.identity = identity
        self.rows = rows
        self._model = model.to(device)
        self._cut_shape = tuple(cut_shape)
        self._device = device
        self._computing = threading.Lock()

    @classmethod
    def load(
        cls, settings: PassiveSettings, device: torch.device, table: Path | None = None
    ) -> "ServedModel":
        """Load the model that a run has left, and the table."""
        contract = settings.contract
        trained = TrainedModel.open(settings.run_folder(settings.folder_name()), contract)
        rows = ServedRows.load(settings, trained.encoder, table)
        allowed = settings.answers.allowed_ids
        if allowed is not None:
            path = expand_path("answers.allowed_ids", allowed, settings.base_dir)
            rows.serve_only(read_id_list(path, settings.data, settings.contract.ids))
        model = build_bottom_model(
            settings.bottom_model, rows.encoder, contract.cut_shape, seed=settings.model_seed
        )
        trained.put_into(model)
        return cls(trained.identity, model, rows, contract.cut_shape, device)

    def embed(self, ids: Sequence[str]) -> Embedded:
        """Return the activations of the ids that have a row.

        A row's activation is the same bits whatever is asked for beside it.
        """
        rows = self.rows.rows_of(ids)
        known = rows != ABSENT
        return Embedded(known, self.activations(rows[known]))

    def activations(self, rows: NDArray[np.int64]) -> Tensor:
        """Return the activations of some rows of the table, (rows, *cut_shape)."""
        if not len(rows):
            return torch.zeros(0, *self._cut_shape)
        with self._computing:
            features = self.rows.features_of(rows).to(self._device)
            return predict_in_blocks(self._model, features)
