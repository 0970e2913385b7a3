"""The workers of the passive party: processes that compute the bottom model together with it."""

from functools import partial
from typing import Any

from torch import nn

from splitveil.common.errors import SettingsError
from splitveil.common.models.factory import build_bottom_model
from splitveil.common.models.speed import refuse_speed_ups
from splitveil.common.models.spread_model import RowForm, SpreadModel, check_spreadable
from splitveil.common.models.worker import Replica
from splitveil.common.models.worker_line import WorkerLine
from splitveil.common.party import command_line
from splitveil.common.party.place import Place
from splitveil.common.party.workers import check_same_model, work
from splitveil.passive_party.bottom_trainer import Take, TrainingPass
from splitveil.passive_party.layer_taps import LayerTap, named_layer
from splitveil.passive_party.settings import PassiveSettings
from splitveil.passive_party.stashed_weights import keeping_weights

_ROLE = "bottom_model"


def work_for(settings: PassiveSettings, place: Place) -> None:
    """Compute the bottom model's batches for rank 0 of this party."""
    device = command_line.prepare(settings, place)
    depth = settings.contract.pipeline_depth

    def build(facts: dict[str, Any]) -> Replica:
        check_same_model(facts["model"], settings.bottom_model, _ROLE)
        form = RowForm.from_json(facts["form"])
        if form.shapes is None:
            raise SettingsError("data.features: the passive party needs features")
        model = build_bottom_model(
            settings.bottom_model,
            form.shapes,
            settings.contract.cut_shape,
            seed=settings.model_seed,
        ).to(device)
        taps = tapped(settings, model)
        watched = list(taps.values())
        if depth == 1:
            return Replica(model, form, device, watched)
        return Replica(model, form, device, watched, depth, partial(keeping_weights, model))

    work(place, build)


def spread(
    settings: PassiveSettings, model: nn.Module, form: RowForm, line: WorkerLine
) -> TrainingPass:
    """Return the bottom model as all processes compute it, and the layers that are attacked."""
    check_spreadable(model, _ROLE)
    refuse_speed_ups(settings.autocast, compiled=settings.compile)
    taps = tapped(settings, model)
    found = SpreadModel(model, line, list(taps.values()))
    line.begin({"form": form.to_json(), "model": settings.bottom_model.model_dump(mode="json")})
    return TrainingPass(found, {name: partial(found.take_seen, at) for at, name in enumerate(taps)})


def tapped(settings: PassiveSettings, model: nn.Module) -> dict[str, Take]:
    """Tap the layers before the cut that the adversary looks at; the cut itself needs none."""
    if settings.adversary is None or not (settings.adversary.labels or settings.audits):
        return {}
    layers = [name for name in settings.adversary.layers if name != "cut"]
    return {name: LayerTap(named_layer(model, name)).take for name in layers}
