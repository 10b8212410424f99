"""Timed phases of a long run, printed as they go and summed up at the end."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(slots=True)
class Phases:
    """Prints each phase with the seconds since the start, and remembers how long each one took.

    ``clock`` returns seconds; only differences are used.
    """

    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    durations: list[tuple[str, float]] = field(default_factory=list)
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """Run the body as one phase; its duration is recorded even when it fails."""
        begin = self.clock()
        self.stream.write(f"\n[{begin - self._start:6.1f} s] {title}\n")
        self.stream.flush()
        try:
            yield
        finally:
            self.durations.append((title, self.clock() - begin))

    def say(self, text: str) -> None:
        """Print lines that belong to the current phase, indented."""
        for line in text.splitlines() or [""]:
            self.stream.write(f"           {line}\n")
        self.stream.flush()

    def summary(self) -> str:
        """Return one line a phase and the total, in seconds."""
        lines = [f"{seconds:8.1f} s  {title}" for title, seconds in self.durations]
        lines.append(f"{self.clock() - self._start:8.1f} s  in all")
        return "\n".join(lines)
