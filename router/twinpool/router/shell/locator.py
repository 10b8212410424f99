"""Asks the control process which workers hold a prompt.

Always true: a question that is not answered in time is dropped and its request goes on without; a control process that
is behind is not asked at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from twinpool.router.shell import channel

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from twinpool.router.logic.index_exact import Held
    from twinpool.router.logic.metrics import Numbers

#: Takes what was found by endpoint id; None: there was no answer.
Listener = Callable[[Mapping[str, "Held"] | None], None]

#: An answer takes well under a millisecond; waiting longer than this costs more than a hit is worth.
_TIMEOUT: Final = 0.05
#: Bytes of questions under way, above which none is put.
_MOST: Final = 2**20


class Locator:
    """The questions of one data process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, numbers: Numbers) -> None:
        self._loop = loop
        self._numbers = numbers
        self._writer: asyncio.StreamWriter | None = None
        self._number = 0
        self._open: dict[int, tuple[Listener, asyncio.TimerHandle]] = {}

    def attach(self, writer: asyncio.StreamWriter) -> None:
        """Use this channel to the control process."""
        self._writer = writer

    def ask(self, names: tuple[int, ...], listener: Listener) -> int | None:
        """Put a question, answered later to ``listener``; return its number, or None when it cannot be put."""
        if not self._send(channel.Locate(self._number + 1, names)):
            return None
        self._number += 1
        self._open[self._number] = listener, self._loop.call_later(_TIMEOUT, self._late, self._number)
        return self._number

    def forget(self, number: int) -> None:
        """The answer is not wanted any more."""
        self._open.pop(number)[1].cancel()

    def answered(self, number: int, held: Iterable[tuple[str, Held]]) -> None:
        """Take an answer; one that came too late is nothing."""
        if number in self._open:
            listener, timer = self._open.pop(number)
            timer.cancel()
            self._numbers.add("twinpool_router_index_questions_total", ("answered",))
            listener(dict(held))

    def sent(self, endpoint: str, names: tuple[int, ...], wait: float = 0.0) -> None:
        """Say that a prompt of these blocks was sent to an endpoint, to be read there in about ``wait`` seconds."""
        self._send(channel.Sent(endpoint, names, wait))

    def _late(self, number: int) -> None:
        listener, _ = self._open.pop(number)
        self._numbers.add("twinpool_router_index_questions_total", ("late",))
        listener(None)

    def _send(self, message: channel.Locate | channel.Sent) -> bool:
        if self._writer is None or self._writer.transport.get_write_buffer_size() > _MOST:
            return False
        channel.send(self._writer, message)
        return True
