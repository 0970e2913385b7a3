"""Builds the passive party's objects from its settings, in one process or in several."""

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splitveil.common.data.features import FeatureEncoder
from splitveil.common.errors import SettingsError
from splitveil.common.models.components import ComponentsBottom
from splitveil.common.models.ridge import Numbers
from splitveil.common.models.settings import PcaModel, ScoreModel, bins_of
from splitveil.common.party.drift import reference_bins
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.record.model_files import PretrainedWeights, identity_metadata, save_model
from splitveil.common.run.course import AlignedRows
from splitveil.common.run.messages import ModelIdentity
from splitveil.passive_party.components_trainer import ComponentsTrainer
from splitveil.passive_party.exposure_plan import MOST_FITTED, check_exposure
from splitveil.passive_party.settings import PassiveSettings

if TYPE_CHECKING:
    import torch

    from splitveil.common.models.ranks import Ranks

logger = logging.getLogger("splitveil.passive_party")

_COMPARED = 2**14  # rows with which those that are asked for later are compared


def evaluation_labels(settings: PassiveSettings) -> PartyData | None:
    if settings.adversary is None or settings.adversary.labels is None:
        return None
    return PartyData.load(
        settings.adversary.labels, settings.base_dir, id_rules=settings.contract.ids
    )


class BottomBuilder:
    """Makes the trainer once the common rows are known, and keeps the encoder fitted on them."""

    def __init__(
        self,
        settings: PassiveSettings,
        data: PartyData,
        device: "torch.device | None" = None,
        ranks: "Ranks | None" = None,
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
                from splitveil.common.models.optimizers import build_optimizer  # noqa: PLC0415
                from splitveil.passive_party.bottom_trainer import fresh_model  # noqa: PLC0415

                self._pretrained.put_into(model := fresh_model(settings, found))
                build_optimizer(settings.optimizer, model)

    def save(self, folder: Path, model: Any, identity: ModelIdentity) -> None:
        found = identity_metadata(identity, self._settings.contract) | self._bins
        logger.debug("model saved in %s", save_model(folder, model, self.encoder, found))

    def __call__(self, rows: AlignedRows) -> ComponentsTrainer:
        settings, contract = self._settings, self._settings.contract
        chosen = settings.bottom_model
        is_computed = isinstance(chosen, PcaModel)
        own_rows = self._data.rows_without_test(rows) if is_computed else None
        if contract.is_one_sided:  # this party does not know which rows are held out
            own_rows = np.arange(len(self._data.ids))
        encoder, features = self._data.encode(rows, self._earlier, bins_of(chosen), own_rows)
        if encoder is None or features is None:
            raise SettingsError("data.features: the passive party needs features")
        self.encoder = encoder
        known = rows.file_rows[rows.splits["train"]]
        sample = np.random.default_rng(0).permutation(known)[:_COMPARED]
        block = self._data.features(encoder, sample).rows(slice(None))
        self._bins = reference_bins(encoder.by_column(block))
        digest = self._data.digest(encoder, features) + self._pretrained.digest
        weights: list[Any] = [self._pretrained]
        before_labels: tuple[Numbers, Sequence[str]] | None = None
        if isinstance(chosen, PcaModel) and own_rows is not None:
            model = ComponentsBottom(chosen, encoder.shapes, contract.cut_shape)
            if isinstance(chosen, ScoreModel):
                blocks = partial(self._data.blocks, encoder, own_rows)
                before_labels = model.before_labels(blocks), encoder.names
            else:
                some = np.sort(np.random.default_rng(0).permutation(own_rows)[:MOST_FITTED])
                is_final = contract.is_one_shot
                try:
                    model.fit(partial(self._data.blocks, encoder, some), is_final=is_final)
                except SettingsError:  # a part may lack directions that the whole has
                    model.fit(partial(self._data.blocks, encoder, own_rows), is_final=is_final)
            weights.append(model)
        if self._earlier is not None:
            weights.append(self._earlier)
        if settings.has_network:
            from splitveil.passive_party.bottom_trainer import build_trainer  # noqa: PLC0415

            return build_trainer(
                settings, encoder, features, rows, weights, self._device, self._ranks, digest
            )
        if self._earlier is not None:
            self._earlier.put_into(model)
        return ComponentsTrainer(
            model,
            features,
            data_digest=digest,
            before_labels=before_labels,
            scores=contract.scores,
        )
