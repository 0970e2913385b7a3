"""``splitveil active serve``: answers other programs' requests for predictions, until stopped."""

import argparse
import logging
import time
from contextlib import ExitStack

from splitveil.active_party.predict.predictor import log_security, open_predictor
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.party import command_line
from splitveil.common.party.endpoint import endpoint_of
from splitveil.common.party.interruption import Interruption
from splitveil.common.record.run_folder import claimed, inner_folder
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.imports import extra_missing
from splitveil.common.wire.noted_calls import AllNotes

try:
    from splitveil.active_party.http.online_status import OnlineStatus
    from splitveil.active_party.http.opening import impatient, open_desk, open_doors, serving
except ImportError as error:
    raise extra_missing("splitveil active serve", "serve") from error

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_REFRESH_EVERY_S = 5.0


def serve(parsed: argparse.Namespace) -> None:
    """Serve until a signal asks to stop."""
    interruption = Interruption()
    interruption.install()
    settings = command_line.load_settings(ActiveSettings, parsed, "active")
    doors = open_doors(settings)
    log_security(settings)
    device = command_line.prepare(settings)
    folder = inner_folder(settings.run_folder(ACTIVE), "serve")
    status = OnlineStatus(settings.contract)
    with ExitStack() as resources:
        resources.enter_context(endpoint_of(status, settings.status))
        resources.enter_context(claimed(folder, "another process serves this run"))
        transcript = None
        if settings.transcript:
            transcript = resources.enter_context(Transcript(folder, ACTIVE))
        notes = status if transcript is None else AllNotes(transcript, status)
        predictor = resources.enter_context(
            open_predictor(impatient(settings), device, None, parsed.data, notes)
        )
        desk = open_desk(settings, predictor, resources, status, transcript)
        with serving(settings, desk, doors):
            last_refresh = time.monotonic()
            while interruption() is None:
                time.sleep(_LOOK_EVERY_S)
                if transcript is not None:
                    transcript.check()
                if doors.tls is not None and time.monotonic() - last_refresh > _REFRESH_EVERY_S:
                    doors.tls.refresh()
                    last_refresh = time.monotonic()
            status.close()
            logger.info("stopping: requests under way are answered")
    answered = desk.log.answered
    by_status = ", ".join(f"{number} x {code}" for code, number in sorted(answered.items()))
    logger.info("answered %d requests: %s", answered.total(), by_status or "none")
