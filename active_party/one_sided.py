"""Takes part in a run whose common ids only this party learns, from its peer's sealed table.

The passive party has fitted its model by itself, and serves it (``splitveil serve``). It is
asked for its whole table, in the same way whichever ids are common; everything after that happens
here, by the session that otherwise answers the passive party's calls, and nothing of it is sent.
"""

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from splitveil.active_party.grpc_server.server import Serve
from splitveil.active_party.monitor.active_status import ActiveStatus
from splitveil.active_party.predict.embed_client import TableClient
from splitveil.active_party.predict.predictor import log_security, open_clients
from splitveil.active_party.run.lifecycle import Stage
from splitveil.active_party.run.session import ActiveSession
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.alignment.store import ExchangeStores, digest_of_ids, storing
from splitveil.common.errors import AlignmentError, DataError, SplitveilError
from splitveil.common.party.command_line import draw_nonce
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.party_data import PartyData
from splitveil.common.record.run_folder import write_bytes_atomically
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.messages import Activation, LeaveReason, ModelIdentity, Offer
from splitveil.common.run.progress import Phase, State
from splitveil.common.run.sample_order import Positions
from splitveil.common.run.state_bytes import state_from_bytes, state_to_bytes
from splitveil.common.wire.connection import Retrying
from splitveil.common.wire.recorded_calls import AllNotes, Notes

logger = logging.getLogger("splitveil.active_party")


def checked_table(settings: ActiveSettings) -> Serve:
    """Log what protects the connection, and return what takes the table and trains on it."""
    log_security(settings)
    return partial(_follow_course, settings)


def _follow_course(
    settings: ActiveSettings,
    session: ActiveSession,
    _data: PartyData,
    folder: Path,
    transcript: Transcript | None,
    status: ActiveStatus,
    interruption: Interruption,
) -> tuple[dict[str, int], None, Callable[[], None]]:
    notes = status if transcript is None else AllNotes(transcript, status)
    stores = ExchangeStores(folder)
    path = stores.folder_of(settings.contract.passive_parties[0]) / "table"
    with status.serving(session):
        try:
            if session.stage is not Stage.FINISHED:
                with status.phases(Phase.ALIGNMENT):
                    rows, values = _common_rows(settings, session, path, notes, interruption)
                status.name_run(session.run_id)
                _open(settings, session, rows)
                _send(session, rows, values, interruption)
        except SplitveilError as error:
            session.end(error)
            raise
    return {}, None, stores.discard


def _common_rows(
    settings: ActiveSettings,
    session: ActiveSession,
    path: Path,
    notes: Notes,
    interruption: Interruption,
) -> tuple[Positions, Tensor]:
    """Return this party's rows of the common ids, and their activations, (rows, *cut_shape).

    They are kept until the run is over: were the table taken again after a failure, the passive
    party could learn that there was one, for instance that too few ids are common.
    """
    asked = settings.contract.digest() + digest_of_ids(session.ids)
    with storing(path):
        kept = state_from_bytes(path.read_bytes()) if path.exists() else {}
    if kept.get("asked") != asked:
        kept = {"asked": asked, **_taken(settings, session, notes, interruption)}
        with storing(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_bytes_atomically(path, state_to_bytes(kept))
    session.lifecycle.run = session.lifecycle.run._replace(run_id=kept["run_id"])
    rows, least = kept["rows"].numpy(), settings.contract.alignment.min_aligned
    if len(rows) < least:
        raise AlignmentError(
            f"too few ids to train on: {len(session.ids)} here, {len(rows)} in common, expected "
            f"at least {least}; the passive party is not told"
        )
    return rows, kept["values"]


def _taken(
    settings: ActiveSettings, session: ActiveSession, notes: Notes, interruption: Interruption
) -> State:
    is_known = session.stage is Stage.REJOINING
    model = ModelIdentity(session.run_id, 0) if is_known else None
    (client,) = open_clients(settings, TableClient, model, notes)
    with client:
        where = client.connection.where
        retrying = Retrying(settings.reconnect, interruption, where, client.connection.renew)
        logger.info("taking the sealed table of passive party %r at %s", client.party, where)
        run_id = retrying.until_answered(client.check_model).model.run_id
        retrying.until_answered(partial(client.take, session.ids, interruption))
        known, values = client.submit(session.ids).result()
    return {"run_id": run_id, "rows": torch.from_numpy(np.flatnonzero(known)), "values": values}


def _open(settings: ActiveSettings, session: ActiveSession, rows: Positions) -> None:
    (peer,), contract = session.parties, settings.contract
    opening = partial(session.handshake, peer.name, contract.canonical_json())
    if session.stage is Stage.REJOINING:
        opening(peer.commitment, Offer(session.run_id, session.lifecycle.checkpoints))
        return
    nonce = draw_nonce(settings)  # stands for the one that a passive party draws
    opening(hashlib.sha256(nonce).digest())
    session.aligned(rows, nonce)


def _send(
    session: ActiveSession, rows: Positions, values: Tensor, interruption: Interruption
) -> None:
    answering = session.lifecycle.answering
    if len(np.setdiff1d(answering.rows.file_rows, rows)):
        raise DataError("the passive party no longer has all rows with which the run began")
    places = torch.from_numpy(np.searchsorted(rows, answering.rows.file_rows))
    while (due := answering.progress.due) is not None:
        interruption.check()
        of_batch = values[places[torch.from_numpy(due.positions.copy())]]
        session.evaluate(Activation(due.identity(session.run_id), of_batch))
        session.finish_step()
    session.leave(session.run_id, LeaveReason.FINISHED)
