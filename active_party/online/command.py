"""The command ``splitveil active serve``."""

import argparse
import logging
import time
from contextlib import ExitStack
from typing import NamedTuple

from splitveil.active_party.inference.embed_client import EmbedClient
from splitveil.active_party.inference.predictor import Predictor, open_predictor
from splitveil.active_party.online.batcher import Batcher
from splitveil.active_party.online.call_log import CallLog
from splitveil.active_party.online.desk import AnswerDesk, Rules
from splitveil.active_party.online.fallback import Fallback
from splitveil.active_party.online.http_api import build_app
from splitveil.active_party.online.http_server import HttpServer
from splitveil.active_party.online.online_status import OnlineStatus
from splitveil.active_party.online.own_features import GivenFeatures
from splitveil.active_party.online.peer_watch import PeerWatch
from splitveil.active_party.online.programs import Tokens
from splitveil.active_party.online.rate_limit import RateLimit
from splitveil.active_party.online.server_tls import ServerTls
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.table_files import read_id_list
from splitveil.common.party import command_line
from splitveil.common.party.credentials import credential_files
from splitveil.common.party.interruption import Interruption
from splitveil.common.party.transcript import Transcript
from splitveil.common.run.contract import ACTIVE
from splitveil.common.status.endpoint import endpoint_of
from splitveil.common.storage.run_folder import claimed, inner_folder
from splitveil.common.text.addresses import on_loopback
from splitveil.common.wire.endpoint import check_security
from splitveil.common.wire.noted_calls import AllNotes

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_BEYOND = "needs serving.tls, and serving.token_file or serving.tls.clients"
_REFRESH_EVERY_S = 5.0


def serve(parsed: argparse.Namespace) -> None:
    """Serve until a signal asks to stop.

    Raises:
        SplitveilError: settings, model or data cannot be used, or the transcript not be written.
    """
    interruption = Interruption()
    interruption.install()
    settings = command_line.load_settings(ActiveSettings, parsed, "active")
    doors = open_doors(settings)
    credentials = credential_files(settings, ACTIVE)
    for party, address in settings.inference.connect.items():
        security = check_security(credentials, address, f"inference.connect.{party}")
        level = logging.WARNING if credentials is None else logging.INFO
        logger.log(level, "security towards %s: %s", party, security)
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


class Doors(NamedTuple):
    """How programs get in."""

    tls: ServerTls | None
    tokens: Tokens | None


def open_doors(settings: ActiveSettings) -> Doors:
    """Read certificates and tokens, and check that nobody gets in who should not.

    Raises:
        SettingsError: files cannot be used, or the address is beyond this machine and unprotected.
    """
    own = settings.serving
    tls = None if own.tls is None else ServerTls(own.tls, settings.base_dir)
    tokens = None if own.token_file is None else Tokens.read(settings.base_dir / own.token_file)
    knows_programs = tokens is not None or (own.tls is not None and own.tls.clients is not None)
    if tls is None or not knows_programs:
        on_loopback(own.http, "serving.http", _BEYOND)
    if not knows_programs:
        logger.warning("serving.http: every program of this machine may ask")
    return Doors(tls, tokens)


def open_desk(
    settings: ActiveSettings,
    predictor: Predictor,
    resources: ExitStack,
    status: OnlineStatus,
    transcript: Transcript | None = None,
) -> AnswerDesk:
    """Build what answers requests, and ask the passive parties for their models.

    Args:
        settings: this party's.
        predictor: the joint model.
        resources: ends what is begun here.
        status: for this party's operators.
        transcript: records every request, if there is one.

    Raises:
        SettingsError: the fallback model cannot be used.
        DataError: the file of allowed ids cannot be read.
    """
    own = settings.serving
    allowed = None
    if own.allowed_ids is not None:
        path = settings.base_dir / own.allowed_ids
        allowed = frozenset(read_id_list(path, settings.data, settings.contract.ids))
        logger.info("%d ids may be asked for", len(allowed))
    fallback = None
    if own.fallback:
        fallback = Fallback.load(settings, predictor.own_rows, predictor.model.identity)
    clients = [client for client in predictor.clients if isinstance(client, EmbedClient)]
    watch = resources.enter_context(PeerWatch(clients, status))
    wait_s = own.batch_wait_ms / 1000
    batcher = resources.enter_context(
        Batcher(predictor, settings.contract, wait_s, own.timeout_s, status)
    )
    form = CanonicalForm(settings.contract.ids)
    rules = Rules(own.max_ids, own.timeout_s, allowed, RateLimit(own.ids_per_second), form)
    given = GivenFeatures(settings.data, predictor.model.encoder)
    log = CallLog(status, transcript, records_ids=own.record_ids)
    desk = AnswerDesk(predictor, batcher, watch, given, rules, log, fallback)
    status.name_run(desk.run_id)
    status.follow(lambda: desk.trouble, lambda: batcher.num_waiting, fallback=fallback is not None)
    return desk


def serving(settings: ActiveSettings, desk: AnswerDesk, doors: Doors) -> HttpServer:
    """Serve requests until the server is closed.

    Args:
        settings: this party's.
        desk: answers.
        doors: how programs get in.

    Raises:
        SettingsError: the address cannot be served.
    """
    address, data = settings.serving.http, settings.data
    classes = list(data.class_names) if data.num_classes > 2 else None
    # Else a page of a name that leads to this machine could ask through a browser here.
    names = ("localhost", "127.0.0.1", "[::1]", address.rpartition(":")[0])
    hosts = names if doors == Doors(None, None) else ("*",)
    numbers = data.label_range is not None
    server = HttpServer(
        build_app(desk, doors.tokens, classes, hosts, numbers=numbers), address, doors.tls
    )
    scheme = "http" if doors.tls is None else "https"
    logger.info("answering at %s://%s (described at /openapi.json)", scheme, address)
    return server


def impatient(settings: ActiveSettings) -> ActiveSettings:
    """Return settings with which a stream whose answers come too late is given up."""
    reconnect = settings.reconnect.model_copy(update={"deadline_s": settings.serving.timeout_s})
    return settings.model_copy(update={"reconnect": reconnect})
