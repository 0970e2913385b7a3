"""The HTTP side of online predictions: translates between JSON and the desk, and no more."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import Depends, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr

from splitveil.active_party.online.call_log import CallLog
from splitveil.active_party.online.desk import AnswerDesk, Pending, admitted
from splitveil.active_party.online.errors import RequestError, TooFast, TooManyIds, Unusable
from splitveil.active_party.online.own_features import GivenFeatures
from splitveil.active_party.online.programs import Tokens
from splitveil.active_party.online.questions import Answer
from splitveil.common.data.canonical_form import compose
from splitveil.common.data.features import Features
from splitveil.common.text.version import VERSION

PROTOCOL = "http"
RETRY_AFTER_S = 1
_SHOWN_CHARACTERS = 64
ID_BODY_BYTES = 8192
"""Bytes of a request's body for each id that it may have, with its own features."""

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_IdPart = StrictStr | StrictInt
_Value = StrictInt | StrictFloat | StrictStr | list[StrictStr] | None


class PredictRequest(BaseModel):
    """Ids whose predictions are wanted."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"ids": ["patient-0007", "patient-0042"]}]}
    )

    ids: Annotated[list[_IdPart | list[_IdPart]], Field(min_length=1)]
    """Compared as in the alignment: 7 and "7" are the same id. An id of several columns is a list
    of its parts, in the order of the contract's ``ids``."""

    features: list[dict[str, _Value]] | None = None
    """This party's own features of each id, by column, in place of those in its table: every column
    that the model needs, with null where there is no value."""


class Reply(BaseModel):
    """What every answer says beside the predictions, in the order of the ids."""

    found: list[bool]
    """Whether there is a prediction."""

    model: list[Literal["joint", "fallback"] | None]
    """The model that the prediction is from: that of all parties, or that of the active party's own
    features alone."""

    run_id: str
    """The run that trained the model."""

    why_fallback: str | None = None
    """Why the joint model was not asked, if it was not."""


class PredictReply(Reply):
    """Probabilities, in the order of the ids."""

    probabilities: list[float | list[float] | None]
    """Of label 1, or of each class; null for an id that is not known."""

    classes: list[str] | None
    """The names of the classes, if there are more than two."""


class NumberReply(Reply):
    """Predicted numbers, in the order of the ids."""

    values: list[float | None]
    """In the label's unit, within ``data.label_range``; null for an id that is not known."""


class Readiness(BaseModel):
    """Whether predictions are answered now."""

    ready: bool
    model: Literal["joint", "fallback"] | None
    reason: str | None


class Problem(BaseModel):
    """Why there is no answer."""

    detail: str


def build_app(
    desk: AnswerDesk, tokens: Tokens | None, classes: list[str] | None, *, numbers: bool = False
) -> FastAPI:
    """Return the application.

    Args:
        desk: answers.
        tokens: of the programs that may ask; None to go by certificates, or to ask for nothing.
        classes: the names of the classes, if there are more than two.
        numbers: whether the label is a number, so that answers have values and no probabilities.
    """
    reply_model = NumberReply if numbers else PredictReply
    app = FastAPI(
        title="Joint predictions",
        version=VERSION,
        description="Predictions with a model whose halves two or more organisations hold.",
        license_info={"name": "Apache-2.0"},
    )
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(RequestValidationError, partial(_invalid, desk.log))
    most_bytes = desk.rules.max_ids * ID_BODY_BYTES
    app.add_middleware(_BodyLimit, most_bytes=most_bytes, log=desk.log)
    security = [] if tokens is None else [Depends(HTTPBearer(auto_error=False))]

    def program_of(request: Request) -> str:
        if tokens is not None:
            return tokens.program_of(request.headers.get("authorization"))
        return str(getattr(request.state, "program", None) or "local")

    @app.get("/healthz", tags=["health"])
    async def healthz() -> dict[str, str]:
        """Say that this process serves, whether or not a passive party answers."""
        return {"status": "serving"}

    @app.get("/readyz", tags=["health"], responses={503: {"model": Readiness}})
    async def readyz(response: Response) -> Readiness:
        """Say whether predictions are answered now, and by which model."""
        trouble = desk.trouble
        if trouble is None:
            return Readiness(ready=True, model="joint", reason=None)
        if desk.has_fallback:
            return Readiness(ready=True, model="fallback", reason=trouble)
        response.status_code = 503
        return Readiness(ready=False, model=None, reason=trouble)

    @app.post(
        "/predict",
        tags=["predictions"],
        dependencies=security,
        response_model=reply_model,
        responses={
            401: {"model": Problem, "description": "The program is not known."},
            404: {"model": reply_model, "description": "None of the ids is known."},
            413: {"model": Problem, "description": "The request is too large."},
            422: {"model": Problem, "description": "The request cannot be understood."},
            429: {"model": Problem, "description": "The program asks for too many ids."},
            503: {"model": Problem, "description": "A passive party is away."},
        },
    )
    async def predict(asked: PredictRequest, request: Request) -> Response:
        """Predict some ids with the joint model."""
        program = admitted(desk.log, PROTOCOL, lambda: program_of(request))
        with desk.log.noted(program, PROTOCOL) as call:
            pending = await _accepted(desk, call, asked)
            if pending.answer is not None:
                await _settled(pending, desk.rules.timeout_s)
            answer = desk.finish(call, pending)
            reply = _reply(answer, classes, desk.run_id, numbers=numbers)
            status = call.status
        return Response(reply.model_dump_json(), status, media_type="application/json")

    return app


