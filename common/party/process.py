"""Prepares both parties' ``run`` before they read any data: device, signals, and other ranks."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from splitveil.common.models.data_parallel import Beginning, Learner, work
from splitveil.common.models.device import device_in_words
from splitveil.common.models.ranks import Ranks
from splitveil.common.party import command_line
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_settings import PartySettingsT
from splitveil.common.party.workers import Rank, facts_of, joined


class Process(NamedTuple):
    """The process that is a party, with the ranks that compute for it, if there are any."""

    device: torch.device
    interruption: Interruption
    ranks: Ranks | None
    restarts: int  # how often all ranks were started again

    @property
    def device_in_words(self) -> str:
        return device_in_words(self.device)


def run_as_party(
    settings: PartySettingsT,
    facts: tuple[str, str],
    learner_of_rank: Callable[[PartySettingsT, torch.device, Beginning], Learner],
    take_part: Callable[[PartySettingsT, Process], None],
) -> None:
    """Take part in the run; a rank above 0 computes with rank 0 instead.

    Facts are names of this party's settings that all ranks must have in common.
    """
    rank = Rank.of_environment()
    device = command_line.prepare(settings, rank)
    interruption = Interruption()
    if not rank.number:
        interruption.install()
    with joined(rank, device, facts_of(settings, device, *facts), interruption) as ranks:
        if ranks is not None and rank.number:
            work(ranks, lambda beginning: learner_of_rank(settings, device, beginning))
        else:
            take_part(settings, Process(device, interruption, ranks, rank.restarts))
