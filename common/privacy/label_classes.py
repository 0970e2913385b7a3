"""The classes of a run's labels, and the choice of a class that attacks treat as the positives."""

from typing import NamedTuple

import torch
from torch import Tensor


class LabelClasses(NamedTuple):
    """Two classes, or more classes with names.

    With two classes, attacks look for the positives: there is one target, class 1, and one pair,
    positives against negatives. With more classes, each is a target in turn, and is measured
    against each other class.
    """

    names: tuple[str, ...] = ()
    """Names of more than two classes, in the order of their indices; empty for two."""

    @property
    def num_classes(self) -> int:
        return len(self.names) or 2

    @property
    def is_multi_class(self) -> bool:
        return self.num_classes > 2

    @property
    def targets(self) -> tuple[int, ...]:
        """Indices of the classes that attacks treat as the positives in turn."""
        return tuple(range(self.num_classes)) if self.is_multi_class else (1,)

    def of_scores(self, num_scores: int) -> tuple[int | None, ...]:
        """Return the class to which each of an attack's scores belongs.

        Args:
            num_scores: 1 for a score for all classes, or the number of targets.

        Returns:
            Class indices; None for a score for more than two classes.
        """
        if num_scores == 1 and self.is_multi_class:
            return (None,)
        return self.targets

    def indices(self, labels: Tensor) -> Tensor:
        """Return a batch's labels as class indices in int64, (batch,), on the labels' device.

        Args:
            labels: in any dtype, (batch,) or (batch, 1).

        Raises:
            ValueError: a label is not the index of a class.
        """
        values = labels.detach().reshape(-1)
        indices = values.long()
        given, found = values.cpu().numpy(), indices.cpu().numpy()
        if not ((given == found) & (found >= 0) & (found < self.num_classes)).all():
            expected = "{0, 1}" if not self.is_multi_class else f"0 .. {self.num_classes - 1}"
            raise ValueError(f"expected labels in {expected}")
        return indices

    @staticmethod
    def is_mixed(indices: Tensor) -> bool:
        """Return whether a batch holds examples of more than one class."""
        found = indices.cpu().numpy()
        return bool((found != found[:1]).any())


TWO_CLASSES = LabelClasses()
"""Negatives, class 0, and positives, class 1."""


def rows_of_class(labels: Tensor, class_index: int) -> Tensor:
    """Return the rows of a class, ascending."""
    return torch.nonzero(labels.detach().reshape(-1) == class_index).reshape(-1)
