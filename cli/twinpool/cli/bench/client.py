"""Sends requests and notes when each piece of an answer came. The shell of ``twinpool bench``."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp

from twinpool.cli.bench.judge import Sample
from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from twinpool.cli.bench.arrivals import Planned

#: Longest line of a stream that is read; engines send one event in each.
_LINE = 4 * 2**20
_CONNECT_SECONDS = 10.0


class NoEndpoint(TwinpoolError):
    """Nothing that speaks OpenAI's interface answers at the address."""


class Endpoint:
    """An OpenAI-compatible endpoint, asked for streamed completions of token ids."""

    def __init__(self, url: str, model: str, api_key: str, timeout: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._timeout = timeout
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    async def __aenter__(self) -> Endpoint:
        """Open connections as they are needed, any number."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=_CONNECT_SECONDS),
            headers=self._headers,
            read_bufsize=_LINE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._session.close()

    async def find_model(self) -> str:
        """Return the model to ask for: the one that was given, or the first one that is served.

        Raises
        ------
        NoEndpoint
            When nothing answers, or not as OpenAI's interface does.
        """
        address = f"{self._url}/v1/models"
        try:
            async with self._session.get(address) as answer:
                if answer.status != 200:
                    raise NoEndpoint(
                        f"{address} answers {answer.status}: {(await answer.text())[:200]}",
                        "check address and key (--api-key-env)",
                    )
                served = [str(one["id"]) for one in (await answer.json(content_type=None))["data"]]
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError) as error:
            raise NoEndpoint(
                f"{address} does not answer as OpenAI's interface: {str(error) or type(error).__name__}",
                "check the address; for a pool: kubectl port-forward service/POOL-router 8000:80",
            ) from None
        if not served:
            raise NoEndpoint(f"{address} lists no model", "look at `twinpool status`, or give --model")
        self.model = self.model or served[0]
        return self.model

    async def send(self, prompt: Sequence[int], output: int, due: float) -> Sample:
        """Ask for an answer of ``output`` tokens and return what came of it; failures are samples, too."""
        clock = asyncio.get_running_loop().time
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": output, "min_tokens": output, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        sent, events, usage = clock(), [], {}  # type: float, list[float], dict[str, Any]
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                error = "" if answer.status == 200 else _refusal(answer.status, await answer.content.read(65536))
                done = bool(error)
                while not done:
                    line = await answer.content.readline()
                    if not line:
                        error, done = "cut off", True
                    elif line.startswith(b"data:"):
                        error, done = _event(line[5:].strip(), clock(), events, usage)
        except TimeoutError:
            error = "timeout"
        except aiohttp.ClientConnectorError:
            error = "no connection"
        except (aiohttp.ClientError, OSError, ValueError) as problem:
            error = f"broken: {type(problem).__name__}"
        if not error and not events:
            error = "empty answer"
        tokens = int(usage.get("completion_tokens") or len(events))
        return Sample(due, sent, clock(), tuple(events), tokens, int(usage.get("prompt_tokens") or 0), error)


def _event(data: bytes, now: float, events: list[float], usage: dict[str, Any]) -> tuple[str, bool]:
    """Note one event of a stream; return what is wrong with it, and whether it is the last one."""
    if data == b"[DONE]":
        return "", True
    event = json.loads(data)
    if "error" in event:
        return f"error in the stream: {_code(event)}", True
    if event.get("choices"):
        events.append(now)
    usage.update(event.get("usage") or {})
    return "", False


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"HTTP {status} {_code(json.loads(body))}".rstrip()
    except ValueError:
        return f"HTTP {status}"


def _code(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("code") or error.get("type") or "") if isinstance(error, dict) else ""


async def open_loop(
    plan: Sequence[Planned], send: Callable[[int, Planned, float], Awaitable[Sample]], told: Callable[[Sample], None]
) -> None:
    """Send each request at its moment, whatever became of those before it; ``told`` hears of each end."""
    clock = asyncio.get_running_loop().time
    begin = clock()

    async def one(number: int, request: Planned, due: float) -> None:
        told(await send(number, request, due))

    async with asyncio.TaskGroup() as running:
        for number, request in enumerate(plan):
            due = begin + request.at
            await asyncio.sleep(due - clock())
            running.create_task(one(number, request, due))


async def closed_loop(
    plan: Sequence[Planned],
    concurrency: int,
    send: Callable[[int, Planned, float], Awaitable[Sample]],
    told: Callable[[Sample], None],
) -> None:
    """Keep ``concurrency`` requests running until all of the plan are answered."""
    clock = asyncio.get_running_loop().time
    waiting = iter(enumerate(plan))

    async def client() -> None:
        for number, request in waiting:
            told(await send(number, request, clock()))

    async with asyncio.TaskGroup() as running:
        for _ in range(concurrency):
            running.create_task(client())
