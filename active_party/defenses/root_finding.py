"""One-dimensional root finding."""

from collections.abc import Callable


def find_root(
    function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-15
) -> float:
    """Find the zero of a function that is negative at ``low`` and positive at ``high``."""
    # Imported here: it takes .15 s, which a party that solves for nothing does not pay.
    from scipy import optimize  # noqa: PLC0415

    if function(high) <= 0:  # rounding moved the end of the interval past the zero
        return high
    if function(low) >= 0:
        return low
    return float(optimize.brentq(function, low, high, xtol=1e-300, rtol=tolerance, maxiter=1000))
