"""Features of splitveil that an experiment may need, detected by asking the code itself."""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

from pydantic import TypeAdapter, ValidationError

from splitveil.active_party.defenses import DefenseSettings
from splitveil.common.models.settings import ModelSettings
from splitveil.common.party.party_settings import PartySettings
from splitveil.common.run.contract import Contract

Need: TypeAlias = Literal[
    "gafm",
    "wide_deep",
    "conv",
    "several_passive_parties",
    "split_by_column",
    "initial_weights",
]

_CONTRACT = {"run_name": "probe", "cut_shape": [1], "batch_size": 1, "epochs": 1}


class _Feature(NamedTuple):
    words: str
    is_there: Callable[[], bool]


def unmet(needs: Iterable[Need]) -> list[str]:
    """Describe the needed features that are missing."""
    return [_FEATURES[need].words for need in needs if not _FEATURES[need].is_there()]


def _accepts(kind: Any, values: object) -> bool:
    try:
        TypeAdapter(kind).validate_python(values)
    except ValidationError:
        return False
    return True


def _contract_accepts(**fields: object) -> bool:
    return _accepts(Contract, _CONTRACT | fields)


def _model_accepts(**fields: object) -> bool:
    return _accepts(ModelSettings, fields)


_FEATURES: dict[Need, _Feature] = {
    "gafm": _Feature(
        "the defense gafm (a generator and a critic in place of the head)",
        lambda: _accepts(DefenseSettings, {"name": "gafm"}),
    ),
    "wide_deep": _Feature(
        "the model kind wide_deep", lambda: _model_accepts(kind="wide_deep", hidden=[4])
    ),
    "conv": _Feature("the model kind conv", lambda: _model_accepts(kind="conv", channels=[4])),
    "several_passive_parties": _Feature(
        "runs with several passive parties (contract.passive_parties)",
        lambda: _contract_accepts(passive_parties=["passive_1", "passive_2"]),
    ),
    "split_by_column": _Feature(
        "a split by a column of the data (contract.split.kind: column)",
        lambda: _contract_accepts(split={"kind": "column", "column": "split"}),
    ),
    "initial_weights": _Feature(
        "a start from an earlier run's weights (initial_weights of a party)",
        lambda: "initial_weights" in PartySettings.model_fields,
    ),
}
