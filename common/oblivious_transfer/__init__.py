"""Sums over rows that one party chooses and of values that the other has, by oblivious transfer."""

from splitveil.common.oblivious_transfer.extension import Receiver, Sender

__all__ = ["Receiver", "Sender"]
