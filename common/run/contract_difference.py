"""Shows the first difference between two parties' contracts, with both values."""

import json
from typing import Any

from splitveil.common.errors import ContractMismatch
from splitveil.common.run.contract import Contract
from splitveil.common.text.visible_text import visible

_SHOWN_CHARACTERS = 60
_ABSENT = "nothing"


def check_same_contract(own: Contract, canonical: str, others_name: str) -> None:
    if fields := own.fields_differing_from(canonical):
        raise ContractMismatch(fields, first_difference(own, canonical, others_name))


def first_difference(own: Contract, canonical: str, others_name: str) -> str:
    """Return a sentence about the first field that differs; empty if none does.

    Args:
        own: this party's contract.
        canonical: the other party's canonical form, which may be any text.
    """
    fields = own.fields_differing_from(canonical)
    if not fields:
        return ""
    name, *others = fields
    ours = _shown(json.loads(own.canonical_json()), name)
    try:
        theirs = _shown(json.loads(canonical), name)
    except (ValueError, RecursionError):
        return f"what {others_name} holds is no contract"
    also = f"; also different: {', '.join(others)}" if others else ""
    return f"contract.{name}: {ours} here, {theirs} at {others_name}{also}"


def _shown(value: Any, name: str) -> str:
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _ABSENT
        value = value[part]
    return in_short(value)


def in_short(value: Any) -> str:
    text = visible(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
