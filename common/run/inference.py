"""The messages of joint inference, in the project's own words: no protobuf, no gRPC, no disk."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class ModelIdentity(NamedTuple):
    """The training of which a party's half of the model is the result."""

    run_id: str
    batch_number: int  # number of batches of the run's course that the weights have seen

    def __str__(self) -> str:
        return f"run {self.run_id} after {self.batch_number:,} batches"


class Embedded(NamedTuple):
    """A passive party's answer about some ids."""

    known: NDArray[np.bool_]  # whether it answers for an id, (ids,)
    values: Tensor
    """The activations of the known ids alone, in their order, (known ids, *cut_shape)."""
