"""What a path means: answered here, refused, or sent to a worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from twinpool.router.logic.errors import Refusal, Refused
from twinpool.router.logic.headers import forward
from twinpool.router.logic.request import Route, read, with_adapter, with_model
from twinpool.router.shell.call import Call

if TYPE_CHECKING:
    from twinpool.core.protocol import RouterConfig
    from twinpool.router.shell.parsing import Incoming

HEALTH: Final = b"/health"
MODELS: Final = b"/v1/models"
_WORKER_ROUTES: Final = {route.value.encode(): route for route in Route}
_LABELS: Final = {
    **{path: route.value for path, route in _WORKER_ROUTES.items()},
    HEALTH: "/health",
    MODELS: "/v1/models",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A JSON answer of the router's own."""

    status: int
    body: bytes
    route: str


def label(target: bytes) -> str:
    """Return the ``route`` label of a request target: one of the known paths, or ``other``."""
    return _LABELS.get(target) or _LABELS.get(path_of(target), "other")


def path_of(target: bytes) -> bytes:
    """Return the path of a request target, also of one in absolute form."""
    path = target.partition(b"?")[0]
    if path[:7].lower() == b"http://":
        path = b"/" + path[7:].partition(b"/")[2]
    return path


def models_answer(config: RouterConfig, created: int) -> bytes:
    """Return the body of ``GET /v1/models``; ``created`` is in seconds since the epoch."""
    root = config.models[0]
    data = [
        {"id": name, "object": "model", "created": created, "owned_by": "twinpool", "root": root}
        for name in config.models
    ]
    data += [
        {"id": name, "object": "model", "created": created, "owned_by": "twinpool", "root": name, "parent": root}
        for name in config.adapters
    ]
    return json.dumps({"object": "list", "data": data}, separators=(",", ":")).encode()


def dispatch(
    incoming: Incoming,
    config: RouterConfig,
    *,
    models: bytes,
    draining: bool,
    now: float,
    new_id: bytes,
    hide_keys: bool = False,
) -> Answer | Call:
    """Decide what to do with a request.

    Raises
    ------
    Refused
        When it is answered with an error.
    """
    target = path = incoming.target
    route = _WORKER_ROUTES.get(target)
    if route is None:  # not as everybody writes it
        path = path_of(target)
        route = _WORKER_ROUTES.get(path)
        query = target.partition(b"?")
        target = path + query[1] + query[2]
    if route is None:
        return _own(path, incoming.method, models, draining)
    if incoming.method != b"POST":
        raise Refused(_wrong_method(path, "POST"))
    request = read(route, incoming.body)
    if request.model is not None and request.model in config.adapters:
        request = with_adapter(request)
    elif request.model is not None and request.model not in config.models:
        known = ", ".join(repr(name) for name in (*config.models, *config.adapters))
        message = f"The model {request.model[:256]!r} does not exist. This pool serves {known}."
        raise Refused(Refusal(404, "model_not_found", message, param="model"))
    elif request.model is not None and request.model != config.models[0]:
        request = with_model(request, config.models[0])
    forwarded = forward(incoming.headers, new_id, incoming.own, hide_keys=hide_keys, traces=bool(config.tracing_url))
    return Call(route, target, forwarded, request, now, incoming.key)


def _own(path: bytes, method: bytes, models: bytes, draining: bool) -> Answer:
    if path not in (HEALTH, MODELS):
        known = ", ".join([*(route.value for route in Route), MODELS.decode(), HEALTH.decode()])
        message = f"There is nothing at {path[:256].decode('latin-1')!r}. Known paths: {known}."
        raise Refused(Refusal(404, "unknown_path", message))
    if method != b"GET":
        raise Refused(_wrong_method(path, "GET"))
    if path == MODELS:
        return Answer(200, models, MODELS.decode())
    if draining:
        return Answer(503, b'{"status":"draining"}', HEALTH.decode())
    return Answer(200, b'{"status":"ok"}', HEALTH.decode())


def _wrong_method(path: bytes, allowed: str) -> Refusal:
    return Refusal(405, "method_not_allowed", f"{path.decode()} takes {allowed} only.", allow=allowed)
