"""What a client is told when it gets no answer: the OpenAI error shape, with an honest status code.

Every answer of the router's own that is an error is a :class:`Refusal`; an engine's error passes through untouched.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from twinpool.core.errors import TwinpoolError

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    417: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    501: "invalid_request_error",
    503: "service_unavailable_error",
    505: "invalid_request_error",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that the router gives itself.

    ``code`` is a stable word for programs, ``message`` says what is wrong and what to do, ``retry_after`` (seconds)
    is sent when waiting helps.
    """

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after: int | None = None
    #: What a 405 allows.
    allow: str | None = None


UNAVAILABLE = Refusal(
    503,
    "no_worker",
    "No decode worker of this pool is ready. Wait and try again; 'kubectl get tpool' shows what the pool waits for.",
    retry_after=5,
)
FAILED = Refusal(
    502, "worker_failed", "The workers failed before they answered, also on another try. Send the request again."
)
NO_PREFILL = Refusal(
    503,
    "no_prefill",
    "No prefill worker could read this prompt, and the pool's handoff.onPrefillFailure is 'fail'. Send the request "
    "again in a moment.",
    retry_after=1,
)
BROKEN = Refusal(
    502, "worker_lost", "The worker was lost in the middle of this answer, which is incomplete. Send the request again."
)


def over_limit(seconds: float) -> Refusal:
    """Return the refusal of a key that has asked for as much as it may; it may ask again after so many seconds."""
    message = "This API key has asked for more than the pool's routing.auth.limit allows. Try again later."
    return Refusal(429, "key_limit", message, retry_after=math.ceil(seconds))


class Refused(TwinpoolError):
    """Raised where a request cannot be served; carries the answer."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def error_body(refusal: Refusal) -> bytes:
    """Return the JSON body of a refusal, as OpenAI clients expect it."""
    error = {
        "message": refusal.message,
        "type": _TYPES.get(refusal.status, "server_error"),
        "param": refusal.param,
        "code": refusal.code,
    }
    return json.dumps({"error": error}, separators=(",", ":")).encode()


def error_event(refusal: Refusal) -> bytes:
    """Return the server-sent event that ends a stream which cannot be completed; no ``[DONE]`` follows it."""
    return b"data: " + error_body(refusal) + b"\n\n"
