"""The HTTP side of online predictions: translates between JSON and the service, and no more."""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
)
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from splitveil.active_party.http import programs
from splitveil.active_party.http.service import AnswerService, PendingReply, ServedPredictions
from splitveil.active_party.training.label_kinds import ClassLabels, LabelKind
from splitveil.common.data.canonical_form import compose
from splitveil.common.run.id_rules import MAX_ID_COLUMNS
from splitveil.common.text.wording import VERSION

RETRY_AFTER_S = 1
ID_BODY_BYTES = 8192  # of a request's body for each id that it may have, with features
MOST_REQUESTS = 256  # requests of known programs that are read or answered at the same time

_IdPart = StrictStr | StrictInt
_Parts = Annotated[list[_IdPart], Field(max_length=MAX_ID_COLUMNS, fail_fast=True)]
_Value = StrictInt | StrictFloat | StrictStr | list[StrictStr | StrictInt] | None
# Values are checked where the columns of the model are known.
_Rows = Annotated[list[dict[str, SkipValidation[_Value]]], Field(fail_fast=True)]


class PredictRequest(BaseModel):
    """Ids whose predictions are wanted."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"ids": ["patient-0007", "patient-0042"]}]}
    )

    ids: Annotated[list[_IdPart | _Parts], Field(min_length=1, fail_fast=True)]
    """Compared as in the alignment: 7 and "7" are the same id. An id of several columns is a list
    of its parts, in the order of the contract's ``ids``."""

    features: _Rows | None = None
    """This party's own features of each id, by column, in place of those in its table: every column
    that the model needs, with null where there is no value."""


_JSON = "application/json"
_NO_MARKS = bytes(set(range(256)) - set(b'"[{:'))
_REQUEST = {_JSON: {"schema": PredictRequest.model_json_schema()}}


class Reply(BaseModel):
    """The fields of every answer beside the predictions, in the order of the ids."""

    found: list[bool]
    """True if there is a prediction."""

    model: list[Literal["joint", "fallback"] | None]
    """The model that predicted: that of all parties, or that of the active party's own features
    only."""

    run_id: str
    """The run that trained the model."""

    why_fallback: str | None = None
    """Why the joint model was not asked, if it was not."""


class PredictReply(Reply):
    """Probabilities, in the order of the ids."""

    probabilities: list[float | list[float] | None]
    """Of label 1, or of each class; null for an id that is not known."""
    classes: list[str] | None  # the names of the classes, if there are more than two


class NumberReply(Reply):
    """Predicted numbers, in the order of the ids."""

    values: list[float | None]
    """In the label's unit, within ``data.label_range``; null for an id that is not known."""


class ServiceReadiness(BaseModel):
    """True if requests for predictions are answered now."""

    ready: bool
    model: Literal["joint", "fallback"] | None
    reason: str | None


class Problem(BaseModel):
    """Why there is no answer."""

    detail: str


def build_app(
    service: AnswerService,
    tokens: programs.Tokens | None,
    labels: LabelKind,
    hosts: Sequence[str] = ("*",),
) -> FastAPI:
    """Return the application.

    Programs ask by ``tokens``; None goes by certificates, or asks for nothing. ``hosts`` are the
    host names that they may use for this server; ``*`` is any.
    """
    reply_model = PredictReply if isinstance(labels, ClassLabels) else NumberReply
    app = FastAPI(
        title="Joint predictions",
        version=VERSION,
        description="Predictions with a model whose halves two or more organisations hold.",
        license_info={"name": "Apache-2.0"},
        docs_url=None,  # these pages load scripts from elsewhere, where tokens are typed
        redoc_url=None,
    )
    app.add_exception_handler(programs.RequestError, _refused)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    most_ids, given = service.rules.max_ids, service.given
    under_way = asyncio.Semaphore(MOST_REQUESTS)
    security = [] if tokens is None else [Depends(HTTPBearer(auto_error=False))]

    def program_of(request: Request) -> str:
        if tokens is not None:
            return tokens.program_of(request.headers.get("authorization"))
        return str(getattr(request.state, "program", None) or "local")

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """Say that this process serves, whether or not a passive party answers."""
        return {"status": "serving"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["health"], responses={503: {"model": ServiceReadiness}})
    async def readyz(response: Response) -> ServiceReadiness:
        """Say whether requests are answered now, and with which model."""
        trouble = service.trouble
        if trouble is None:
            return ServiceReadiness(ready=True, model="joint", reason=None)
        if service.has_fallback:
            return ServiceReadiness(ready=True, model="fallback", reason=trouble)
        response.status_code = 503
        return ServiceReadiness(ready=False, model=None, reason=trouble)

    @app.post(
        "/predict",
        tags=["predictions"],
        dependencies=security,
        response_model=reply_model,
        openapi_extra={"requestBody": {"required": True, "content": _REQUEST}},
        responses={
            401: {"model": Problem, "description": "The program is not known."},
            404: {"model": reply_model, "description": "None of the ids is known."},
            413: {"model": Problem, "description": "The request is too large."},
            415: {"model": Problem, "description": "The body is compressed, or no JSON."},
            422: {"model": Problem, "description": "The request cannot be understood."},
            429: {"model": Problem, "description": "The program asks for too many ids."},
            503: {"model": Problem, "description": "A passive party is away, or this one busy."},
        },
    )
    async def predict(request: Request) -> Response:
        """Predict some ids with the joint model."""
        # The body is not a parameter: FastAPI would read it before the caller is authenticated.
        with service.log.turning_away():
            program = program_of(request)
            if under_way.locked():
                raise programs.NotAvailable("too many requests are under way")
        async with under_way:
            with service.log.turning_away():
                body = await _body(request, most_ids * ID_BODY_BYTES)
                asked = request_of(body, most_ids, len(given.columns), given.num_lists)
            with service.log.noted(program) as call:
                pending = await _accepted(service, call, asked)
                await _settled(pending, service.rules.timeout_s)
                answer = service.finish(call, pending)
                reply = _reply(answer, labels, service.run_id)
                status = call.status
        return Response(reply.model_dump_json(), status, media_type=_JSON)

    return app


