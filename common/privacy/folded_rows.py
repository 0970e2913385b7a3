"""Rows in folds, as linear models see them: sums of products, taken once for all models.

A model of all folds but one needs the sums over all rows less those over the fold. So the sums over
each fold are taken once, side by side on the cores that a party may use once it has trained.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from splitveil.common.privacy.row_functions import Functions, RowFunctions
from splitveil.common.privacy.side_by_side import each

Weights = npt.NDArray[np.float32]
"""Of the functions, for the model of each fold's others, (folds, functions)."""

_CONSTANT, _LINE, _SINGLE, _SEVERAL = range(4)
_OF_CONSTANT = 1e-3
"""Penalty of the constant, so that there is a solution without any row."""


class Ridge(NamedTuple):
    """Penalties of squared weights, by kind of function."""

    line: float
    single: float
    """Of functions of one feature that are no lines."""
    several: float
    """Of functions of several features."""


class FoldedRows:
    """The functions of some rows, and their sums over each fold.

    Args:
        functions: of the rows by fold.
        sizes: number of each fold's rows.
        before: further functions of the same rows, which come first.
    """

    def __init__(
        self, functions: RowFunctions, sizes: Sequence[int], before: "FoldedRows | None" = None
    ) -> None:
        ends = np.cumsum(sizes).tolist()
        self.sizes = sizes
        self.parts = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        """The rows of each fold."""
        values, kinds = functions.values, _kinds(functions)
        known = 0
        if before is not None:
            known = len(before.values)
            values = np.concatenate([before.values, values[1:]])
            kinds = np.concatenate([before.kinds, kinds[1:]])
        self.values: Functions = values
        """(functions, rows)."""
        self.kinds: npt.NDArray[np.int64] = kinds
        """Of the functions, (functions,)."""
        self.grams: Functions = np.empty((len(sizes), len(values), len(values)), np.float32)
        """Products of all pairs of functions over each fold, (folds, functions, functions)."""
        if before is not None:
            self.grams[:, :known, :known] = before.grams
        self.grams[:, known:] = self.sums(lambda part: values[known:, part] @ values[:, part].T)
        self.grams[:, :known, known:] = self.grams[:, known:, :known].swapaxes(1, 2)

    def weighted_grams(self, weights: npt.NDArray[np.float32]) -> Functions:
        """Return the sums of weighted rows.

        Args:
            weights: of the rows, (rows,).
        """

        def of_fold(part: slice) -> Functions:
            values = self.values[:, part]
            weighted: Functions = values * weights[part]
            return np.asarray(weighted @ values.T, dtype=np.float32)

        return self.sums(of_fold)

    def grams_of(self, chosen: npt.NDArray[np.bool_]) -> Functions:
        """Return the sums of some rows.

        Args:
            chosen: of the rows, (rows,).
        """
        if chosen.all():
            return self.grams

        def of_fold(part: slice) -> Functions:
            values = self.values[:, part][:, ~chosen[part]]
            found: Functions = values @ values.T
            return found

        return self.grams - self.sums(of_fold)

    def factors(self, grams: Functions, ridge: Ridge) -> list[Any]:
        """Return what solves the equations of each fold's others.

        Args:
            grams: sums over each fold.
            ridge: penalties of the squared weights, but for the constant's.
        """
        from scipy.linalg import cho_factor  # noqa: PLC0415

        total = grams.sum(axis=0) + np.diag(self.penalty(ridge))

        def of_fold(own: Functions) -> Any:
            return cho_factor(total - own, overwrite_a=True, check_finite=False)

        return each(of_fold, grams)

    def penalty(self, ridge: Ridge) -> npt.NDArray[np.float32]:
        """Return the penalty of each function's squared weight, (functions,)."""
        found: npt.NDArray[np.float32] = np.array([_OF_CONSTANT, *ridge], np.float32)[self.kinds]
        return found

    def moments(self, targets: npt.NDArray[np.float32]) -> Weights:
        """Return the products of functions and targets, summed over each fold's others.

        Args:
            targets: of the rows, (rows,).
        """
        own = self.sums(lambda part: self.values[:, part] @ targets[part])
        found: Weights = own.sum(axis=0) - own
        return found

    def asked(self, weights: Weights) -> npt.NDArray[np.float32]:
        """Return what each fold's model says of the fold's rows.

        Args:
            weights: of one model for each fold, or several, (..., folds, functions).

        Returns:
            (..., rows).
        """
        said = each(
            lambda fold: weights[..., fold, :] @ self.values[:, self.parts[fold]],
            range(len(self.parts)),
        )
        return np.concatenate(said, axis=-1)

    def sums(self, of_fold: Callable[[slice], Functions]) -> Functions:
        """Return what a function makes of the rows of each fold, computed side by side."""
        return np.stack(each(of_fold, self.parts))


def _kinds(functions: RowFunctions) -> npt.NDArray[np.int64]:
    lines, single = functions.num_lines, functions.num_single
    several = len(functions.values) - 1 - lines - single
    return np.repeat([_CONSTANT, _LINE, _SINGLE, _SEVERAL], [1, lines, single, several])


def solved(factors: Iterable[Any], sums: Weights) -> Weights:
    """Return the solution of each fold's equations, (folds, functions)."""
    from scipy.linalg import cho_solve  # noqa: PLC0415

    pairs = zip(factors, sums, strict=True)
    return np.stack([cho_solve(one, of_fold, check_finite=False) for one, of_fold in pairs])
