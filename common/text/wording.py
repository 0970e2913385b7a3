"""Formats names, values, bounds and the version of a run for people.

Every bound, charge, budget and "at most" on any page and in any log is formatted here, so that a
bound has the same digits everywhere: upper ones are rounded up, so that none is printed below its
value, lower ones down. Measurements and estimates are rounded as usual.
"""

import argparse
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, Context, Decimal
from importlib.metadata import version


def in_words(value: object) -> str:
    """Format a value of a summary with four digits and without Python's own notation."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return in_short(value)
        case _:
            return str(value)


def setting_in_words(value: object) -> str:
    """Format a setting like ``in_words``, but with all of its parts and more digits."""
    match value:
        case None:
            return "none"
        case float():
            return in_short(value, 6)
        case Mapping():
            parts = (f"{name} {setting_in_words(part)}" for name, part in value.items())
            return ", ".join(parts) or "none"
        case list() | tuple():
            return ", ".join(map(setting_in_words, value)) or "none"
        case _:
            return in_words(value) or "(empty)"


def label(name: str) -> str:
    """Return the name of a figure without its underscores: ``test AUC``, ``steps/s``."""
    words = [word.upper() if word in {"auc", "rmse"} else word for word in name.split("_")]
    return " ".join(words).replace(" per s", "/s")


def slug(text: str, keep: str = "_.-") -> str:
    """Replace all characters except ASCII letters, digits and those in ``keep`` by hyphens."""
    return re.sub(rf"[^A-Za-z0-9{re.escape(keep)}]+", "-", text)


def in_short(value: float, digits: int = 4) -> str:
    """Format a number to some significant digits, with a short exponent such as ``1.235e-5``."""
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def bytes_in_words(size: int) -> str:
    """Format a number of bytes with three digits: ``512 bytes``, ``1.21 MiB``."""
    if size < 1000:
        return f"{size} byte{'s' * (size != 1)}"
    power = next((power for power in (1, 2) if size < 1000 * 1024**power), 3)
    value, unit = size / 1024**power, ("KiB", "MiB", "GiB")[power - 1]
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def seconds_in_words(seconds: float) -> str:
    """Format a duration: ``0.42 s``, ``37 s``, ``5 min 12 s``, ``3 h 4 min``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def suggest(name: str, known: Iterable[str]) -> str:
    """Return a hint to the most similar known name, for messages; empty if none is similar."""
    by_lower_case = {other.lower(): other for other in known}
    close = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f"; did you mean {by_lower_case[close[0]]!r}?" if close else ""


VERSION = version("splitveil")  # for ``--version``, summaries, reports and transcripts


def add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", action="version", version=f"%(prog)s {VERSION}")


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
