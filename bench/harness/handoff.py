"""One request over two engines, as routers do it: prefill, then decode with the parameters that prefill gave.

Times are those of the client (``time.monotonic``, seconds). Nothing is retried: a benchmark of failures would be a lie.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.harness.load import LoadFailed, head_of
from twinpool.core.protocol import ENGINE_PORT

if TYPE_CHECKING:
    from random import Random

_PATH = "/v1/completions"
_ASK = {"do_remote_decode": True, "do_remote_prefill": False}
_PARAMETERS = "kv_transfer_params"


@dataclass(slots=True)
class Answer:
    """When a request was sent, was prefilled, and each of its tokens came."""

    prompt: int
    output: int
    sent: float
    prefilled: float = 0.0
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Return the time to the first token."""
        return self.tokens[0] - self.sent

    @property
    def itl(self) -> float:
        """Return the mean time between tokens."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, self.output - 1)


def prompt_of(count: int, dice: Random) -> list[int]:
    """Return ``count`` random token ids of the tiny model, so that no cache helps."""
    return [dice.randrange(100, 2000) for _ in range(count)]


async def handed_off(prefill: str, decode: str, prompt: list[int], output: int) -> Answer:
    """Have ``prefill`` read the prompt and ``decode`` write ``output`` tokens.

    Raises
    ------
    LoadFailed
        When an engine answers anything but what was asked for.
    """
    answer = Answer(len(prompt), output, time.monotonic())
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": 1}
    found = await prefilled(prefill, {**body, _PARAMETERS: _ASK})
    answer.prefilled = time.monotonic()
    wanted = {**body, "max_tokens": output, "stream": True, _PARAMETERS: found[_PARAMETERS]}
    await _streamed(decode, wanted, answer)
    return answer


async def prefilled(host: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return a whole answer."""
    reader, writer = await _asked(host, body)
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if line)
    found: dict[str, Any] = json.loads(await reader.readexactly(int(fields["content-length"])))
    writer.close()
    if not head.startswith(b"HTTP/1.1 200"):
        raise LoadFailed(f"{host} refused a prompt: {found}", "look at the engine's own output")
    return found


async def _streamed(host: str, body: dict[str, Any], answer: Answer) -> None:
    reader, writer = await _asked(host, body)
    line = head = await reader.readline()
    while line and not line.startswith(b"data: [DONE]"):
        line = await reader.readline()
        # Where the client is late, one event may hold two tokens.
        if line.startswith(b"data: {"):
            answer.tokens.append(time.monotonic())
    writer.close()
    if not head.startswith(b"HTTP/1.1 200") or not line or not answer.tokens:
        raise LoadFailed(f"{host} did not write to the end: {head!r}", "look at the engine's own output")


async def _asked(host: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(host, ENGINE_PORT)
    text = json.dumps(body).encode()
    writer.write(b"%b%d\r\n\r\n%b" % (head_of(host, _PATH), len(text), text))
    return reader, writer
