"""The HTTP endpoints of the simulated engine: those of vLLM 0.32 that a router, an operator or a user calls."""

from __future__ import annotations

import asyncio
import functools
import re
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.simulated.logic import answers, calls, faults, language
from twinpool.worker.engines.simulated.logic.answers import Reply
from twinpool.worker.engines.simulated.logic.metrics import render
from twinpool.worker.engines.simulated.shell.call import RunningCall, created, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twinpool.worker.engines.simulated.flags import Settings
    from twinpool.worker.engines.simulated.logic.engine import Engine
    from twinpool.worker.engines.simulated.shell.http import Exchange
    from twinpool.worker.engines.simulated.shell.rank import Rank

VERSION = "0.32.0+simulated"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_PATHS: dict[calls.Kind, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
#: What a client's request id may hold to become part of ours.
_REQUEST_ID = re.compile(r"^[\x21-\x7e]{1,256}$")


class App:
    """Routes requests; holds the calls that run, so that they can be ended."""

    def __init__(self, settings: Settings, ranks: Sequence[Rank]) -> None:
        self._settings = settings
        self._ranks = ranks
        self._served = calls.Served(
            settings.models, settings.limits.max_model_len, settings.connector, settings.adapters
        )
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
            **{path: ("POST", functools.partial(self._complete, kind)) for kind, path in _PATHS.items()},
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
        }
        if settings.renders:
            for kind, path in _PATHS.items():
                self._routes[f"{path}/render"] = ("POST", functools.partial(self._render, kind))

    @property
    def engine(self) -> Engine:
        """Return the first rank's engine, for its owner to look at."""
        return self._ranks[0].engine

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
        for rank in self._ranks:
            await rank.driver.idle()

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
            asked = calls.rank_of(exchange.request.headers.get("x-data-parallel-rank"), len(self._ranks))
            call = calls.parse(kind, _body(exchange), self._served)
            # As vLLM balances inside: who has the fewest requests.
            rank = min(self._ranks, key=lambda each: each.engine.unfinished) if asked is None else self._ranks[asked]
            start = functools.partial(self._start, call, exchange, wanted, rank)
            if wanted.slow:
                exchange.on_gone = asyncio.get_running_loop().call_later(wanted.slow, start).cancel
            else:
                start()

    def _faults(self, exchange: Exchange) -> faults.Faults:
        header = exchange.request.headers.get(faults.HEADER)
        if header is None:
            return self._settings.faults
        try:
            return faults.parse(header.split(","), self._settings.faults)
        except InvalidValue as error:
            raise calls.Refused(f"{faults.HEADER}: {error}") from None

    def _start(self, call: calls.Call, exchange: Exchange, wanted: faults.Faults, rank: Rank) -> None:
        given = exchange.request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.match(given) else uuid.uuid4().hex
        reply = Reply(call, request_id, created(), self._settings.host, rank.side_channel_port, rank.engine_id)
        running = RunningCall(call, reply, exchange, rank.driver, wanted, self._running)
        running.start(submit=not self._draining)

    # The rest

    def _metrics(self, exchange: Exchange) -> None:
        # As in vLLM, each rank tells the blocks of all.
        limits = self._ranks[0].engine.limits
        cache = {"block_size": limits.block_size, "num_gpu_blocks": limits.kv_blocks * len(self._ranks)}
        text = render([rank.engine.metrics for rank in self._ranks], self._settings.models[0], cache)
        exchange.respond(200, text.encode(), _TEXT)

    def _models(self, exchange: Exchange) -> None:
        main = self._settings.models[0]
        data = [
            {
                "id": model,
                "object": "model",
                "created": self._started,
                "owned_by": "vllm",
                "root": self._settings.adapters.get(model, main),
                "parent": main if model in self._settings.adapters else None,
                "max_model_len": self._settings.limits.max_model_len,
                "permission": [answers.permission(self._started)],
            }
            for model in (*self._settings.models, *self._settings.adapters)
        ]
        _json(exchange, {"object": "list", "data": data})

    def _render(self, kind: calls.Kind, exchange: Exchange) -> None:
        call = calls.parse(kind, _body(exchange), self._served)
        rendered = [
            {"request_id": uuid.uuid4().hex, "token_ids": prompt, "features": None, "model": call.model}
            for prompt in call.prompts
        ]
        exchange.respond(200, msgspec.json.encode(rendered[0] if kind == "chat" else rendered))

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
        cleared = [rank.engine.blocks.clear() for rank in self._ranks]
        exchange.respond(200 if all(cleared) else 503, b"")
        for rank in self._ranks:
            rank.driver.wake()


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
