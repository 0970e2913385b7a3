"""Builds the passive party's objects from its settings, in one process or in several."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from splitveil.common.data.features import FeatureEncoder, FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models.components import ComponentsBottom
from splitveil.common.models.data_parallel import Beginning, Learner, Take, begin
from splitveil.common.models.device import speed_up
from splitveil.common.models.factory import Trial, build_bottom_model, one_at_a_time
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.ranks import Ranks
from splitveil.common.models.settings import PcaModel, ScoreModel, bins_of
from splitveil.common.party.party_data import FIT_ROWS, PartyData, open_earlier_model
from splitveil.common.party.party_status import reference_bins
from splitveil.common.record.model_files import PretrainedWeights, identity_metadata, save_model
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.messages import ModelIdentity
from splitveil.passive_party.bottom_trainer import (
    BottomTrainer,
    LayerTap,
    named_layer,
    stashing_weights,
)
from splitveil.passive_party.exposure_plan import MOST_FITTED, check_exposure
from splitveil.passive_party.settings import PassiveSettings

logger = logging.getLogger("splitveil.passive_party")


def _fresh_model(
    settings: PassiveSettings, encoder: FeatureEncoder | FeatureShapes, trial: Trial | None = None
) -> nn.Module:
    cut_shape, seed = settings.contract.cut_shape, settings.model_seed
    return build_bottom_model(settings.bottom_model, encoder, cut_shape, seed=seed, trial=trial)


def learner_of_rank(
    settings: PassiveSettings, device: torch.device, beginning: Beginning
) -> Learner:
    """Return the learner of a rank above 0."""
    model = _fresh_model(settings, beginning.shapes or FeatureShapes())
    return learner_of(settings, model.to(device), device, beginning.total_steps)


def learner_of(
    settings: PassiveSettings, model: nn.Module, device: torch.device, total_steps: int
) -> Learner:
    contract = settings.contract
    speed_up(model, settings.autocast, compiled=settings.compile)
    taps = tapped(settings, model)
    optimizer = build_optimizer(settings.optimizer, model)
    schedule = LambdaLR(optimizer, lambda step: contract.schedule.factor(step, total_steps))
    depth = contract.pipeline_depth
    keeping = partial(stashing_weights, model) if depth > 1 else nullcontext
    return Learner(model, optimizer, schedule, device, taps, depth, keeping)


def tapped(settings: PassiveSettings, model: nn.Module) -> dict[str, Take]:
    """Tap the layers before the cut that the adversary looks at; the cut itself needs none."""
    if settings.adversary is None or not settings.adversary.labels:
        return {}
    layers = [name for name in settings.adversary.layers if name != "cut"]
    return {name: LayerTap(named_layer(model, name)).take for name in layers}


def evaluation_labels(settings: PassiveSettings) -> PartyData | None:
    if settings.adversary is None or settings.adversary.labels is None:
        return None
    return PartyData.load(
        settings.adversary.labels, settings.base_dir, id_rules=settings.contract.ids
    )


class BottomBuilder:
    """Makes the trainer once the common rows are known, and keeps the encoder fitted on them."""

    @one_at_a_time
    def __init__(
        self,
        settings: PassiveSettings,
        data: PartyData,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        check_exposure(settings, data)  # before any id is exchanged
        self.encoder: FeatureEncoder | None = None
        self._bins: dict[str, str] = {}  # of training rows, for ``serve``
        self._ranks = ranks
        self._settings = settings
        self._data = data
        self._device = device
        self._earlier = open_earlier_model(settings)
        self._pretrained = PretrainedWeights.open(settings.bottom_model, settings.base_dir)
        frozen = getattr(settings.bottom_model, "frozen", ())
        if frozen or settings.optimizer.rates or self._pretrained.files:
            # Before any id is exchanged: has the model what they name?
            found = data.fit(
                np.arange(len(data.ids)), self._earlier, bins_of(settings.bottom_model)
            )
            if found is not None:
                self._pretrained.put_into(model := _fresh_model(settings, found))
                build_optimizer(settings.optimizer, model)

    def save(self, folder: Path, model: nn.Module, identity: ModelIdentity) -> None:
        found = identity_metadata(identity, self._settings.contract) | self._bins
        logger.debug("model saved in %s", save_model(folder, model, self.encoder, found))

    @one_at_a_time
    def __call__(self, rows: AlignedRows) -> BottomTrainer:
        settings, contract = self._settings, self._settings.contract
        is_computed = isinstance(settings.bottom_model, PcaModel)
        own_rows = self._data.rows_without_test(rows) if is_computed else None
        if contract.is_one_sided:  # this party does not know which rows are held out
            own_rows = np.arange(len(self._data.ids))
        encoder, features = self._data.encode(
            rows, self._earlier, bins_of(settings.bottom_model), own_rows
        )
        if encoder is None or features is None:
            raise SettingsError("data.features: the passive party needs features")
        self.encoder = encoder
        sample = rows.file_rows[rows.splits["train"]][:FIT_ROWS]  # the common order is random
        for block in self._data.blocks(encoder, sample):
            self._bins = reference_bins(encoder.by_column(block))
        digest = self._data.digest(encoder, features) + self._pretrained.digest
        features = features.to(self._device)
        trial = Trial(
            (*rows.order.batch_sizes, *(() if self._ranks is None else (0,))), self._device
        )
        model = _fresh_model(settings, encoder, trial)
        self._pretrained.put_into(model)
        before_labels: tuple[Tensor, Sequence[str]] | None = None
        if isinstance(model, ComponentsBottom) and own_rows is not None:
            if isinstance(settings.bottom_model, ScoreModel):
                blocks = partial(self._data.blocks, encoder, own_rows)
                before_labels = model.before_labels(blocks), encoder.names
            else:
                some = np.sort(np.random.default_rng(0).permutation(own_rows)[:MOST_FITTED])
                is_final = contract.is_one_shot
                try:
                    model.fit(partial(self._data.blocks, encoder, some), is_final=is_final)
                except SettingsError:  # a part may lack directions that the whole has
                    model.fit(partial(self._data.blocks, encoder, own_rows), is_final=is_final)
        if self._earlier is not None:
            self._earlier.put_into(model)
        model.to(self._device)
        learner = learner_of(settings, model, self._device, rows.total_steps(contract))
        parallel = None
        if self._ranks is not None:
            beginning = Beginning(encoder.shapes, None, rows.total_steps(contract))
            parallel = begin(self._ranks, learner, beginning, features, rows.splits["train"])
        return BottomTrainer(
            learner,
            features,
            data_digest=digest,
            parallel=parallel,
            before_labels=before_labels,
            scores=contract.scores,
        )
