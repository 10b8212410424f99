"""Progress of long work: one line per step on standard error, with the seconds since the start."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Prints steps as they begin. Made quiet by ``stream=None``."""

    def __init__(self, stream: TextIO | None = sys.stderr) -> None:
        self._stream = stream
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """Print one line at once."""
        if self._stream is not None:
            print(f"[{self.seconds:6.1f} s] {text}", file=self._stream, flush=True)
