"""Events for the main loop, from other threads, with a wake-up that signals trigger too.

Waiting on a lock is not enough: a signal that arrives just before the wait, or on another thread, leaves the main
thread asleep, and only that one runs Python's signal handlers. Python's wake-up descriptor has neither gap.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
from collections import deque
from typing import Any


class Inbox:
    """A queue that one thread waits on and any thread adds to."""

    def __init__(self) -> None:
        self._events: deque[Any] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def wake_on_signals(self) -> None:
        """End the wait when a signal with a Python handler comes. Call it in the main thread."""
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)

    def put(self, event: Any) -> None:
        """Add an event and end the wait."""
        self._events.append(event)
        # A full buffer wakes as well as one more byte; a closed one belongs to a launcher that is leaving.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    def take(self, timeout: float | None) -> Any | None:
        """Return the oldest event, waiting up to ``timeout`` seconds; None when a signal or the time ended the wait."""
        if not self._events:
            select.select([self._reader], [], [], timeout)
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)
        return self._events.popleft() if self._events else None

    def close(self) -> None:
        """Give the descriptors back."""
        signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()
