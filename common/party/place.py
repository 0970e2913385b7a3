"""Which of a party's processes this one is, as ``torchrun`` says it."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from splitveil.common.errors import SettingsError


class Place(NamedTuple):
    """Which of a party's processes this one is."""

    rank: int = 0
    size: int = 1  # number of processes, on all machines
    local_rank: int = 0
    local_size: int = 1  # number of processes on this machine
    restarts: int = 0  # how often all of them were started again

    @classmethod
    def of_environment(cls, variables: Mapping[str, str] = os.environ) -> "Place":
        """Return what ``torchrun`` says; the only process without it. Raises SettingsError."""
        if "RANK" not in variables or "MASTER_ADDR" not in variables:
            return cls()
        names = (
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "TORCHELASTIC_RESTART_COUNT",
        )
        defaults = cls()
        found = []
        for name, default in zip(names, defaults, strict=True):
            text = variables.get(name, str(default))
            if not text.isdecimal():
                raise SettingsError(f"{name}: expected a whole number, as torchrun sets it")
            found.append(int(text))
        return cls(*found)


ONLY = Place()  # a process that has no others beside it
