"""``splitveil run active.yaml``: trains with the passive parties, or resumes an unfinished run."""

import argparse
import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from splitveil.active_party import results
from splitveil.active_party.assembly import build_session, peers_of, signals_of
from splitveil.active_party.commands.check import check_files_and_address
from splitveil.active_party.earlier_runs import counting
from splitveil.active_party.grpc_server.server import Serve, Served, checked_server
from splitveil.active_party.ledger.account_book import AccountBook
from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.monitor.recorder import ActiveRecorder
from splitveil.active_party.one_sided import checked_table
from splitveil.active_party.planned import plan_of
from splitveil.active_party.run.lifecycle import Counting
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.trainer_builder import TrainerBuilder, check_processes, learner_of_rank
from splitveil.common.party import command_line
from splitveil.common.party.command_line import Process, run_as_party
from splitveil.common.party.endpoint import serving_status
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.run_folder import end_of
from splitveil.common.record.run_store import RunStore
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE

logger = logging.getLogger("splitveil.active_party")


def run(parsed: argparse.Namespace) -> bool:
    """Train with the passive parties, or resume a run; return whether it was ended for good."""
    settings: ActiveSettings = parsed.loaded
    check_processes(settings)
    train = partial(_take_part, fresh=parsed.fresh)
    run_as_party(settings, ("top_model", "defense"), learner_of_rank, train)
    return end_of(settings.run_folder(ACTIVE)) is not None


def _take_part(settings: ActiveSettings, process: Process, *, fresh: bool) -> None:
    serve = (checked_table if settings.contract.is_one_sided else checked_server)(settings)
    check_files_and_address(settings)
    status = ActiveStatus(settings)
    with serving_status(status, settings.status, process.interruption):
        settings.defense.require_usable(settings.defense_context())
        data = command_line.read_data(settings, process)
        process.interruption.check()
        peers_of(settings)  # refuses before the folder is opened
        folder = results.open_folder(settings, fresh=fresh and not process.restarts)
        if folder is not None:
            _train(settings, data, folder, process, serve, status)


def train(
    settings: ActiveSettings,
    data: PartyData,
    folder: Path,
    builder: TrainerBuilder,
    recorder: ActiveRecorder,
    serve: Callable[[ActiveSession], Served],
    store: RunStore | None = None,
    earlier: AccountBook | None = None,
    count: Counting = nullcontext,
) -> Served:
    """Serve a session over any link until it is over, and save its results."""
    draw_nonce = partial(command_line.draw_nonce, settings)
    session = build_session(settings, data, builder, recorder, draw_nonce, store, earlier, count)
    session.reopen()
    results.forget_account(folder)
    try:
        return serve(session)
    finally:
        recorder.note_refit(*results.save_results(settings, folder, session, builder))
        recorder.note_alone(results.save_alone(settings, folder, session, builder))


def _train(
    settings: ActiveSettings,
    data: PartyData,
    folder: Path,
    process: Process,
    serve: Serve,
    status: ActiveStatus,
) -> None:
    build_trainer = TrainerBuilder(settings, data, process.device, status.phases, process.ranks)
    count, contract = partial(counting, settings, folder), settings.contract
    with count(AccountBook.empty()) as earlier:
        pass
    for signal in signals_of(settings, earlier):
        logger.info("%s", signal.why)
    planned = plan_of(settings, data, earlier=earlier)
    logger.info("defense %s, %s", planned.defense, planned.bounds_in_short())
    if planned.earlier:
        logger.info("%s", planned.earlier)
    with ExitStack() as resources:
        wanted = Transcript(folder, ACTIVE) if settings.transcript else nullcontext()
        transcript = resources.enter_context(wanted)
        recorder = resources.enter_context(ActiveRecorder(settings, folder, status))
        num_parties = len(contract.passive_parties)
        store = resources.enter_context(RunStore(folder, num_parties, in_background=True))

        def meet(session: ActiveSession) -> Served:
            return serve(session, data, folder, transcript, status, process.interruption)

        refused, stopped, forget = train(
            settings, data, folder, build_trainer, recorder, meet, store, earlier, count
        )
    end = None if transcript is None else transcript.summary()
    summary = replace(recorder.summary(refused), transcript=end)
    results.leave_summary(settings, folder, summary, stopped)
    forget()
    store.forget_finished()  # last: a process that ends before this does not train from scratch
