"""Keeps what predicts the training rows' labels where labels are numbers.

It is the same as for classes (`RowCovariates`), with predictions as they are in place of logits,
and the visits of an epoch count only while the model explains training labels no better than
held-out ones, by ``MAX_GAP`` of R2.
"""

import math

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.watch.row_covariates import RowCovariates
from splitveil.common.privacy.adjusted_r2 import NumberCovariates
from splitveil.common.run.sample_order import Positions


class NumberRowCovariates(RowCovariates):
    """What is known about some training rows whose labels are numbers.

    Args:
        training: positions of the training rows, ascending.
        num_examples: number of aligned examples.
    """

    _LABEL_TYPE = torch.float32

    def __init__(self, training: Positions, num_examples: int) -> None:
        super().__init__(training, num_examples, num_classes=2)

    def numbers(self) -> NumberCovariates | None:
        """Return what is known about the rows that were visited; None before the first one."""
        known = self._visited()
        if known is None:
            return None
        features = np.column_stack([known.activations, known.outlooks, known.own])
        return NumberCovariates(known.positions, features, known.labels.astype(np.float64))

    def _outlooks(self, probabilities: Tensor) -> Tensor:
        return probabilities

    def _told_in_training(self, outlooks: Tensor, labels: Tensor) -> float:
        """Return the R2 of predictions; NaN if all labels are the same."""
        spread = float((labels.double() - labels.double().mean()).square().sum())
        missed = float((labels.double() - outlooks[:, 0].double()).square().sum())
        return 1 - missed / spread if spread > 0 else math.nan
