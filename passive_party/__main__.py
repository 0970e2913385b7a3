"""The ``passive-party`` command."""

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import numpy as np

from splitveil.common.alignment import engine_of, records_of
from splitveil.common.errors import (
    ContractMismatch,
    PeerEndedForGood,
    PeerError,
    PeerUnreachable,
    SettingsError,
)
from splitveil.common.models.factory import Trial, build_bottom_model, lone_row_in_words
from splitveil.common.party import command_line
from splitveil.common.party.credentials import CredentialFiles, credential_files
from splitveil.common.party.ending import end_program, exit_code_of
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.json_output import print_json
from splitveil.common.party.party_data import PartyData, open_earlier_model
from splitveil.common.party.place import Place
from splitveil.common.party.transcript import Transcript
from splitveil.common.party.workers import Workers, act, check_model, joined
from splitveil.common.privacy.custom_attacks import try_custom_attacks
from splitveil.common.record.run_record import write_summary
from splitveil.common.record.summary import Summary, provenance_of_process
from splitveil.common.record.summary_tables import print_summary
from splitveil.common.status.endpoint import check_free, serving_status, status_checks
from splitveil.common.status.run_status import RunStatus
from splitveil.common.storage.ended_run import end_of, mark_as_ended
from splitveil.common.storage.model_files import save_model
from splitveil.common.storage.run_folder import open_run_folder
from splitveil.common.storage.run_store import RunStore
from splitveil.common.storage.trained_model import identity_metadata
from splitveil.common.text.log_lines import configure_logging
from splitveil.common.text.version import VERSION
from splitveil.common.wire.connection import PeerConnection
from splitveil.common.wire.endpoint import check_security
from splitveil.common.wire.noted_calls import AllNotes, Notes
from splitveil.passive_party.align_command import align
from splitveil.passive_party.assembly import TrainerBuilder, http_proxy
from splitveil.passive_party.command import parser
from splitveil.passive_party.grpc_peer import GrpcPeer
from splitveil.passive_party.inference.command import serve
from splitveil.passive_party.opening import Aligner, Participant
from splitveil.passive_party.probing import connection_checks
from splitveil.passive_party.recorder import PassiveRecorder
from splitveil.passive_party.report import write_passive_report
from splitveil.passive_party.report.at_end import try_to_measure, try_to_report
from splitveil.passive_party.run import PassiveRun
from splitveil.passive_party.settings import PassiveSettings
from splitveil.passive_party.status_observer import StatusObserver, WatchedCalls
from splitveil.passive_party.workers import work_for

logger = logging.getLogger("splitveil.passive_party")

BACK_WITHIN_S = 15.0
"""Time in which the active party of a run that it has ended for good has to serve again."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its code."""
    exit_code = perform(parser().parse_args(arguments))
    end_program(exit_code, is_program=arguments is None)


def perform(parsed: argparse.Namespace) -> int:
    """Do what parsed arguments say, and return the exit code."""
    configure_logging("passive", parsed.verbose - parsed.quiet)
    actions = {
        "align": align,
        "run": _run,
        "check": _check,
        "report": _report,
        "serve": serve,
        "verify-transcript": command_line.verify_transcript,
    }
    return exit_code_of(partial(act, parsed, actions[parsed.command]))


def _run(parsed: argparse.Namespace) -> None:
    settings = command_line.load_settings(PassiveSettings, parsed, "passive")
    place = Place.of_environment()
    if place.size > 1:
        check_model(settings.bottom_model, "bottom_model")
    if place.rank:
        work_for(settings, place)
        return
    interruption = Interruption()
    interruption.install()
    with joined(place, interruption) as workers:
        credentials = credential_files(settings, settings.party)
        _check_files_and_address(settings, credentials)
        status = RunStatus(settings.party, settings.contract)
        with serving_status(status, settings.status, interruption):
            _train(parsed, settings, credentials, interruption, status, workers)


