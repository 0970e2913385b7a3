"""Signals about labels besides the answers, and the peers for whom bounds hold despite them.

The charges of a defense are about its answers. Other settings let true labels reach the peer in
another way: by the end of a run, by the replies to requests, or by the top model's first weights.
No charge describes that, so no bound for anybody may be stated with it.

A bound for weaker adversary classes stays: these peers look only at answers, and their bound is
about a label beyond what the model predicts of it.
"""

from typing import NamedTuple

from splitveil.common.privacy.charge import Adversary


class LabelUses(NamedTuple):
    """The ways that labels reach the peer besides the answers."""

    has_early_stopping: bool = False  # whether the validation labels decide when the run ends
    begins_with_labels: bool = False  # true labels have entered the first weights
    begins_with_releases: bool = False
    """True if the first weights depend on an earlier run's noisy labels or sums, on no other
    labels, and the ledger does not count that run."""


class LabelSignal(NamedTuple):
    """One way that labels reach the peer besides the answers, and a sentence about it."""

    setting: str
    why: str


def label_signals(uses: LabelUses) -> tuple[LabelSignal, ...]:
    """Return what the peer may learn about labels besides the answers."""
    signals = {
        LabelSignal(
            "initial_weights",
            "The model of initial_weights has learned from true labels, which show in its "
            "predictions and so in the answers.",
        ): uses.begins_with_labels,
        LabelSignal(
            "initial_weights",
            "The model of initial_weights has learned from what an earlier run released, which "
            "shows in the answers and is not counted: name that run in earlier_ledgers.",
        ): uses.begins_with_releases,
        LabelSignal(
            "early_stopping_epochs",
            "With early_stopping_epochs the validation labels decide when the run ends, which no "
            "charge counts: a peer that ranks one row first and then last reads its label from the "
            "end.",
        ): uses.has_early_stopping,
    }
    return tuple(signal for signal, is_given in signals.items() if is_given)


def widest_adversary(signals: tuple[LabelSignal, ...]) -> Adversary:
    """Return the strongest adversary class for whom bounds on training labels can hold."""
    return Adversary.HONEST_BUT_CURIOUS if signals else Adversary.ANYBODY


def objection_to(peers: Adversary, signals: tuple[LabelSignal, ...]) -> str | None:
    """Say which setting voids a bound for some peers; None if there is none."""
    widest = widest_adversary(signals)
    if widest.includes(peers):
        return None
    return (
        f"{signals[0].setting} leaves no bound for {peers.in_words}. {signals[0].why} Expected a "
        f"run without it, or adversary: {widest} in run_budget"
    )
