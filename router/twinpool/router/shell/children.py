"""The data processes as the control process sees them: started, spoken to, started again when they die."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from typing import TYPE_CHECKING

from twinpool.router.logic import arrivals
from twinpool.router.logic.arrivals import Arrivals
from twinpool.router.logic.metrics import Numbers, counters_only, keep_workers, total
from twinpool.router.shell import channel

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from twinpool.router.logic.ledger import Load

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0
#: A process that lived shorter than this is started again more slowly each time.
_STABLE_SECONDS = 10.0
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.1, 5.0


class Child:
    """One data process; it is replaced for ever, until :meth:`drain`."""

    def __init__(
        self,
        listener: socket.socket,
        greeting: Callable[[], tuple[channel.Down, ...]],
        asked: Callable[[Child, channel.Locate | channel.Sent], None],
    ) -> None:
        self._listener = listener
        self._greeting = greeting
        self._asked = asked
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._retired = Numbers()
        self._last = Numbers()
        self._retired_arrivals = Arrivals()
        self._last_arrivals = Arrivals()
        self._answers: dict[int, asyncio.Event] = {}
        self._looks: dict[int, asyncio.Future[channel.State]] = {}
        self._draining = False
        self.loads: list[tuple[str, Load]] = []
        #: Kept over a new start: what caches were good for does not change with the process that saw it.
        self.warmth: dict[str, int] = {}
        self.up = False
        #: What it has learnt of predictions.
        self.foresight: dict[str, tuple[float, int]] = {}
        #: Whether it found that engines read other tokens than the renderers make.
        self.distrusts = False
        #: Of the last report: open connections, and the CPU seconds used until then.
        self.clients = 0
        self.cpu = 0.0

    @property
    def numbers(self) -> Numbers:
        """What this process and its predecessors counted."""
        return total((self._retired, self._last))

    @property
    def arrivals(self) -> Arrivals:
        """The work that came to this process and its predecessors."""
        return arrivals.total((self._retired_arrivals, self._last_arrivals))

    async def run(self) -> None:
        """Keep a data process running; return after a drain, when it has ended."""
        backoff = _FIRST_BACKOFF
        loop = asyncio.get_running_loop()
        while not self._draining:
            started = loop.time()
            code = await self._run_once()
            if self._draining:
                return
            self._retired.add("twinpool_router_data_process_restarts_total")
            log.error("a data process ended with code %s and is started again; its requests are lost", code)
            backoff = _FIRST_BACKOFF if loop.time() - started > _STABLE_SECONDS else min(2 * backoff, _LONGEST_BACKOFF)
            await asyncio.sleep(backoff)

    async def _run_once(self) -> int:
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = (self._listener.fileno(), theirs.fileno())
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "twinpool.router.shell.dataplane", *map(str, numbers), pass_fds=numbers
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        for greeting in self._greeting():
            channel.send(self._writer, greeting)
        if self._draining:
            self.drain(0.0, 0.0)
        while (data := await channel.receive(reader)) is not None:
            message = channel.decode_up(data)
            if isinstance(message, channel.Report):
                self._take(message)
            elif isinstance(message, channel.Here):
                self.loads = message.loads
            elif isinstance(message, channel.State):
                looked = self._looks.pop(message.number, None)
                if looked is not None and not looked.done():
                    looked.set_result(message)
            else:
                self._asked(self, message)
        self.up = False
        self._writer.close()
        self._writer = None
        self._retired, self._last, self.loads = total((self._retired, counters_only(self._last))), Numbers(), []
        self._retired_arrivals, self._last_arrivals = self.arrivals, Arrivals()
        return await self._process.wait()

    def _take(self, report: channel.Report) -> None:
        self.up = True
        self._last, self.loads, self.warmth = report.numbers, report.loads, report.warmth
        self._last_arrivals = report.arrivals
        self.clients, self.cpu = report.clients, report.cpu
        self.foresight = report.foresight
        self.distrusts = report.distrusts
        answered = self._answers.pop(report.number, None)
        if answered is not None:
            answered.set()

    def keep_workers(self, workers: Container[str]) -> None:
        """Forget what predecessors counted of workers that are gone."""
        keep_workers(self._retired, workers)

    def tell(self, message: channel.Down) -> None:
        """Send a message; a process that is just being started gets the present state with its greeting instead."""
        if self._writer is not None:
            channel.send(self._writer, message)

    def drain(self, lame_duck: float, timeout: float) -> None:
        """Ask the process to end in peace; it is not started again."""
        self._draining = True
        self.tell(channel.Drain(lame_duck, timeout))

    def kill(self) -> None:
        """End the process now."""
        self._draining = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def refresh(self, number: int) -> bool:
        """Get a report of this moment, or settle for the last one; return whether it is of this moment.

        A process that is just being replaced has nothing in flight, and takes no request before it has the endpoints.
        """
        if self._writer is None:
            return True
        answered = self._answers[number] = asyncio.Event()
        self.tell(channel.Ask(number))
        try:
            await asyncio.wait_for(answered.wait(), _ANSWER_SECONDS)
        except TimeoutError:
            self._answers.pop(number, None)
            return self._writer is None
        return True

    async def look(self, number: int, decisions: bool) -> channel.State | None:
        """Ask what the process is at, and for its choices; None when it does not answer in time."""
        looked = self._looks[number] = asyncio.get_running_loop().create_future()
        self.tell(channel.Look(number, decisions))
        try:
            return await asyncio.wait_for(looked, _ANSWER_SECONDS)
        except TimeoutError:
            return None
        finally:
            self._looks.pop(number, None)