def _train(
    parsed: argparse.Namespace,
    settings: PassiveSettings,
    credentials: CredentialFiles | None,
    interruption: Interruption,
    status: RunStatus,
    workers: Workers,
) -> None:
    device = command_line.prepare(settings, workers.place)
    data = PartyData.of(settings)
    logger.info("%d rows read from %s", len(data.ids), data.table.source)
    labels = _evaluation_labels(settings)
    interruption.check()
    folder = open_run_folder(
        settings.runs_dir,
        settings.contract.run_name,
        settings.folder_name(),
        lambda folder: command_line.takes_up(
            settings, fresh=parsed.fresh and not workers.place.restarts, folder=folder
        ),
    )
    if _was_ended(settings, folder, interruption):
        return
    command_line.save_resolved(settings, folder)
    aligner = _aligner(settings, data, folder, fresh=parsed.fresh)
    build_trainer = TrainerBuilder(settings, data, device, workers.line)
    with ExitStack() as resources:
        wanted = Transcript(folder, settings.party) if settings.transcript else nullcontext()
        transcript = resources.enter_context(wanted)
        recorder = resources.enter_context(PassiveRecorder(settings, folder, data.ids, labels))
        keep = settings.contract.checkpoints.keep
        store = resources.enter_context(RunStore(folder, keep, in_background=True))
        run = PassiveRun(
            aligner,
            build_trainer,
            StatusObserver(recorder, status),
            store,
            recorder if settings.audits else None,
            interruption,
            status.phases,
        )
        stopped: PeerEndedForGood | None = None
        try:
            notes = status if transcript is None else AllNotes(transcript, status)
            connection = _connection(settings, credentials, notes)
            watch = WatchedCalls(status)
            with GrpcPeer(
                connection, settings.reconnect, interruption, settings.party, watch
            ) as peer:
                _begin_to_wait(status)
                run.run(peer)
        except PeerEndedForGood as error:
            stopped = error  # it ends with a summary, like any other run
        except (PeerError, ContractMismatch) as error:
            if end_of(folder) is None:
                raise
            logger.warning("the active party does not resume this run: %s", error)
        finally:
            aligner.engine.close()
            # A run that has ended for good and is not resumed keeps the model that it ended with.
            if run.trainer is not None and end_of(folder) is None:
                identity = identity_metadata(run.model_identity, settings.contract)
                saved = save_model(folder, run.trainer.model, build_trainer.encoder, identity)
                logger.info("model saved in %s", saved)
    if end_of(folder) is not None:
        logger.warning(_ENDED)
        return
    if run.trainer is not None and build_trainer.encoder is not None:
        of_report = settings.report
        try_to_measure(of_report, folder, run.trainer, build_trainer.encoder, len(data.ids))
    _leave_results(folder, _whole_summary(settings, recorder, transcript), stopped)
    aligner.tried.forget()
    store.forget_finished()  # last: a process that ends before this does not train from scratch


def _begin_to_wait(status: RunStatus) -> None:
    status.enter_stage("waiting")
    status.set_ready("waiting for the active party", ready=False)


def _aligner(settings: PassiveSettings, data: PartyData, folder: Path, *, fresh: bool) -> Aligner:
    """Build the aligner. Call it before the first gRPC channel, because it may start processes."""
    kept, tried = records_of(settings, folder)
    if fresh:
        kept.discard()
    return Aligner(
        Participant(settings.contract, settings.party, data.ids, data.table.splits),
        engine_of(settings, len(data.ids)),
        partial(command_line.draw_nonce, settings),
        tried,
        kept,
    )


def _check_files_and_address(
    settings: PassiveSettings, credentials: CredentialFiles | None
) -> None:
    """Check what would end a run, before its folder is opened and earlier results move aside."""
    security = check_security(credentials, settings.connect, "connect")
    logger.log(logging.WARNING if credentials is None else logging.INFO, "security: %s", security)
    http_proxy(settings)
    check_free(settings.status)
    open_earlier_model(settings)
    try_custom_attacks(settings.adversary, settings.contract.cut_shape)


_ENDED = (
    "the active party has ended this run for good, and nothing is trained; --fresh starts over "
    "once the active party does"
)


def _whole_summary(
    settings: PassiveSettings, recorder: PassiveRecorder, transcript: Transcript | None
) -> Summary:
    return replace(
        recorder.summary(),
        transcript=None if transcript is None else transcript.summary(),
        version=VERSION,
        provenance=provenance_of_process(shows_host=settings.report.show_host),
    )


def _leave_results(folder: Path, summary: Summary, stopped: PeerEndedForGood | None) -> None:
    write_summary(folder, summary)
    if stopped is not None:
        mark_as_ended(folder, {"ended_by": "the active party"})
    print_summary("passive party", summary)
    try_to_report(folder)
    if stopped is not None:
        raise stopped


