"""Every error that splitveil raises on purpose, each with the exit code it ends a process with.

    SplitveilError                 1
    |- SettingsError               2   the settings, or the two parties' contracts
    |  `- ContractMismatch
    |- DataError                   3   a party's own file
    |- AlignmentError              3   the intersection of the two parties' ids
    |- PeerError                   4   the other party
    |  |- PeerUnreachable              it is silent or gone
    |  |  |- OthersAwaited             it waits for another passive party
    |  |  `- PeerRenewed               it shows another certificate than before
    |  |- PeerUntrusted                one of the two does not believe who the other is
    |  |- PeerLeft                     it said that it stops
    |  |  `- PeerEndedForGood      5   for good: to start again is no use
    |  |- PeerRestarted                it was restarted, and the run has to be opened again
    |  |- NothingBegun                 its run began anew before anything was answered
    |  `- ProtocolError                it broke a rule of the protocol
    |     |- InvalidMessage            a message that cannot be what it claims to be
    |     |- OutOfStep                 a well-formed message at the wrong time
    |     |- NotOpen                   a message for a run that has to be opened first
    |     |- TooLarge                  a message beyond the agreed limits
    |     `- AuditRefused              scores that are not measured in this run
    |- StorageError                1   a checkpoint or a log could not be written
    |- EndedForGood                5   this party has ended the run for good
    |  |- BudgetExhausted              the next answer would tell more than the run may
    |  `- LeakGateClosed               attacks measured more than the run may tell
    `- Interrupted            130, 143 a person or a supervisor stopped this party

Messages are for the own user: what was expected and what came. What the *peer* is told of an error
stands in ``common/wire/status.py``, and is a fixed sentence.
"""

import signal
from collections.abc import Sequence


class SplitveilError(Exception):
    """Base of all errors that are raised on purpose."""

    exit_code = 1


class SettingsError(SplitveilError):
    """The settings cannot be used; carries every problem found, not only the first."""

    exit_code = 2

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class ContractMismatch(SettingsError):
    """The two parties hold different contracts."""

    def __init__(self, fields: Sequence[str]) -> None:
        self.fields = tuple(fields)
        super().__init__(f"the parties' contracts differ in: {', '.join(self.fields)}")


class DataError(SplitveilError):
    """A party's own data cannot be used."""

    exit_code = 3


class AlignmentError(SplitveilError):
    """The parties' ids do not lead to an intersection that both can train on."""

    exit_code = 3


class PeerError(SplitveilError):
    """The other party makes it impossible to go on."""

    exit_code = 4


class PeerUnreachable(PeerError):
    """The other party is silent or gone."""


class OthersAwaited(PeerUnreachable):
    """What one passive party asks for needs another one, which is not there yet."""


class PeerRenewed(PeerUnreachable):
    """The other party shows another certificate than the one that was judged; worth a new look."""


class PeerUntrusted(PeerError):
    """One of the parties does not accept the other's certificate, or its protection."""


class PeerLeft(PeerError):
    """The other party said that it stops."""


class PeerEndedForGood(PeerLeft):
    """The label owner has ended the run for good: the same commands do not go on with it."""

    exit_code = 5


class PeerRestarted(PeerError):
    """The other party was restarted: the run goes on from a checkpoint once it is opened again."""


class NothingBegun(PeerError):
    """A run to go on with, of which nothing was answered yet, and which began anew since."""


class ProtocolError(PeerError):
    """The other party sent what the protocol does not allow."""


class InvalidMessage(ProtocolError):
    """A message is not what it claims to be: dtype, shape, length, values."""


class OutOfStep(ProtocolError):
    """A well-formed message came at the wrong time, or for other rows."""


class NotOpen(ProtocolError):
    """A message came for a run that this process has not opened with the peer yet."""


class TooLarge(ProtocolError):
    """A message is beyond the limits that the contract sets."""


class AuditRefused(ProtocolError):
    """The label owner measures no scores of its peer in this run."""


class StorageError(SplitveilError):
    """Something could not be written to disk."""


class OtherAnswer(SplitveilError):
    """A question that was answered before would get another answer now."""


class EndedForGood(SplitveilError):
    """The run has told what it may: it goes on only where the label owner allows more."""

    exit_code = 5


class BudgetExhausted(EndedForGood):
    """The next answer would take an example past what the run may tell of its label."""


class LeakGateClosed(EndedForGood):
    """The leak monitor measured more than the label owner accepts."""


class Interrupted(SplitveilError):
    """A signal asked this party to stop."""

    def __init__(self, signal_number: int = signal.SIGINT) -> None:
        self.exit_code = 128 + signal_number
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
