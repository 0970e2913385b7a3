"""Builds the passive party's objects from its settings, in one process or in several."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from splitveil.common.alignment import build_engine, records_of
from splitveil.common.data.features import FeatureEncoder, FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models.data_parallel import Beginning, Learner, Take, begin
from splitveil.common.models.factory import Trial, build_bottom_model
from splitveil.common.models.optimizers import build_optimizer
from splitveil.common.models.ranks import Ranks
from splitveil.common.models.settings import bins_of
from splitveil.common.models.speed import speed_up
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.credentials import CredentialFiles, credential_files
from splitveil.common.party.endpoint import check_free
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.party.party_status import RunStatus
from splitveil.common.record.model_files import PretrainedWeights
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.course import AlignedRows
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import log_security
from splitveil.common.wire.http_proxy import HttpProxy, named_proxy, proxy_of_environment
from splitveil.common.wire.recorded_calls import AllNotes, Notes
from splitveil.passive_party.amplified_steps import amplify_steps
from splitveil.passive_party.bottom_trainer import (
    BottomTrainer,
    LayerTap,
    named_layer,
    stashing_weights,
)
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.opening import Aligner, Participant
from splitveil.passive_party.recorder import noting_attempts
from splitveil.passive_party.settings import PassiveSettings


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
    if settings.adversary is not None and settings.adversary.amplify:
        amplify_steps(optimizer)
    schedule = LambdaLR(optimizer, lambda step: contract.schedule.factor(step, total_steps))
    depth = contract.pipeline_depth
    keeping = partial(stashing_weights, model) if depth > 1 else nullcontext
    return Learner(model, optimizer, schedule, device, taps, depth, keeping)


def tapped(settings: PassiveSettings, model: nn.Module) -> dict[str, Take]:
    """Tap the layers before the cut that the adversary looks at; the cut itself needs none."""
    if settings.adversary is None or not (settings.adversary.labels or settings.audits):
        return {}
    layers = [name for name in settings.adversary.layers if name != "cut"]
    return {name: LayerTap(named_layer(model, name)).take for name in layers}


def http_proxy(settings: PassiveSettings) -> HttpProxy | None:
    match settings.proxy:
        case None:
            return None
        case "environment":
            return proxy_of_environment(settings.connect)
        case url:
            known = settings.proxy_credentials
            return named_proxy(url, None if known is None else settings.base_dir / known)


def checked_credentials(settings: PassiveSettings) -> CredentialFiles | None:
    """Check what the connection and the status need, and return this party's credentials."""
    credentials = credential_files(settings, settings.party)
    log_security(credentials, settings.connect, "connect")
    http_proxy(settings)
    check_free(settings.status)
    return credentials


def connection_of(
    settings: PassiveSettings, credentials: CredentialFiles | None, notes: Notes | None = None
) -> PeerConnection:
    return PeerConnection(
        settings.connect, settings.contract, credentials, notes, http_proxy(settings)
    )


def build_peer(
    settings: PassiveSettings,
    credentials: CredentialFiles | None,
    transcript: Transcript | None,
    status: RunStatus,
    interruption: Interruption,
) -> GrpcPeer:
    notes = status if transcript is None else AllNotes(transcript, status)
    return GrpcPeer(
        connection_of(settings, credentials, notes),
        settings.reconnect,
        interruption,
        settings.party,
        noting_attempts(status),
    )


def idle_peer(settings: PassiveSettings) -> GrpcPeer:
    connection = connection_of(settings, credential_files(settings, settings.party))
    return GrpcPeer(connection, settings.reconnect, party=settings.party)


def evaluation_labels(settings: PassiveSettings) -> PartyData | None:
    if settings.adversary is None or settings.adversary.labels is None:
        return None
    return PartyData.load(
        settings.adversary.labels, settings.base_dir, id_rules=settings.contract.ids
    )


def build_aligner(
    settings: PassiveSettings, data: PartyData, folder: Path, *, fresh: bool = False
) -> Aligner:
    kept, tried = records_of(settings, folder)
    if fresh:
        kept.discard()
    return Aligner(
        Participant(settings.contract, settings.party, data.ids, data.table.splits),
        build_engine(settings.contract.alignment),
        partial(draw_nonce, settings),
        tried,
        kept,
    )


class BottomBuilder:
    """Makes the trainer once the common rows are known, and keeps the encoder fitted on them."""

    def __init__(
        self,
        settings: PassiveSettings,
        data: PartyData,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.encoder: FeatureEncoder | None = None
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

    def __call__(self, rows: AlignedRows) -> BottomTrainer:
        settings, contract = self._settings, self._settings.contract
        encoder, features = self._data.encode(rows, self._earlier, bins_of(settings.bottom_model))
        if encoder is None or features is None:
            raise SettingsError("data.features: the passive party needs features")
        self.encoder = encoder
        digest = self._data.digest(encoder, features) + self._pretrained.digest
        features = features.to(self._device)
        trial = Trial(
            (*rows.order.batch_sizes, *(() if self._ranks is None else (0,))), self._device
        )
        model = _fresh_model(settings, encoder, trial)
        self._pretrained.put_into(model)
        if self._earlier is not None:
            self._earlier.put_into(model)
        model.to(self._device)
        learner = learner_of(settings, model, self._device, rows.total_steps(contract))
        parallel = None
        if self._ranks is not None:
            beginning = Beginning(encoder.shapes, None, rows.total_steps(contract))
            parallel = begin(self._ranks, learner, beginning, features, rows.splits["train"])
        return BottomTrainer(learner, features, data_digest=digest, parallel=parallel)
