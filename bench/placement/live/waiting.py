"""Waiting for a state of the cluster with a deadline, in a loop that does other things meanwhile."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

from twinpool.localcluster.waiting import WaitTimeout

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
#: Seconds between two looks.
LOOK = 0.2


async def until(
    look: Callable[[], Awaitable[T]], done: Callable[[T], bool], patience: float, tell: Callable[[T], str]
) -> T:
    """Look until what is seen is ``done``, and return it.

    Raises
    ------
    WaitTimeout
        Not within ``patience`` seconds; ``tell`` puts what was seen last into words.
    """
    end = time.monotonic() + patience
    while True:
        seen = await look()
        if done(seen):
            return seen
        if time.monotonic() > end:
            raise WaitTimeout(f"not after {patience:.0f} s: {tell(seen)}")
        await asyncio.sleep(LOOK)
