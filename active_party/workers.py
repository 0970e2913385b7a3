"""The workers of the active party: processes that compute the top model together with it.

They are given activations, own features and gradients, and no labels. Rank 0 defends the gradient
of the whole batch, charges it and records it, as in a party of one process.
"""

from typing import Any

from torch import nn

from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.features import FeatureShapes
from splitveil.common.errors import SettingsError
from splitveil.common.models.factory import build_top_model
from splitveil.common.models.speed import refuse_speed_ups
from splitveil.common.models.spread_model import RowForm, SpreadModel, check_spreadable
from splitveil.common.models.worker import Replica
from splitveil.common.models.worker_line import WorkerLine
from splitveil.common.party import command_line
from splitveil.common.party.workers import Rank, check_model, check_same_model, work

_ROLE = "top_model"


def check_settings(settings: ActiveSettings) -> None:
    """Check that several processes can compute the top model, as far as the settings say."""
    check_model(settings.top_model, _ROLE)
    if settings.defense.traits.has_own_objective:
        raise SettingsError(
            f"defense: {settings.defense.title} trains more than the top model, and only one "
            f"process computes it"
        )


def work_for(settings: ActiveSettings, rank: Rank) -> None:
    """Compute the top model's batches for rank 0 of this party."""
    device = command_line.prepare(settings, rank)

    def build(facts: dict[str, Any]) -> Replica:
        check_same_model(facts["model"], settings.top_model, _ROLE)
        form = RowForm.from_json(facts["form"])
        model = build_top_model(
            settings.top_model,
            settings.contract.aggregate_shape,
            form.shapes,
            seed=settings.model_seed,
            num_classes=settings.data.num_classes,
        )
        return Replica(model.to(device), form, device)

    work(rank, build)


def spread(
    settings: ActiveSettings, model: nn.Module, shapes: FeatureShapes | None, line: WorkerLine
) -> SpreadModel:
    """Return the top model as all processes compute it."""
    check_spreadable(model, _ROLE)
    refuse_speed_ups(settings.autocast, compiled=settings.compile)
    form = RowForm(tuple(settings.contract.aggregate_shape), shapes)
    line.begin({"form": form.to_json(), "model": settings.top_model.model_dump(mode="json")})
    return SpreadModel(model, line)
