"""The HTTP endpoints of the simulated engine: those of vLLM 0.32 that a router, an operator or a user calls."""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.simulated.logic import answers, calls, faults, language
from twinpool.worker.engines.simulated.logic.answers import Reply
from twinpool.worker.engines.simulated.shell.call import RunningCall, created, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.worker.engines.simulated.flags import Settings
    from twinpool.worker.engines.simulated.logic.engine import Engine
    from twinpool.worker.engines.simulated.shell.driver import Driver
    from twinpool.worker.engines.simulated.shell.http import Exchange

VERSION = "0.32.0+simulated"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
#: What a client's request id may hold to become part of ours.
_REQUEST_ID = re.compile(r"^[\x21-\x7e]{1,256}$")


class App:
    """Routes requests; holds the calls that run, so that they can be ended."""

    def __init__(self, settings: Settings, driver: Driver, engine_id: str) -> None:
        self._settings = settings
        self._driver = driver
        self._engine_id = engine_id
        self._served = calls.Served(settings.models, settings.limits.max_model_len, settings.connector)
        self._running: set[RunningCall] = set()
        self._draining = False
        self._started = created()
        self._routes: dict[str, tuple[str, Callable[[Exchange], None]]] = {
            "/health": ("GET", _empty),
            "/ping": ("GET", _empty),
            "/version": ("GET", lambda exchange: _json(exchange, {"version": VERSION})),
            "/load": ("GET", lambda exchange: _json(exchange, {"server_load": len(self._running)})),
            "/metrics": ("GET", self._metrics),
            "/v1/models": ("GET", self._models),
            "/v1/chat/completions": ("POST", lambda exchange: self._complete("chat", exchange)),
            "/v1/completions": ("POST", lambda exchange: self._complete("completions", exchange)),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
        }

    @property
    def engine(self) -> Engine:
        """Return the engine itself, for its owner to look at."""
        return self._driver.engine

    def handle(self, exchange: Exchange) -> None:
        """Serve one request; every problem becomes an answer."""
        try:
            self._route(exchange)
        except calls.Refused as refused:
            _json(exchange, refused.body(), refused.status)

    def drain(self) -> None:
        """Start nothing new: as in vLLM, new calls are answered at once with the finish reason ``abort``."""
        self._draining = True

    async def idle(self) -> None:
        """Wait until no call is unfinished."""
        await self._driver.idle()

    def end(self) -> None:
        """End every call where it stands."""
        for call in tuple(self._running):
            call.end()

    def _route(self, exchange: Exchange) -> None:
        method, handler = self._routes.get(exchange.request.path, ("", _empty))
        asked = "GET" if exchange.request.method == "HEAD" else exchange.request.method
        if not method:
            _json(exchange, {"detail": "Not Found"}, 404)
        elif asked != method:
            _json(exchange, {"detail": "Method Not Allowed"}, 405)
        else:
            handler(exchange)

    # Completions

    def _complete(self, kind: calls.Kind, exchange: Exchange) -> None:
        wanted = self._faults(exchange)
        if wanted.reset:
            exchange.reset()
        elif wanted.status is not None:
            refused = calls.Refused("this error was asked for", wanted.status, "SimulatedFault")
            _json(exchange, refused.body(), refused.status)
        elif not wanted.hang:
            calls.check_rank(exchange.request.headers.get("x-data-parallel-rank"))
            call = calls.parse(kind, _body(exchange), self._served)
            if wanted.slow:
                self._start_later(call, exchange, wanted)
            else:
                self._start(call, exchange, wanted)

    def _faults(self, exchange: Exchange) -> faults.Faults:
        header = exchange.request.headers.get(faults.HEADER)
        if header is None:
            return self._settings.faults
        try:
            return faults.parse(header.split(","), self._settings.faults)
        except InvalidValue as error:
            raise calls.Refused(f"{faults.HEADER}: {error}") from None

    def _start_later(self, call: calls.Call, exchange: Exchange, wanted: faults.Faults) -> None:
        timer = asyncio.get_running_loop().call_later(wanted.slow, lambda: self._start(call, exchange, wanted))
        exchange.on_gone = timer.cancel

    def _start(self, call: calls.Call, exchange: Exchange, wanted: faults.Faults) -> None:
        given = exchange.request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
        host, port = self._settings.host, self._settings.side_channel_port
        reply = Reply(call, request_id, created(), host, port, self._engine_id)
        running = RunningCall(call, reply, exchange, self._driver, wanted, self._running)
        running.start(submit=not self._draining)

    # The rest

    def _metrics(self, exchange: Exchange) -> None:
        text = self._driver.engine.metrics.render(self._settings.models[0])
        exchange.respond(200, text.encode(), _TEXT)

    def _models(self, exchange: Exchange) -> None:
        main = self._settings.models[0]
        data = [
            {
                "id": model,
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": main,
                "parent": None,
                "max_model_len": self._settings.limits.max_model_len,
                "permission": [answers.permission(self._started)],
            }
            for model in self._settings.models
        ]
        _json(exchange, {"object": "list", "data": data})

    def _tokenize(self, exchange: Exchange) -> None:
        body = _object(exchange)
        calls.named_model(body, self._served)
        tokens = calls.prompt_of(body)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._settings.limits.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if body.get("return_token_strs"):
            answer["token_strs"] = [language.decode((token,)) for token in tokens]
        _json(exchange, answer)

    def _detokenize(self, exchange: Exchange) -> None:
        body = _object(exchange)
        calls.named_model(body, self._served)
        _json(exchange, {"prompt": language.decode(calls.tokens_of(body))})

    def _reset_prefix_cache(self, exchange: Exchange) -> None:
        exchange.respond(200 if self._driver.engine.blocks.clear() else 503, b"")
        self._driver.wake()


def _empty(exchange: Exchange) -> None:
    exchange.respond(200, b"", "")


def _json(exchange: Exchange, body: dict[str, Any], status: int = 200) -> None:
    exchange.respond(status, encode(body))


def _body(exchange: Exchange) -> object:
    try:
        return msgspec.json.decode(exchange.request.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise calls.Refused(f"The body is not JSON: {error}", param="body") from None


def _object(exchange: Exchange) -> dict[str, Any]:
    body = _body(exchange)
    if not isinstance(body, dict):
        raise calls.Refused("The body must be a JSON object.")
    return body
