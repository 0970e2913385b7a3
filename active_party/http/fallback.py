"""The model of the active party's own features alone, which answers where the joint one cannot."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from splitveil.active_party.http.batcher import Question
from splitveil.active_party.predict.predictor import Predictions
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind, kind_of
from splitveil.active_party.training.own_models import build_alone, predictions_alone
from splitveil.common.data.id_index import ABSENT
from splitveil.common.errors import SettingsError
from splitveil.common.party.served_rows import ServedRows
from splitveil.common.run.contract import ACTIVE
from splitveil.common.run.inference import ModelIdentity
from splitveil.common.storage.model_files import ALONE
from splitveil.common.storage.trained_model import TrainedModel


class Fallback:
    """Answers ids from this party's own features. Several threads may use it."""

    def __init__(
        self, model: nn.Module, own_rows: ServedRows, labels: LabelKind = CLASS_LABELS
    ) -> None:
        self._model = model.eval()
        self._own_rows = own_rows
        self._labels = labels

    @classmethod
    def load(
        cls, settings: ActiveSettings, own_rows: ServedRows | None, joint: ModelIdentity
    ) -> "Fallback":
        folder = settings.run_folder(ACTIVE)
        if own_rows is None:
            raise SettingsError("serving.fallback: this party has no features of its own")
        if not (folder / "checkpoint" / ALONE).exists():
            raise SettingsError(
                f"serving.fallback: {folder} has no {ALONE}: only a run that was finished with "
                f"serving.fallback leaves one"
            )
        trained = TrainedModel.open(folder, settings.contract, ALONE)
        if trained.identity != joint:
            raise SettingsError(
                f"serving.fallback: {ALONE} is of {trained.identity}, the joint model of {joint}"
            )
        num_classes, seed = settings.data.num_classes, settings.model_seed
        model = build_alone(own_rows.encoder, num_classes, seed)
        trained.put_into(model)
        return cls(model, own_rows, kind_of(settings.data))

    def predict(self, question: Question, at: NDArray[np.int64]) -> Predictions:
        """Predict some of a question's ids. Shapes: ``at`` (rows,)."""
        if question.own is not None:
            found = np.ones(len(at), np.bool_)
            own = question.own.rows(torch.from_numpy(at))
        else:
            rows = self._own_rows.rows_of([question.ids[index] for index in at])
            found = rows != ABSENT
            own = self._own_rows.features_of(rows[found])
        known = np.empty(0, np.float32)
        if found.any():
            known = predictions_alone(self._model, own, self._labels)
        probabilities = np.full((len(at), *known.shape[1:]), np.nan, np.float32)
        if found.any():
            probabilities[found] = known
        return Predictions(probabilities, found, {})
