"""Signs of life from work that says nothing for minutes."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.progress import Progress

#: Seconds between two signs.
INTERVAL = 15.0


@contextlib.contextmanager
def heartbeat(progress: Progress, what: str, interval: float = INTERVAL) -> Iterator[None]:
    """Say every ``interval`` seconds that ``what`` still goes on, while the body runs."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(interval):
            progress.say(f"  still {what}")

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
