"""
What the door says when it cannot serve, and how llama-server's errors become ours.

    Refused              the request never reached the engine, or the engine refused it: status, code, message
    └── Busy             the line is full: 429 with Retry-After

Every body has the shape of OpenAI's errors; /v1/messages has Anthropic's. llama-server answers 500 both for
requests it cannot read and for work that failed; only a few of its messages are about work, the rest is 400.
"""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from backbone.errors import BackboneError, EngineDown

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
}
CODES = {400: "invalid_request", 404: "not_found", 405: "method_not_allowed", 501: "not_supported"}
WORK_FAILED = (  # beginnings and parts of what llama-server says when computing itself failed
    "compute error",
    "invalid input batch",
    "failed to decode",
    "failed to process",
    "failed to find free space",
    "input batch size",
    "bad_alloc",
    "out of memory",
    "context size has been exceeded",
)
TOO_LONG = "exceed_context_size_error"


class Refused(BackboneError):
    """An answer that is no success; `message` is safe to show."""

    def __init__(self, status: int, code: str, message: str, retry_after_s: int | None = None) -> None:
        self.status = status
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s
        super().__init__(message)


class Busy(Refused):
    """The line is full."""

    def __init__(self, what: str, retry_after_s: int) -> None:
        super().__init__(429, "overloaded", f"{what}; come back in {retry_after_s} s", retry_after_s)


def bad_request(message: str) -> Refused:
    return Refused(400, "invalid_request", message)


def engine_down(why: str) -> Refused:
    return Refused(503, EngineDown.code, why, retry_after_s=2)


def body_of(exc: Refused, path: str = "") -> dict[str, Any]:
    """Give the error in the words of the API that was asked."""
    otherwise = "invalid_request_error" if exc.status < 500 else "server_error"
    error = {"message": exc.message, "type": KINDS.get(exc.status, otherwise), "code": exc.code}
    if path.startswith("/v1/messages"):
        return {"type": "error", "error": error}
    return {"error": error}


def response(exc: Refused, path: str = "") -> JSONResponse:
    headers = {"cache-control": "no-store"}
    if exc.status == 401:
        headers["www-authenticate"] = "Bearer"
    if exc.retry_after_s is not None:
        headers["retry-after"] = str(exc.retry_after_s)
    return JSONResponse(body_of(exc, path), status_code=exc.status, headers=headers)


def event(exc: Refused, path: str) -> bytes:
    """Give the error as an event of a stream whose status was sent long ago."""
    name = "event: error\n" if path.startswith(("/v1/messages", "/v1/responses", "/responses")) else ""
    return f"{name}data: {json.dumps(body_of(exc, path))}\n\n".encode()


def from_engine(status: int, body: bytes, cause: str | None) -> Refused:
    """
    Translate an error of llama-server.

    cause: why a layer call of this request failed, if one did; it says more than "Compute error.".
    """
    said, kind = _said(body)
    if cause is not None and status >= 500:
        return Refused(500, "engine_error", f"the engine could not compute this: {cause}")
    if status in (401, 403):  # our own key towards the engine: nothing the client can do about
        return Refused(500, "engine_error", "the engine does not accept the door's key")
    if status == 500:
        if any(part in said.lower() for part in WORK_FAILED):
            return Refused(500, "engine_error", f"the engine could not compute this: {said}")
        return Refused(400, "invalid_request", said)
    code = "context_length_exceeded" if kind == TOO_LONG else CODES.get(status, "engine_error")
    return Refused(status, code, said)


def _said(body: bytes) -> tuple[str, str]:
    """Give message and type of the engine's error body, or the body itself when it is no such thing."""
    try:
        error = json.loads(body)["error"]
        if isinstance(error, Mapping):
            return str(error["message"])[:4000], str(error.get("type", ""))
        return str(error)[:4000], ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return body.decode("utf-8", "replace")[:1000], ""
