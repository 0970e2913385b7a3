"""The active party's half of a trained model: from activations to predictions."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.aggregation import aggregate
from splitveil.active_party.training.label_kinds import CLASS_LABELS, LabelKind, kind_of
from splitveil.common.data.features import FeatureEncoder, Features
from splitveil.common.errors import SettingsError
from splitveil.common.models.blocks import predict_in_blocks
from splitveil.common.models.factory import build_top_model
from splitveil.common.record.model_files import REFITTED, WEIGHTS, TrainedModel
from splitveil.common.run.contract import ACTIVE, Aggregation
from splitveil.common.run.messages import ModelIdentity

ModelChoice = Literal["best", "trained", "refitted"]


class JointModel:
    """The top model as a run has left it. Several threads may use it; one at a time computes."""

    def __init__(
        self,
        identity: ModelIdentity,
        model: nn.Module,
        encoder: FeatureEncoder | None,
        aggregation: Aggregation,
        device: torch.device,
        kind: Literal["trained", "refitted"],
        labels: LabelKind = CLASS_LABELS,
    ) -> None:
        self.identity = identity
        self.encoder = encoder
        self.kind = kind
        self._model = model.to(device)
        self._aggregation = aggregation
        self._device = device
        self._labels = labels
        self.shape_of_row = labels.shape_of_row
        self._computing = threading.Lock()

    @classmethod
    def load(
        cls, settings: ActiveSettings, device: torch.device, choice: ModelChoice | None = None
    ) -> "JointModel":
        """Load the top model that a run has left."""
        contract, folder = settings.contract, settings.run_folder(ACTIVE)
        kind = _which(choice or settings.inference.model, folder)
        weights = REFITTED if kind == "refitted" else WEIGHTS
        trained = TrainedModel.open(folder, contract, weights)
        model = build_top_model(
            settings.top_model,
            contract.aggregate_shape,
            trained.encoder,
            seed=settings.model_seed,
            num_classes=settings.data.num_classes,
        )
        trained.put_into(model)
        identity, encoder, rule = trained.identity, trained.encoder, contract.aggregation
        return cls(identity, model, encoder, rule, device, kind, kind_of(settings.data))

    def predictions(
        self, activations: Sequence[Tensor], own: Features | None
    ) -> NDArray[np.float32]:
        """Return what the model predicts.

        Returns the probabilities of label 1, (rows,), or of each class, (rows, classes); or numbers
        in the label's unit, (rows,). Shapes: ``activations`` (rows, *cut_shape).
        """
        if not len(activations[0]):
            return np.empty((0, *self.shape_of_row), np.float32)
        with self._computing:
            cut = aggregate(self._aggregation, activations).to(self._device, torch.float32)
            features = None if own is None else own.to(self._device)
            found = predict_in_blocks(self._model, cut, features, link=self._labels.predicted)
        return self._labels.in_units(np.asarray(found.cpu().numpy(), np.float32))


def _which(choice: ModelChoice, folder: Path) -> Literal["trained", "refitted"]:
    has_refitted = (folder / "checkpoint" / REFITTED).exists()
    if choice == "refitted" and not has_refitted:
        raise SettingsError(
            f"inference.model: {folder} has no {REFITTED}: only a run whose defense has refit_top "
            f"leaves one"
        )
    if choice == "best":
        return "refitted" if has_refitted else "trained"
    return choice