def _was_ended(settings: PassiveSettings, folder: Path, interruption: Interruption) -> bool:
    """Return whether the run is over, finished or ended for good by the active party; say so."""
    if command_line.is_finished(folder):
        return True
    if end_of(folder) is None or _peer_is_back(settings, interruption):
        return False
    logger.warning("no active party answers at %s; %s", settings.connect, _ENDED)
    return True


def _peer_is_back(settings: PassiveSettings, interruption: Interruption) -> bool:
    """Return whether the active party, which had ended the run for good, serves again."""
    until = time.monotonic() + min(BACK_WITHIN_S, settings.reconnect.max_s)
    with _peer(settings) as peer:
        while time.monotonic() < until:
            interruption.check()
            with suppress(PeerError):
                if peer.is_ready():
                    return True
            time.sleep(settings.reconnect.first_wait_s)
    return False


def _evaluation_labels(settings: PassiveSettings) -> PartyData | None:
    if settings.adversary is None or settings.adversary.labels is None:
        return None
    return PartyData.load(
        settings.adversary.labels, settings.base_dir, id_rules=settings.contract.ids
    )


def _check(parsed: argparse.Namespace) -> None:
    settings = command_line.load_settings(PassiveSettings, parsed, "passive")

    def connection() -> str:
        credentials = credential_files(settings, settings.party)
        security = check_security(credentials, settings.connect, "connect")
        state = "probed below" if parsed.connect else _peer_state(settings)
        return f"connect: {state}; security: {security}"

    def data_and_model() -> str:
        data = PartyData.of(settings)
        earlier = open_earlier_model(settings)
        encoder = data.fit(np.arange(len(data.ids)), earlier)
        if encoder is None:
            raise SettingsError("data.features: the passive party needs features")
        contract, device = settings.contract, command_line.torch_device(settings.device)
        build = partial(
            build_bottom_model,
            settings.bottom_model,
            encoder,
            contract.cut_shape,
            seed=settings.model_seed,
        )
        model = build(trial=Trial((contract.batch_size,), device))
        but = "" if contract.drop_last else lone_row_in_words(build, device)
        if earlier is not None:
            earlier.put_into(model)
        fits = f"the bottom model fits them{but}"
        return f"data: {data.summary()}; {fits}; {data.report.in_words()}"

    def labels() -> str:
        found = _evaluation_labels(settings)
        return f"evaluation labels: {'none' if found is None else found.table.source}"

    def probes() -> Iterator[Callable[[], str]]:
        link = _connection(settings, credential_files(settings, settings.party))
        return connection_checks(settings, link, parsed.wait)

    adversary = settings.adversary

    def own_attacks() -> str:
        names = try_custom_attacks(adversary, settings.contract.cut_shape)
        return f"attacks: {', '.join(names)} can score gradients"

    command_line.report_check(
        settings,
        [
            connection,
            *status_checks(settings.status),
            lambda: f"device: {command_line.torch_device(settings.device)}",
            *([own_attacks] if adversary is not None and adversary.custom_attacks else []),
            data_and_model,
            labels,
        ],
        probes if parsed.connect else None,
        as_json=parsed.json,
    )


def _report(parsed: argparse.Namespace) -> None:
    written = write_passive_report(parsed.run_dir, parsed.output)
    if parsed.json:
        print_json({"report": str(written)})
    logger.info("report written to %s", written)


def _peer_state(settings: PassiveSettings) -> str:
    with _peer(settings) as peer:
        where = peer.connection.where
        try:
            ready = peer.is_ready()
        except PeerUnreachable:
            return f"no active party answers at {where} now; a run would wait for it"
    return f"the active party at {where} is {'ready' if ready else 'not ready'}"


def _peer(settings: PassiveSettings) -> GrpcPeer:
    connection = _connection(settings, credential_files(settings, settings.party))
    return GrpcPeer(connection, settings.reconnect, party=settings.party)


def _connection(
    settings: PassiveSettings,
    credentials: CredentialFiles | None,
    notes: Notes | None = None,
) -> PeerConnection:
    return PeerConnection(
        settings.connect, settings.contract, credentials, notes, http_proxy(settings)
    )


if __name__ == "__main__":
    main()
