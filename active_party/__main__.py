"""The command ``splitveil active``."""

import argparse
import json
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from splitveil.active_party.align_command import align
from splitveil.active_party.assembly import (
    TrainerBuilder,
    allowance_of,
    build_session,
    signals_of,
)
from splitveil.active_party.check_command import check, check_files_and_address
from splitveil.active_party.command import parser
from splitveil.active_party.earlier_runs import answers_before, earlier_answers
from splitveil.active_party.ended import WHAT_NOW, mark_run_as_ended, was_ended
from splitveil.active_party.inference.command import predict
from splitveil.active_party.ledger.account_book import LEDGER, AccountBook
from splitveil.active_party.plan import show
from splitveil.active_party.planned import plan_of
from splitveil.active_party.results import save_alone, save_results
from splitveil.active_party.serving.server import start_server
from splitveil.active_party.serving.service import ActiveService
from splitveil.active_party.serving.supervisor import wait_for_end
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.watch.active_status import ActiveStatus, StatusObserver
from splitveil.active_party.watch.recorder import ActiveRecorder
from splitveil.active_party.workers import check_settings, work_for
from splitveil.common.alignment import KeptExchanges, engine_of, records_of
from splitveil.common.data.id_forms import form_of
from splitveil.common.errors import (
    EndedForGood,
)
from splitveil.common.party import command_line
from splitveil.common.party.credentials import CredentialFiles, credential_files
from splitveil.common.party.ending import end_program, exit_code_of
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.json_output import print_json
from splitveil.common.party.party_data import PartyData
from splitveil.common.party.place import Place
from splitveil.common.party.transcript import Transcript
from splitveil.common.party.workers import Workers, act, joined
from splitveil.common.record.run_record import write_summary
from splitveil.common.record.summary import Summary, provenance_of_process
from splitveil.common.record.summary_tables import print_summary
from splitveil.common.run.contract import ACTIVE, Contract
from splitveil.common.status.endpoint import serving_status
from splitveil.common.storage.model_files import delete_saved
from splitveil.common.storage.run_folder import open_run_folder
from splitveil.common.storage.run_store import RunStore
from splitveil.common.text.log_lines import configure_logging
from splitveil.common.text.version import VERSION
from splitveil.common.wire.endpoint import check_security
from splitveil.common.wire.noted_calls import AllNotes
from splitveil.common.wire.probes import ProbeDesk

logger = logging.getLogger("splitveil.active_party")

GRACE_S = 5.0
LAST_WORDS_S = 2.0
"""Time that a party that ends early waits for its peer's next call, whose status says so."""
FINAL_WORDS_S = 30.0
"""The same time if the run ends for good: a peer that did not learn of it would retry forever."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit with its code."""
    exit_code = perform(parser().parse_args(arguments))
    end_program(exit_code, is_program=arguments is None)


def perform(parsed: argparse.Namespace) -> int:
    """Do what parsed arguments say, and return the exit code."""
    configure_logging("active", parsed.verbose - parsed.quiet)
    actions = {
        "align": align,
        "run": _run,
        "check": check,
        "plan": _plan,
        "predict": predict,
        "report": _report,
        "serve": _serve,
        "verify-transcript": command_line.verify_transcript,
    }
    return exit_code_of(partial(act, parsed, actions[parsed.command]))


def _run(parsed: argparse.Namespace) -> None:
    settings = command_line.load_settings(ActiveSettings, parsed, "active")
    place = Place.of_environment()
    if place.size > 1:
        check_settings(settings)
    if place.rank:
        work_for(settings, place)
        return
    interruption = Interruption()
    interruption.install()
    with joined(place, interruption) as workers:
        credentials = credential_files(settings, ACTIVE)
        security = check_security(credentials, settings.listen, "listen")
        level = logging.WARNING if credentials is None else logging.INFO
        logger.log(level, "security: %s", security)
        check_files_and_address(settings)
        status = ActiveStatus(settings)
        with serving_status(status, settings.status, interruption):
            _train(parsed, settings, credentials, interruption, status, workers)