async def _body(request: Request, most_bytes: int) -> bytearray:
    """Return the body of a request whose program is known."""
    headers = request.headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON or headers.get("content-encoding", "identity") != "identity":
        raise programs.NotJson(f"expected {_JSON} without a Content-Encoding such as gzip")
    body = bytearray()
    expected_bytes = int(headers.get("content-length", "0"))
    try:
        parts = request.stream()
        while max(expected_bytes, len(body)) <= most_bytes:
            body += await anext(parts)
    except StopAsyncIteration:
        return body
    except ClientDisconnect as error:
        raise programs.Unusable("the body has ended early") from error
    raise programs.TooManyIds(f"the body has more than {most_bytes:,} bytes")


def request_of(
    body: bytes | bytearray, most_ids: int, columns: int = 0, lists: int = 0
) -> PredictRequest:
    """Return what a body asks for, or raise RequestError, which repeats no value.

    ``columns`` are the model's columns of this party; only ``lists`` may have lists as values.
    """
    # Counted first: parsing holds up all other requests, a hundred times as long for an empty list
    # as for two characters of a text. The 8 leave room for mistakes, which are then named.
    most = most_ids * (8 + lists), most_ids * (8 + columns)
    if _has_more(body, *most):
        marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_MARKS)
        if _has_more(b"".join(marks.split(b'"')[::2]), *most):  # outside of strings
            raise programs.TooManyIds(
                f"the body has more lists or members of objects than {most_ids} ids need"
            )
    try:
        given = from_json(body)
    except ValueError as error:
        raise programs.Unusable(f"the body is no JSON: {error}") from error
    if not isinstance(given, dict) or not given.keys() <= PredictRequest.model_fields.keys():
        raise programs.Unusable("expected an object with ids, and features if need be")
    for name, values in given.items():
        if isinstance(values, list) and len(values) > most_ids:
            raise programs.TooManyIds(f"{name}: at most {most_ids}, got {len(values)}")
    try:
        return PredictRequest.model_validate(given)
    except ValidationError as error:
        found = error.errors(include_input=False, include_context=False, include_url=False)[0]
        place = ".".join(map(str, found["loc"][:2]))
        raise programs.Unusable(f"{place}: {found['msg']}") from None


def _has_more(json: bytes | bytearray, lists: int, members: int) -> bool:
    return json.count(b"[") + json.count(b"{") > lists or json.count(b":") > members


async def _accepted(service: AnswerService, call: Any, asked: PredictRequest) -> PendingReply:
    ids = [compose(list(map(str, one))) if isinstance(one, list) else str(one) for one in asked.ids]
    if asked.features is None:
        return service.accept(call, ids, None)
    return await run_in_threadpool(service.accept, call, ids, asked.features)


async def _settled(pending: PendingReply, timeout_s: float) -> None:
    """Wait until a question is answered, or for as long as a program may have to wait."""
    if pending.answer is None:
        return
    waiting = asyncio.wrap_future(pending.answer)
    # Otherwise asyncio complains about an error that nobody has looked at.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({waiting}, timeout=timeout_s)


def _reply(answer: ServedPredictions, labels: LabelKind, run_id: str) -> PredictReply | NumberReply:
    found = [model is not None for model in answer.models]
    # float32 to double and back is exact, so that the text holds every bit.
    given = answer.predicted.astype(np.float64).tolist()
    predicted = [one if known else None for one, known in zip(given, found, strict=True)]
    common: dict[str, Any] = {
        "found": found,
        "model": answer.models,
        "run_id": run_id,
        "why_fallback": answer.why_fallback,
    }
    if isinstance(labels, ClassLabels):
        classes = list(labels.names) or None
        return PredictReply.model_construct(probabilities=predicted, classes=classes, **common)
    return NumberReply.model_construct(values=predicted, **common)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    status = error.status if isinstance(error, programs.RequestError) else 500
    headers = {}
    if isinstance(error, programs.TooFast):
        headers["Retry-After"] = str(max(1, round(error.wait_s + 0.5)))
    elif status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"detail": str(error)}, status, headers)
