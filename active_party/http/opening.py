"""Opens online predictions: who may ask, what answers, and the server."""

import logging
from contextlib import ExitStack
from typing import NamedTuple

from splitveil.active_party.http.api import build_app
from splitveil.active_party.http.batcher import Batcher
from splitveil.active_party.http.desk import AnswerDesk, Fallback, Rules
from splitveil.active_party.http.online_status import CallLog, OnlineStatus
from splitveil.active_party.http.own_features import GivenFeatures
from splitveil.active_party.http.peer_watch import PeerWatch
from splitveil.active_party.http.programs import RateLimit, Tokens
from splitveil.active_party.http.server import HttpServer, ServerTls
from splitveil.active_party.predict.embed_client import EmbedClient
from splitveil.active_party.predict.predictor import Predictor
from splitveil.active_party.settings import ActiveSettings
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.table_files import read_id_list
from splitveil.common.record.transcript import Transcript
from splitveil.common.text.addresses import on_loopback

logger = logging.getLogger(__name__)

_BEYOND = "needs serving.tls, and serving.token_file or serving.tls.clients"


class Doors(NamedTuple):
    tls: ServerTls | None
    tokens: Tokens | None


def open_doors(settings: ActiveSettings) -> Doors:
    """Read certificates and tokens, and check that nobody gets in who should not."""
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
    """Build what answers requests, and ask the passive parties for their models."""
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
    """Serve requests until the server is closed."""
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
