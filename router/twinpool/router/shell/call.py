"""A request that was understood and is to go to a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from twinpool.router.logic.headers import Forwarded
    from twinpool.router.logic.request import Request, Route


class Call(msgspec.Struct, frozen=True):
    """A request as it goes to a worker."""

    route: Route
    #: Path and query as the client wrote them.
    target: bytes
    forwarded: Forwarded
    request: Request
    #: When it was complete, on the pool's clock.
    started: float
    #: Name of the client's API key.
    key: str = ""
