"""What programs ask and what they are told, in the project's own words."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from splitveil.common.data.features import Features


class AnsweredBy(Enum):
    """The model that a prediction is from."""

    NONE = None
    """No model: the id is not known."""
    JOINT = "joint"
    """Both halves of the trained model."""
    FALLBACK = "fallback"
    """The model of the active party's own features alone."""


@dataclass(frozen=True, eq=False)
class Question:
    """Ids for which a program wants predictions."""

    ids: Sequence[str]
    """In canonical form."""

    own: Features | None = None
    """The active party's own features of the ids, in their order, if the program gave them; None if
    they are those in the party's table."""


class Answer(NamedTuple):
    """What a program is told."""

    predicted: NDArray[np.float32]
    """Probabilities of label 1, (ids,), or of each class, (ids, classes), or numbers in the label's
    unit, (ids,); NaN for an id that is not known."""

    answered_by: tuple[AnsweredBy, ...]
    """For each id."""

    why_fallback: str | None = None
    """Why the joint model was not asked at all; None if it was."""

    @property
    def is_found(self) -> NDArray[np.bool_]:
        """Whether there is a prediction, (ids,)."""
        return np.array([by is not AnsweredBy.NONE for by in self.answered_by], np.bool_)
