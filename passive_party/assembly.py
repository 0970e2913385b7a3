"""Builds the passive party's objects from its settings."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.errors import SettingsError
from splitveil.common.models.factory import Trial, build_bottom_model
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.speed import speed_up
from splitveil.common.models.spread_model import RowForm
from splitveil.common.models.worker_line import WorkerLine
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.run.course import AlignedRows
from splitveil.common.wire.http_proxy import HttpProxy, named_proxy, proxy_of_environment
from splitveil.passive_party.amplified_steps import amplify_steps
from splitveil.passive_party.bottom_trainer import BottomTrainer, TrainingPass
from splitveil.passive_party.settings import PassiveSettings
from splitveil.passive_party.workers import spread, tapped


def http_proxy(settings: PassiveSettings) -> HttpProxy | None:
    """Return the proxy to connect through; None for a direct connection."""
    match settings.proxy:
        case None:
            return None
        case "environment":
            return proxy_of_environment(settings.connect)
        case url:
            known = settings.proxy_credentials
            return named_proxy(url, None if known is None else settings.base_dir / known)


class TrainerBuilder:
    """Makes the trainer once the common rows are known, and keeps the encoder fitted on them."""

    def __init__(
        self,
        settings: PassiveSettings,
        data: PartyData,
        device: torch.device,
        line: WorkerLine | None = None,
    ) -> None:
        self.encoder: FeatureEncoder | None = None
        self._line = line
        self._settings = settings
        self._data = data
        self._device = device
        self._earlier = open_earlier_model(settings)

    def __call__(self, rows: AlignedRows) -> BottomTrainer:
        settings, contract = self._settings, self._settings.contract
        encoder, features = self._data.encode(rows, self._earlier)
        if encoder is None or features is None:
            raise SettingsError("data.features: the passive party needs features")
        self.encoder = encoder
        model = build_bottom_model(
            settings.bottom_model,
            encoder,
            contract.cut_shape,
            seed=settings.model_seed,
            # Each of several processes would compute a part of these rows.
            trial=None if self._line else Trial(rows.order.batch_sizes, self._device),
        )
        if self._earlier is not None:
            self._earlier.put_into(model)
        model.to(self._device)
        speed_up(model, settings.autocast, compiled=settings.compile)
        training = self._training_pass(model, encoder)
        optimizer = build_optimizer(settings.optimizer, model)
        if settings.adversary is not None and settings.adversary.amplify:
            amplify_steps(optimizer)
        total_steps = rows.total_steps(contract)
        return BottomTrainer(
            model=model,
            optimizer=optimizer,
            schedule=LambdaLR(optimizer, lambda step: contract.schedule.factor(step, total_steps)),
            features=features,
            device=self._device,
            data_digest=self._data.digest(encoder, features),
            training=training,
        )

    def _training_pass(self, model: nn.Module, encoder: FeatureEncoder) -> TrainingPass:
        if self._line is None:
            return TrainingPass(model, tapped(self._settings, model))
        return spread(self._settings, model, RowForm(None, encoder.shapes), self._line)
