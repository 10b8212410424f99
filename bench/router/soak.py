"""Churn against one router, for as long as asked: memory must stay flat and nobody may fail who should not.

``python -m bench.router.soak --seconds 1800`` (``make soak``). Clients stream, leave in the middle, send half a
request, or ask for nonsense, over connections old and new, while workers come and go. The router's memory is compared
at one fifth of the time, when every buffer has been needed once, and at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import uvloop

from bench.harness.load import LoadFailed, answer_of
from bench.harness.server import free_port, started
from bench.router.backend import command

if TYPE_CHECKING:
    from collections.abc import Sequence

_HOST = "127.0.0.1"
_BODY = json.dumps({"model": "m", "prompt": "soak " * 40, "max_tokens": 8, "stream": True}).encode()
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: %d\r\n\r\n" % len(_BODY)
_CLIENTS = 32
_CHURN_SECONDS = 1.0
#: What the memory may grow by from one fifth of the time to the end: noise of the allocator, in MiB and as a share.
_ALLOWED_MIB, _ALLOWED_SHARE = 4.0, 0.05


@dataclass
class Outcome:
    """What a soak has shown. Memory in MiB, of the router's processes together."""

    seconds: float = 0.0
    answered: int = 0
    left: int = 0
    failed: int = 0
    early_mib: float = 0.0
    late_mib: float = 0.0
    in_flight: float = 0.0
    samples: list[float] = field(default_factory=list)

    @property
    def flat(self) -> bool:
        """Whether the memory stayed where it was."""
        return self.late_mib <= self.early_mib * (1 + _ALLOWED_SHARE) + _ALLOWED_MIB

    @property
    def passed(self) -> bool:
        """Whether the memory is flat, nobody failed and nothing is left in the books."""
        return self.flat and not self.failed and not self.in_flight and self.answered > 0


def memory_mib(root: int) -> float:
    """Return the resident memory of a process and its children."""
    total = 0.0
    for pid in [root, *_children(root)]:
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += next(float(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
    return total


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def soak(seconds: float) -> Outcome:
    """Run engines, a router and the churn for ``seconds``."""
    with contextlib.ExitStack() as stack:
        engines: list[dict[str, object]] = []
        for role in ("prefill", "prefill", "decode", "decode", "decode"):
            port = free_port()
            stack.enter_context(started(command(port, 8), host=_HOST, port=port))
            engines.append({"role": role, "host": _HOST, "port": port})
        listed = Path(stack.enter_context(TemporaryDirectory())) / "workers.json"
        listed.write_text(json.dumps(engines))
        port, admin = free_port(), free_port()
        argv = [sys.executable, "-m", "twinpool.router", "--endpoints", str(listed), "--model", "m"]
        argv += ["--port", str(port), "--admin-port", str(admin), "--lame-duck", "0"]
        pid = stack.enter_context(started(argv, host=_HOST, port=port))
        return uvloop.run(_Soak(pid, port, admin, listed, engines).run(seconds))


class _Soak:
    def __init__(self, pid: int, port: int, admin: int, listed: Path, engines: list[dict[str, object]]) -> None:
        self._pid, self._port, self._admin = pid, port, admin
        self._listed, self._engines = listed, engines
        self._outcome = Outcome()
        self._end = 0.0
        self._rng = random.Random(1)

    async def run(self, seconds: float) -> Outcome:
        await self._until_serving()
        start = time.monotonic()
        self._end = start + seconds
        await asyncio.gather(self._watch(), self._churn(), *(self._client() for _ in range(_CLIENTS)))
        outcome = self._outcome
        outcome.seconds = time.monotonic() - start
        await asyncio.sleep(2.0)  # two reports of the data process
        outcome.in_flight = await self._in_flight()
        fifth = max(1, len(outcome.samples) // 5)
        outcome.early_mib = max(outcome.samples[:fifth])
        outcome.late_mib = outcome.samples[-1]
        return outcome

    async def _until_serving(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, LoadFailed):
                reader, writer = await asyncio.open_connection(_HOST, self._port)
                writer.write(_HEAD + _BODY)
                await answer_of(reader)
                writer.close()
                return
            await asyncio.sleep(0.1)
        raise LoadFailed(f"the router on port {self._port} does not answer", "start it by hand")

    async def _watch(self) -> None:
        while time.monotonic() < self._end:
            await asyncio.sleep(0.5)
            self._outcome.samples.append(memory_mib(self._pid))

    async def _churn(self) -> None:
        """Take one worker after another out of the list and put it back: one of each role always stays."""
        while time.monotonic() < self._end:
            out = self._rng.choice((None, self._engines[0], self._engines[2], self._engines[3]))
            self._listed.write_text(json.dumps([engine for engine in self._engines if engine is not out]))
            await asyncio.sleep(_CHURN_SECONDS)

    async def _client(self) -> None:
        while time.monotonic() < self._end:
            reader, writer = await asyncio.open_connection(_HOST, self._port)
            with contextlib.suppress(ConnectionError):
                for _ in range(self._rng.randrange(1, 20)):
                    if not await self._one(reader, writer):
                        break
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Do something; return whether the connection is still good."""
        what = self._rng.random()
        if what < 0.1:
            writer.write((_HEAD + _BODY)[: self._rng.randrange(len(_HEAD + _BODY))])
            await asyncio.sleep(0.001)
        elif what < 0.2:
            writer.write(_HEAD + _BODY)
            await asyncio.sleep(self._rng.random() * 0.003)
        elif what < 0.22:
            writer.write(b"GET /nothing HTTP/9.9\r\n\r\n")
            await reader.read(100)
        else:
            writer.write(_HEAD + _BODY)
            try:
                await answer_of(reader)
            except (LoadFailed, asyncio.IncompleteReadError):
                self._outcome.failed += 1
                return False
            self._outcome.answered += 1
            return True
        self._outcome.left += 1
        return False

    async def _in_flight(self) -> float:
        reader, writer = await asyncio.open_connection(_HOST, self._admin)
        writer.write(b"GET /metrics HTTP/1.1\r\nhost: r\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        names = ("twinpool_router_requests_in_flight{", "twinpool_router_handoffs_unpulled{")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(names))


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the soak has shown; return 0 when it passed, else 1."""
    parser = argparse.ArgumentParser(prog="bench.router.soak", description="Churn against one router: is memory flat?")
    parser.add_argument("--seconds", type=float, default=1800.0, help="default: half an hour")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    arguments = parser.parse_args(argv)
    print(f"soaking for {arguments.seconds:g} s ...", file=sys.stderr, flush=True)
    outcome = soak(arguments.seconds)
    if arguments.output == "json":
        print(json.dumps({**asdict(outcome), "passed": outcome.passed}))
    else:
        print(
            f"{'passed' if outcome.passed else 'FAILED'} after {outcome.seconds:.0f} s: {outcome.answered} answered, "
            f"{outcome.left} left in the middle, {outcome.failed} failed, {outcome.in_flight:g} left in the books; "
            f"memory {outcome.early_mib:.1f} MiB at one fifth of the time, {outcome.late_mib:.1f} MiB at the end"
        )
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())
