"""One-dimensional root finding."""

from collections.abc import Callable


def find_root(
    function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-15
) -> float:
    """Find the zero of a function that is negative at ``low`` and positive at ``high``.

    Chandrupatla's method (1997): inverse quadratic interpolation where it is safe, else bisection.
    """
    new, old = high, low
    f_new, f_old = function(new), function(old)
    if f_new <= 0:  # rounding moved the end of the interval past the zero
        return high
    if f_old >= 0:
        return low
    third, f_third = old, f_old
    share = 0.5
    while True:
        point = new + share * (old - new)
        f_point = function(point)
        if (f_point > 0) == (f_new > 0):
            third, f_third = new, f_new
        else:
            third, f_third, old, f_old = old, f_old, new, f_new
        new, f_new = point, f_point
        width = abs(old - new)
        margin = tolerance * abs(new) + 1e-300
        if f_new == 0 or width <= 2 * margin:
            return new if abs(f_new) < abs(f_old) else old
        xi = (new - old) / (third - old)
        phi = (f_new - f_old) / (f_third - f_old)
        if phi * phi < xi and (1 - phi) * (1 - phi) < 1 - xi:
            share = f_new / (f_old - f_new) * f_third / (f_old - f_third)
            share += (
                (third - new) / (old - new) * f_new / (f_third - f_new) * f_old / (f_third - f_old)
            )
        else:
            share = 0.5
        edge = margin / width
        share = min(max(share, edge), 1 - edge)
