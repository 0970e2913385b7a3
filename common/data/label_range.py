"""Labels that are numbers within stated bounds, and the way between them and shares of the range.

Inside a run such a label is its share of the range, (label - low) / (high - low), within 0 and 1.
Bounds are what makes a guarantee possible: no label, whatever it is, can move anything by more than
the range. They belong to the label owner, like the labels, and no other party learns them.
"""

from typing import Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from splitveil.common.settings import Section

ONE_NUMBER = 1
"""The "number of classes" of labels that are numbers: one value is predicted for each row."""

AnyFloat = TypeVar("AnyFloat", np.float32, np.float64)


class LabelRange(Section):
    """The bounds of labels that are numbers, such as an amount or an age."""

    low: float = Field(allow_inf_nan=False)
    """The least that a label can be, in the label's unit. Choose it by what the label means: a
    bound read off the labels tells the smallest of them to whoever learns the bound."""

    high: float = Field(allow_inf_nan=False)
    """The most that a label can be, above ``low``."""

    outside: Literal["refused", "clipped"] = "refused"
    """Treatment of a label outside the bounds: the table is refused, or the label counts as the
    nearer bound, and the log says for how many rows."""

    @model_validator(mode="after")
    def _holds_more_than_one_number(self) -> Self:
        if not self.low < self.high:
            raise ValueError(f"expected low below high, got {self.low:g} and {self.high:g}")
        if not np.isfinite(self.width):
            raise ValueError("expected a range whose width is a finite number")
        return self

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def in_words(self) -> str:
        return f"{self.low:g} to {self.high:g}"

    def shares(self, values: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return labels (no NaN) as shares of the range, clipped to 0 and 1."""
        shares = (values - self.low) / self.width
        return np.clip(shares, 0.0, 1.0).astype(np.float32)

    def values(self, shares: NDArray[AnyFloat]) -> NDArray[AnyFloat]:
        """Return shares of the range, of any shape, in the label's unit and the same precision.

        NaN stays NaN.
        """
        found = self.low + shares.astype(np.float64) * self.width
        return found.astype(shares.dtype)
