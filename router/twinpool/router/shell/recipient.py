"""Who gets the answer to a request, as an exchange sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from twinpool.router.logic.errors import Refusal


class Client(Protocol):
    """The connection on which the answer is wanted."""

    def begin(self, head: bytes, request_id: bytes | None) -> None:
        """Take an answer's head, sent with the piece that follows; the request id only when the engine sent none."""

    def write(self, data: bytes) -> None:
        """Send a piece of the answer, framing included."""

    def finish(self, *, close: bool) -> None:
        """The answer is complete."""

    def refuse(self, refusal: Refusal, request_id: bytes) -> None:
        """Send an answer of ours; none has begun."""

    def answer_error(self, status: int, body: bytes, request_id: bytes) -> None:
        """Send an engine's error (JSON) as an answer of its own; none has begun."""

    def break_off(self) -> None:
        """Close the connection so that the client sees that the answer is cut."""
