"""Waiting for a condition with a deadline, the only way in which tests and the supervisor wait for anything."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class WaitTimeout(AssertionError):
    """The condition did not come true in time; the message holds what was seen last."""


def wait_until(condition: Callable[[], T], timeout: float, what: str, *, interval: float | None = None) -> T:
    """Call ``condition`` until its result is true, and return that result.

    Parameters
    ----------
    condition:
        What is looked at. An exception counts as "not yet" and is shown when time is up.
    timeout, interval:
        Seconds in all and between two looks. Without an interval, looks are 0.1 to 1 s apart and take a third of
        the time at most: what is waited for needs the processor too, and a look may be a start of kubectl.
    what:
        What is waited for, for the error message.

    Raises
    ------
    WaitTimeout
        Not true after ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        seen: object
        began = time.monotonic()
        try:
            result = condition()
            if result:
                return result
            seen = result
        except Exception as error:
            seen = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            raise WaitTimeout(f"{what}: not after {timeout:g} s; last seen: {seen!r}")
        now = time.monotonic()
        pause = min(max(0.1, 2 * (now - began)), 1.0) if interval is None else interval
        time.sleep(max(0.0, min(pause, deadline - now)))