async def _accepted(desk: AnswerDesk, call: Any, asked: PredictRequest) -> Pending:
    ids = [compose(list(map(str, one))) if isinstance(one, list) else str(one) for one in asked.ids]
    if asked.features is None:
        return desk.accept(call, ids, lambda _: None)
    rows = asked.features

    def encode(given: GivenFeatures) -> Features:
        if len(rows) != len(ids):
            raise Unusable(f"features: expected {len(ids)} rows, one for each id, got {len(rows)}")
        return given.of_rows(rows)

    return await run_in_threadpool(desk.accept, call, ids, encode)


async def _settled(pending: Pending, timeout_s: float) -> None:
    """Wait until a question is answered, or for as long as a program may have to wait."""
    if pending.answer is None:
        return
    waiting = asyncio.wrap_future(pending.answer)
    # Otherwise asyncio complains about an error that nobody has looked at.
    waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
    await asyncio.wait({waiting}, timeout=timeout_s)


def _reply(
    answer: Answer, classes: list[str] | None, run_id: str, *, numbers: bool
) -> PredictReply | NumberReply:
    found = answer.is_found
    # float32 to double and back is exact, so that the text holds every bit.
    given = answer.predicted.astype(np.float64).tolist()
    predicted = [one if known else None for one, known in zip(given, found, strict=True)]
    told: dict[str, Any] = {
        "found": found.tolist(),
        "model": [by.value for by in answer.answered_by],
        "run_id": run_id,
        "why_fallback": answer.why_fallback,
    }
    if numbers:
        return NumberReply.model_construct(values=predicted, **told)
    return PredictReply.model_construct(probabilities=predicted, classes=classes, **told)


async def _refused(_request: Request, error: Exception) -> JSONResponse:
    status = error.status if isinstance(error, RequestError) else 500
    headers = {}
    if isinstance(error, TooFast):
        headers["Retry-After"] = str(max(1, round(error.wait_s + 0.5)))
    elif status == 503:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"detail": str(error)}, status, headers)


async def _invalid(log: CallLog, _request: Request, error: Exception) -> JSONResponse:
    """Say where a request is wrong, without the values that FastAPI would repeat."""
    log.note_turned_away(PROTOCOL, 422)
    if not isinstance(error, RequestValidationError):
        return JSONResponse({"detail": "unusable"}, 422)
    problems = {_problem(found["loc"], found["msg"]) for found in error.errors()[:20]}
    return JSONResponse({"detail": "; ".join(sorted(problems))}, 422)


def _problem(place: Sequence[Any], message: str) -> str:
    """Say what is wrong at a place of a request."""
    if place[:2] == ("body", "features") and len(place) > 3:
        # Each kind of value that it could have been has an error of its own.
        name = str(place[3])[:_SHOWN_CHARACTERS]
        return (
            f"features: row {place[2] + 1}: column {name!r}: expected a number, a text, a list of "
            f"texts, or null"
        )
    return f"{'.'.join(str(part) for part in place[:3])}: {message}"


class _BodyLimit:
    """Ends the reading of a request whose body is too large."""

    def __init__(self, app: Any, most_bytes: int, log: CallLog) -> None:
        self._app = app
        self._log = log
        self._most_bytes = most_bytes

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received = 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most_bytes:
                raise _TooLargeBody
            return message

        try:
            await self._app(scope, limited, send)
        except _TooLargeBody:
            self._log.note_turned_away(PROTOCOL, TooManyIds.status)
            refusal = TooManyIds(f"the body has more than {self._most_bytes:,} bytes")
            await (await _refused(Request(scope), refusal))(scope, receive, send)


class _TooLargeBody(BaseException):
    """Passes through FastAPI, which would report an error of its own."""
