"""How a bound is printed: rounded up, so that what is read is never below what was computed.

Every guarantee, charge, budget and "at most" goes through here, on every page and in every log, so
that one bound has the same digits everywhere. Measurements and estimates are rounded as usual.
"""

import math
from decimal import ROUND_CEILING, Context, Decimal

_NOISE = 1e-9
"""Share by which floating-point sums may miss the number that is meant: .7 stays .700."""


def auc_at_most(auc: float) -> str:
    """Write a bound on an AUC with three digits; what is above .999 is 1.000."""
    if math.isnan(auc):
        return "nan"
    return f"{math.ceil(auc * (1 - _NOISE) * 1000) / 1000:.3f}"


def at_most(value: float) -> str:
    """Write a bound of any size, at least 0, with four significant digits at most."""
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=4, rounding=ROUND_CEILING).create_decimal(Decimal(value * (1 - _NOISE)))
    return f"{float(rounded):.4g}"
