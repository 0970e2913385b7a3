"""``splitveil serve passive.yaml``: answers questions for predictions, until stopped."""

import argparse
import logging
import time
from contextlib import ExitStack
from pathlib import Path

from splitveil.common.alignment.exchange import records_of
from splitveil.common.party import command_line
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.endpoint import endpoint_of
from splitveil.common.party.interruption import Interruption
from splitveil.common.record.run_folder import claimed, inner_folder
from splitveil.common.record.transcript import Transcript
from splitveil.common.wire.endpoint import log_security
from splitveil.common.wire.recorded_calls import AllNotes, Notes
from splitveil.passive_party.predict.served_model import ServedModel
from splitveil.passive_party.predict.service import (
    InferenceServer,
    InferenceService,
    InferenceStatus,
    Throttle,
)
from splitveil.passive_party.settings import PassiveSettings

logger = logging.getLogger(__name__)

GRACE_S = 5.0
_LOOK_EVERY_S = 0.2


def serve(parsed: argparse.Namespace) -> None:
    interruption = Interruption()
    interruption.install()
    settings: PassiveSettings = parsed.loaded
    address = settings.answers.listen
    credentials = credential_files(settings, settings.party)
    log_security(credentials, address, "answers.listen")
    status = InferenceStatus(settings.party, settings.contract)
    folder = inner_folder(settings.run_folder(settings.folder_name()), "serve")
    with ExitStack() as resources:
        resources.enter_context(endpoint_of(status, settings.status))
        resources.enter_context(claimed(folder, "another process serves this run"))
        service = _service(settings, status, parsed.data)
        notes: Notes = status
        if settings.transcript:
            transcript = resources.enter_context(Transcript(folder, settings.party))
            notes = AllNotes(transcript, status)
        server = InferenceServer(service, settings.contract, address, credentials, notes)
        logger.info("waiting for the active party at %s", address)
        while interruption() is None:
            time.sleep(_LOOK_EVERY_S)
        logger.info("stopping: requests under way are answered")
        server.stop(GRACE_S)
    counted = service.answered
    logger.info(
        "answered %s requests about %s ids, of which %s have rows here",
        *(f"{counted[name]:,}" for name in ("requests", "ids", "known")),
    )


def _service(
    settings: PassiveSettings, status: InferenceStatus, table: Path | None
) -> InferenceService:
    model = ServedModel.load(settings, command_line.prepare(settings), table)
    logger.info(
        "the model of %s answers for %s rows of %s",
        model.identity,
        f"{len(model.rows):,}",
        model.rows.source,
    )
    is_one_sided = settings.contract.is_one_sided
    _, tried = records_of(settings, settings.run_folder(settings.folder_name()))
    return InferenceService(
        model,
        settings.party,
        settings.contract,
        Throttle(settings.answers.ids_per_second),
        gives_table=settings.answers.whole_table or is_one_sided,
        tried=tried if is_one_sided else None,
        status=status,
    )
