"""Formats bounds: upper ones rounded up, so that none is printed below its value, lower ones down.

Every bound, charge, budget and "at most" on any page and in any log is formatted here, so that
a bound has the same digits everywhere. Measurements and estimates are rounded as usual.
"""

import math
from decimal import ROUND_CEILING, Context, Decimal

_NOISE = 1e-9  # relative error of sums that is not rounded up: .7 stays .700


def auc_at_most(auc: float) -> str:
    """Format a bound on an AUC with three digits; a bound above .999 becomes 1.000."""
    if math.isnan(auc):
        return "nan"
    return f"{math.ceil(auc * (1 - _NOISE) * 1000) / 1000:.3f}"


def at_most(value: float) -> str:
    """Format a nonnegative bound with at most four significant digits."""
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=4, rounding=ROUND_CEILING).create_decimal(Decimal(value * (1 - _NOISE)))
    return f"{float(rounded):.4g}"


def at_least(value: float) -> str:
    """Format a nonnegative lower bound with three digits after the point, rounded down."""
    if not math.isfinite(value):
        return str(value)
    return f"{math.floor(value * (1 + _NOISE) * 1000) / 1000:.3f}"
