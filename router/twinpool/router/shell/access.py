"""Writes the access log without ever making a request wait: lines are kept and written once a second by a thread.

Always true: at most :data:`_LONGEST` lines are kept; when the reader of the log is slower than that, lines are dropped
and counted.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

from twinpool.router.logic.access import Entry, Sampler, line

if TYPE_CHECKING:
    from random import Random

    from twinpool.router.logic.metrics import Numbers

_LONGEST: Final = 10_000


class AccessLog:
    """The access log of one data process, on file descriptor ``output``."""

    def __init__(self, share: float, rng: Random, numbers: Numbers, output: int = 1) -> None:
        self._sampler = Sampler(share, rng)
        self._numbers = numbers
        self._output = output
        self._lines: list[bytes] = []
        self._writing: asyncio.Future[None] | None = None

    def wanted(self, status: int) -> bool:
        """Whether a request that ended with ``status`` is to be logged."""
        return self._sampler.wanted(status)

    def add(self, entry: Entry) -> None:
        """Keep a line until the next :meth:`flush`."""
        if len(self._lines) < _LONGEST:
            self._lines.append(line(entry))
        else:
            self._numbers.add("twinpool_router_access_log_dropped_total")

    def flush(self) -> None:
        """Once a second: have what was kept written, unless the last time is not over yet."""
        self._sampler.second()
        if self._lines and (self._writing is None or self._writing.done()):
            data, self._lines = b"".join(self._lines), []
            self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, data))

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._output, data) :]
        except OSError:
            return  # nobody reads the log any more