def _train(
    parsed: argparse.Namespace,
    settings: ActiveSettings,
    credentials: CredentialFiles | None,
    interruption: Interruption,
    status: ActiveStatus,
    workers: Workers,
) -> None:
    contract = settings.contract
    device = command_line.prepare(settings, workers.place)
    settings.defense.require_usable(settings.defense_context())
    data = PartyData.of(settings)
    logger.info("%d rows read from %s", len(data.ids), data.table.source)
    interruption.check()
    allowance = allowance_of(settings, AccountBook.empty())
    for signal in signals_of(settings):
        logger.info("%s", signal.why)
    folder = _open_folder(settings, fresh=parsed.fresh and not workers.place.restarts)
    if folder is None:
        return
    allowance = replace(allowance, earlier=_counted(settings, data, folder))
    engine = engine_of(settings, len(data.ids))
    build_trainer = TrainerBuilder(settings, data, device, status.phases, workers.line)
    with ExitStack() as resources:
        transcript = resources.enter_context(_transcript(settings, folder))
        recorder = resources.enter_context(ActiveRecorder(settings, folder, status.note_line))
        store = resources.enter_context(_store(contract, folder))
        session = build_session(
            settings,
            data,
            build_trainer,
            StatusObserver(recorder, status),
            partial(command_line.draw_nonce, settings),
            store,
            allowance,
        )
        session.reopen()
        # From the first answer until this process ends, no file may pass for the whole account.
        delete_saved(folder, LEDGER)
        kept, tried = records_of(settings, folder)
        service = ActiveService(session, engine, settings.reconnect.deadline_s, tried, status, kept)
        notes = status if transcript is None else AllNotes(transcript, status)
        desk = ProbeDesk(contract, form_of(data.ids))
        server = start_server(service, contract, settings.listen, credentials, notes, desk)
        logger.info("waiting for %s at %s", _parties_of(contract), settings.listen)
        stopped: EndedForGood | None = None
        try:
            with status.serving(session):
                wait_for_end(session, service, settings, interruption)
        except EndedForGood as error:
            stopped = error  # as configured: it ends with a summary, like any other run
        finally:
            patience_s = LAST_WORDS_S if stopped is None else FINAL_WORDS_S
            service.tell_end(min(patience_s, settings.reconnect.max_s), interruption)
            server.stop(GRACE_S).wait()
            engine.close()
            recorder.note_refit(save_results(settings, folder, session, build_trainer))
            recorder.note_alone(save_alone(settings, folder, session, build_trainer))
    # The monitor measures the last batches only after the last answer has left.
    stopped = stopped or recorder.objection()
    summary = recorder.summary(dict(service.refused))
    end = None if transcript is None else transcript.summary()
    found = provenance_of_process(shows_host=settings.report.show_host)
    summary = replace(summary, transcript=end, version=VERSION, provenance=found)
    _leave_results(settings, folder, summary, stopped)
    service.settle()
    store.forget_finished()  # last: a process that ends before this does not train from scratch


def _leave_results(
    settings: ActiveSettings, folder: Path, summary: Summary, stopped: EndedForGood | None
) -> None:
    write_summary(folder, summary)
    if stopped is not None:
        mark_run_as_ended(settings, folder, stopped)
    print_summary("active party", summary)
    # Imported at the end, as above.
    from splitveil.active_party.report_command import try_to_report  # noqa: PLC0415

    try_to_report(folder.parent)
    if stopped is not None:
        logger.warning("the run has ended for good: %s", WHAT_NOW)
        raise stopped


def _open_folder(settings: ActiveSettings, *, fresh: bool) -> Path | None:
    """Open the run's folder; None if the run is over."""
    folder = open_run_folder(
        settings.runs_dir,
        settings.contract.run_name,
        ACTIVE,
        lambda folder: command_line.takes_up(settings, fresh=fresh, folder=folder),
    )
    if was_ended(settings, folder):
        return None
    # By its settings, the start of another run finds this one.
    command_line.save_resolved(settings, folder)
    if fresh:
        KeptExchanges(folder).discard()
    return folder


def _counted(settings: ActiveSettings, data: PartyData, folder: Path) -> AccountBook:
    """Return what earlier runs have told, and say what that is together with this run."""
    earlier = earlier_answers(settings, folder, leaves_books=True)
    if len(earlier):
        logger.info("%s", plan_of(settings, data, earlier=earlier).earlier)
    return earlier


def _store(contract: Contract, folder: Path) -> RunStore:
    keep, num_parties = contract.checkpoints.keep, len(contract.passive_parties)
    return RunStore(folder, keep, num_parties, in_background=True)


def _transcript(
    settings: ActiveSettings, folder: Path
) -> AbstractContextManager[Transcript | None]:
    if not settings.transcript:
        return nullcontext()
    defense = settings.defense.model_dump(mode="json", exclude={"insecure_noise_seed"})
    in_force = {"Train reply": json.dumps(defense, separators=(",", ":"))}
    return Transcript(folder, "active", in_force)


def _parties_of(contract: Contract) -> str:
    names = contract.passive_parties
    if len(names) == 1:
        return "the passive party"
    return f"the passive parties {', '.join(names)}"


def _plan(parsed: argparse.Namespace) -> None:
    settings = command_line.load_settings(ActiveSettings, parsed, "active")
    data = PartyData.of(settings)
    plan = plan_of(settings, data, parsed.target_leak_auc, answers_before(settings))
    if parsed.json:
        print_json(plan.to_json())
    else:
        show(plan)


def _report(parsed: argparse.Namespace) -> None:
    # A run need not wait for what its report is made with, nor hold it in memory.
    from splitveil.active_party.report_command import report  # noqa: PLC0415

    report(parsed)


def _serve(parsed: argparse.Namespace) -> None:
    # A run need not wait for the libraries of HTTP.
    from splitveil.active_party.online.command import serve  # noqa: PLC0415

    serve(parsed)


if __name__ == "__main__":
    main()
