"""Records every request of a program: in transcript and metrics, and in the log's last line.

No record has a prediction, and only the transcript may name ids, if the settings say so.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from splitveil.active_party.http.errors import RequestError
from splitveil.active_party.http.online_status import IdOutcome, OnlineStatus
from splitveil.common.party.transcript import Transcript
from splitveil.common.party.transcript_lines import Answered


@dataclass
class Call:
    program: str
    ids: Sequence[str] = ()
    found: int = 0
    status: int = 200
    used_fallback: bool = False
    """Whether the joint model was not asked, or has not answered."""
    timed_out: bool = False
    """Whether there was no answer within ``serving.timeout_s``."""
    began: float = field(default_factory=time.monotonic)
    outcomes: Counter[IdOutcome] = field(default_factory=Counter)


class CallLog:
    """Records requests. Several threads may use it."""

    def __init__(
        self,
        status: OnlineStatus,
        transcript: Transcript | None = None,
        *,
        records_ids: bool = False,
    ) -> None:
        self.answered: Counter[int] = Counter()
        """Number of requests by status."""
        self._status = status
        self._transcript = transcript
        self._records_ids = records_ids

    @contextmanager
    def noted(self, program: str) -> Iterator[Call]:
        """Record a request once it is answered or refused, whatever its outcome."""
        call = Call(program)
        try:
            yield call
        except RequestError as error:
            call.status = error.status
            raise
        except BaseException:
            call.status = 500
            raise
        finally:
            self._record(call, time.monotonic() - call.began)

    @contextmanager
    def turning_away(self) -> Iterator[None]:
        """Only count a request that is refused within the block, so that nobody fills the disk."""
        try:
            yield
        except RequestError as error:
            self.answered[error.status] += 1
            self._status.note_request(error.status, 0.0)
            raise

    def _record(self, call: Call, seconds: float) -> None:
        self.answered[call.status] += 1
        self._status.note_request(call.status, seconds, used_fallback=call.used_fallback)
        self._status.note_ids(call.outcomes)
        if call.timed_out:
            self._status.note_timeout()
        if self._transcript is not None:
            self._transcript.note_answered(
                Answered(
                    program=call.program,
                    num_ids=len(call.ids),
                    found=call.found,
                    status=call.status,
                    milliseconds=round(1000 * seconds, 3),
                    ids=tuple(call.ids) if self._records_ids else None,
                )
            )
