"""Typed access to the values of a decoded JSON document that may hold anything.

A record may have been written by another company's program, or cut off by a crash.
Each function returns None, or an empty container, for a value of a different form.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")

ByAttack = Mapping[str, Mapping[str, ValueT]]
"""Layer -> attack -> value."""

_LARGEST_NUMBER = 1e300
"""JSON allows numbers of any size; larger ones are not figures of a run."""
_LARGEST_COUNT = 2**63


def as_number(value: object) -> float | None:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST_NUMBER else None


def as_count(value: object) -> int | None:
    """Return a whole number that is not negative."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _LARGEST_COUNT else None


def as_text(value: object) -> str | None:
    """Return a string."""
    return value if isinstance(value, str) else None


def as_mapping(value: object) -> Mapping[str, Any]:
    """Return a JSON object."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """Return a JSON array."""
    return value if isinstance(value, list) else []


def as_numbers(value: object) -> dict[str, float | None]:
    """Return an object of numbers; null, or a value of another form, becomes None."""
    return {str(name): as_number(number) for name, number in as_mapping(value).items()}


def by_attack(value: object, read: Callable[[Any], ValueT | None]) -> dict[str, dict[str, ValueT]]:
    """Return layer -> attack -> value, without values for which ``read`` returns None."""
    found: dict[str, dict[str, ValueT]] = {}
    for layer, attacks in as_mapping(value).items():
        read_attacks = {str(name): read(one) for name, one in as_mapping(attacks).items()}
        found[str(layer)] = {name: one for name, one in read_attacks.items() if one is not None}
    return found
