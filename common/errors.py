"""The errors that splitveil raises on purpose, and their exit codes.

Messages are for this party's own user and say what was expected and what was received. The *peer*
gets one of the fixed sentences in ``common/wire/status.py``.
"""

import signal
from collections.abc import Sequence


class SplitveilError(Exception):
    """Base of all errors that are raised on purpose."""

    exit_code = 1


class SettingsError(SplitveilError):
    """The settings cannot be used; carries all problems found instead of only the first."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class ContractMismatch(SettingsError):
    """The two parties hold different contracts.

    Args:
        fields: the fields that differ.
        in_words: the differences, with values where they are known.
    """

    def __init__(self, fields: Sequence[str], in_words: str | None = None) -> None:
        self.fields = tuple(fields)
        super().__init__(in_words or f"the parties' contracts differ in: {', '.join(self.fields)}")


class DataError(SplitveilError):
    """A party's own data cannot be used."""

    exit_code = 3


class AlignmentError(SplitveilError):
    """The parties' ids have no intersection to train on."""

    exit_code = 3


class PeerError(SplitveilError):
    """The other party makes it impossible to continue."""

    exit_code = 4


class PeerUnreachable(PeerError):
    """The other party is silent or gone."""


class Busy(PeerUnreachable):
    """A server has as many streams as it serves at a time."""


class OthersAwaited(PeerUnreachable):
    """A passive party's request needs another passive party, which is not ready yet."""


class PeerRenewed(PeerUnreachable):
    """The other party's certificate differs from the one that was checked; check it again."""


class PeerUntrusted(PeerError):
    """One of the parties does not accept the other's certificate or its security mode."""


class OtherModel(PeerError):
    """The two halves of a model are not the result of the same training."""


class TableRefused(PeerError):
    """The feature owner answers for single ids only, and never gives a whole table."""


class PeerLeft(PeerError):
    """The other party announced that it stops."""


class PeerEndedForGood(PeerLeft):
    """The label owner has ended the run for good: the same commands do not resume it."""

    exit_code = 5


class PeerRestarted(PeerError):
    """The other party was restarted: opening the run again resumes it from a checkpoint."""


class StartedOver(PeerError):
    """The run to resume had not answered anything yet, and has started over since."""


class ProtocolError(PeerError):
    """The other party sent something that the protocol does not allow."""


class InvalidMessage(ProtocolError):
    """A message is not what it claims to be: its dtype, shape, length or values are wrong."""


class OutOfStep(ProtocolError):
    """A well-formed message arrived at the wrong time, or for other rows."""


class NotOpen(ProtocolError):
    """A message arrived for a run that this process has not opened with the peer yet."""


class TooLarge(ProtocolError):
    """A message exceeds the limits that the contract sets."""


class StorageError(SplitveilError):
    """A file could not be read or written."""


class OtherAnswer(SplitveilError):
    """A question that was answered before would now get another answer."""


class EndedForGood(SplitveilError):
    """The run has leaked as much as it may: it resumes only if the label owner allows more."""

    exit_code = 5


class BudgetExhausted(EndedForGood):
    """The next answer would exceed what the run may reveal about an example's label."""


class Interrupted(SplitveilError):
    """A signal asked this party to stop."""

    def __init__(self, signal_number: int = signal.SIGINT) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
