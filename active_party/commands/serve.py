"""``splitveil serve active.yaml``: answers other programs' requests until it is stopped."""

import argparse
import logging
import time
from contextlib import ExitStack

from splitveil.active_party.predict.predictor import Predictor, log_security, open_predictor
from splitveil.active_party.settings import ActiveSettings
from splitveil.active_party.training.evaluation import by_score
from splitveil.active_party.training.label_kinds import kind_of
from splitveil.common.data.canonical_form import CanonicalForm
from splitveil.common.data.source_settings import expand_path
from splitveil.common.data.table_files import read_id_list
from splitveil.common.errors import SettingsError
from splitveil.common.party import command_line
from splitveil.common.party.drift import Drift
from splitveil.common.party.endpoint import endpoint_of
from splitveil.common.party.interruption import Interruption
from splitveil.common.record.run_folder import claimed, inner_folder
from splitveil.common.record.transcript import Transcript
from splitveil.common.run.contract import ACTIVE
from splitveil.common.text.addresses import on_loopback
from splitveil.common.text.imports import extra_missing
from splitveil.common.wire.recorded_calls import AllNotes

try:
    from splitveil.active_party.http.api import build_app
    from splitveil.active_party.http.batcher import Batcher
    from splitveil.active_party.http.own_features import Fallback, GivenFeatures
    from splitveil.active_party.http.programs import RateLimit, Tokens
    from splitveil.active_party.http.server import HttpServer, ServerTls
    from splitveil.active_party.http.service import AnswerService, PeerWatch, Rules
    from splitveil.active_party.http.status import CallLog, OnlineStatus
except ImportError as error:
    raise extra_missing("splitveil serve active.yaml", "serve") from error

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_REFRESH_EVERY_S = 5.0


Access = tuple[ServerTls | None, Tokens | None]


def serve(parsed: argparse.Namespace) -> None:
    interruption = Interruption()
    interruption.install()
    settings: ActiveSettings = parsed.loaded
    if settings.contract.is_one_sided:
        raise SettingsError(
            "contract.alignment.kind: one_sided: serve asks for single ids, which the passive "
            "party is not to learn; expected splitveil predict"
        )
    tls, tokens = access_of(settings)
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
        service = open_service(settings, predictor, resources, status, transcript)
        with serving(settings, service, (tls, tokens)):
            last_refresh = time.monotonic()
            while interruption() is None:
                time.sleep(_LOOK_EVERY_S)
                if transcript is not None:
                    transcript.check()
                if tls is not None and time.monotonic() - last_refresh > _REFRESH_EVERY_S:
                    tls.refresh()
                    last_refresh = time.monotonic()
            status.close()
            logger.info("stopping: requests under way are answered")
    answered = service.log.answered
    by_status = ", ".join(f"{number} x {code}" for code, number in sorted(answered.items()))
    logger.info("answered %s requests: %s", f"{answered.total():,}", by_status or "none")


def access_of(settings: ActiveSettings) -> Access:
    """Read certificates and tokens, and check that nobody gets in who should not."""
    own = settings.serving
    tls = None if own.tls is None else ServerTls(own.tls, settings.base_dir)
    tokens = None if own.token_file is None else Tokens.read(settings.base_dir / own.token_file)
    knows_programs = tokens is not None or (own.tls is not None and own.tls.clients is not None)
    if tls is None or not knows_programs:
        needs = "needs serving.tls, and serving.token_file or serving.tls.clients"
        on_loopback(own.http, "serving.http", needs)
    if not knows_programs:
        logger.warning("serving.http: every program of this machine may ask")
    return tls, tokens


def open_service(
    settings: ActiveSettings,
    predictor: Predictor,
    resources: ExitStack,
    status: OnlineStatus,
    transcript: Transcript | None = None,
) -> AnswerService:
    """Build what answers requests, and ask the passive parties for their models."""
    own = settings.serving
    allowed = None
    if own.allowed_ids is not None:
        path = expand_path("serving.allowed_ids", own.allowed_ids, settings.base_dir)
        allowed = frozenset(read_id_list(path, settings.data, settings.contract.ids).ids)
        logger.info("%s ids may be asked for", f"{len(allowed):,}")
    fallback = None
    if own.fallback:
        fallback = Fallback.load(settings, predictor.own_rows, predictor.model.identity)
    watch = resources.enter_context(PeerWatch(predictor.clients, status))
    batcher = resources.enter_context(Batcher(predictor, settings.contract, own.timeout_s, status))
    form = CanonicalForm(settings.contract.ids)
    rules = Rules(own.max_ids, own.timeout_s, allowed, RateLimit(own.ids_per_second), form)
    given = GivenFeatures(settings.data, predictor.model.encoder)
    log = CallLog(status, transcript)
    service = AnswerService(predictor, batcher, watch, given, rules, log, fallback)
    service.drift = Drift(predictor.model.metadata, by_score, status.drift, "predictions")
    status.name_run(service.run_id)
    waiting_of = batcher.num_waiting
    status.follow(lambda: service.trouble, waiting_of, fallback=fallback is not None)
    return service


def serving(settings: ActiveSettings, service: AnswerService, access: Access) -> HttpServer:
    (tls, tokens), address = access, settings.serving.http
    # Else a page of a name that leads to this machine could ask through a browser here.
    names = ("localhost", "127.0.0.1", "[::1]", address.rpartition(":")[0])
    hosts = names if tls is None and tokens is None else ("*",)
    app = build_app(service, tokens, kind_of(settings.data), hosts)
    server = HttpServer(app, address, tls)
    scheme = "http" if tls is None else "https"
    logger.info("answering at %s://%s (described at /openapi.json)", scheme, address)
    return server


def impatient(settings: ActiveSettings) -> ActiveSettings:
    """Return settings that give up a stream whose answers come too late."""
    reconnect = settings.reconnect.model_copy(update={"deadline_s": settings.serving.timeout_s})
    return settings.model_copy(update={"reconnect": reconnect})
