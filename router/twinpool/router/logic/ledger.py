"""The work that this process has admitted and that is not finished: its own books, never a scraped gauge.

Beside them stands what others have admitted (:mod:`twinpool.router.logic.copies`), in :meth:`Ledger.seen` alone.

Every leg of a request holds exactly one :class:`Ticket`, and closing a ticket twice changes nothing, so neither an
abort nor an error can leave load behind. Tokens are estimates made at admission; what is taken back is what was added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

_MICROSECONDS = 1_000_000


class Ticket(msgspec.Struct):
    """One leg's entry in the books. ``prefill`` is what it has yet to compute, in microseconds of the model.

    ``seat`` is the entry of the data-parallel rank that the leg was sent to by name, if it was.
    """

    endpoint: str
    tokens: int
    prefill: int = 0
    open: bool = True
    seat: Ticket | None = None


class Load(msgspec.Struct):
    """What an endpoint has to do for this router."""

    tokens: int = 0
    requests: int = 0
    #: Prefill that is yet to be done, in microseconds: whole numbers, so that what is taken out is what was put in.
    prefill: int = 0
    #: Handoffs that it has prefilled and whose KV nobody has pulled yet.
    unpulled: int = 0

    @property
    def backlog(self) -> float:
        """Return the prefill that is yet to be done in seconds, as the model of prices has it."""
        return self.prefill / _MICROSECONDS


IDLE = Load()
_NOTHING: Final[Mapping[str, Load]] = {}


class Ledger:
    """Admitted work by endpoint id. Endpoints without any are not stored, so the books cannot grow with churn."""

    def __init__(self, unheard: int = 0) -> None:
        self._loads: dict[str, Load] = {}
        #: What is known of the work of others, and how many more there are, of which nothing is known.
        self._elsewhere: Mapping[str, Load] = _NOTHING
        self._unheard = unheard
        self._alone = not unheard

    def elsewhere(self, loads: Mapping[str, Load], unheard: int) -> None:
        """Take this for the work of all others: of some ``loads``, and of ``unheard`` ones as much as is here."""
        self._elsewhere, self._unheard = loads, unheard
        self._alone = not loads and not unheard

    def seen(self, endpoint: str) -> Load:
        """Return all work of an endpoint, that of others as far as it is known, or else supposed."""
        own = self._loads.get(endpoint, IDLE)
        if self._alone:
            return own
        other, share = self._elsewhere.get(endpoint, IDLE), 1 + self._unheard
        return Load(
            tokens=own.tokens * share + other.tokens,
            requests=own.requests * share + other.requests,
            prefill=own.prefill * share + other.prefill,
        )

    def __getitem__(self, endpoint: str) -> Load:
        return self._loads.get(endpoint, IDLE)

    def items(self) -> list[tuple[str, Load]]:
        """Return every endpoint with work."""
        return list(self._loads.items())

    def admit(self, endpoint: str, tokens: int, prefill: float = 0.0) -> Ticket:
        """Enter a leg of about ``tokens`` tokens, with ``prefill`` seconds of prompt to compute."""
        load = self._load(endpoint)
        load.tokens += tokens
        load.requests += 1
        if not prefill:
            return Ticket(endpoint, tokens)
        work = round(prefill * _MICROSECONDS)
        load.prefill += work
        return Ticket(endpoint, tokens, work)

    def admit_at(self, seat: str, endpoint: str, tokens: int, prefill: float = 0.0) -> Ticket:
        """Enter a leg that is sent to one rank of an endpoint, into the books of both."""
        ticket = self.admit(endpoint, tokens, prefill)
        ticket.seat = self.admit(seat, tokens, prefill)
        return ticket

    def prefilled(self, ticket: Ticket) -> None:
        """The leg's first token is there, so its prompt is computed; the second time is nothing."""
        if ticket.open and ticket.prefill:
            self._loads[ticket.endpoint].prefill -= ticket.prefill
            ticket.prefill = 0
            if ticket.seat is not None:
                self.prefilled(ticket.seat)

    def close(self, ticket: Ticket) -> None:
        """Take a leg out again; the second time is nothing."""
        if ticket.open:
            ticket.open = False
            load = self._loads[ticket.endpoint]
            load.tokens -= ticket.tokens
            load.prefill -= ticket.prefill
            load.requests -= 1
            if not load.requests:
                self._forget_idle(ticket.endpoint, load)
            if ticket.seat is not None:
                self.close(ticket.seat)

    def hold(self, endpoint: str) -> Ticket:
        """Enter a handoff whose KV waits on ``endpoint``; :meth:`pulled` closes it."""
        self._load(endpoint).unpulled += 1
        return Ticket(endpoint, 0)

    def pulled(self, ticket: Ticket) -> None:
        """The KV of a handoff was pulled or given up; the second time is nothing."""
        if ticket.open:
            ticket.open = False
            load = self._loads[ticket.endpoint]
            load.unpulled -= 1
            self._forget_idle(ticket.endpoint, load)

    def _load(self, endpoint: str) -> Load:
        load = self._loads.get(endpoint)
        if load is None:
            load = self._loads[endpoint] = Load()
        return load

    def _forget_idle(self, endpoint: str, load: Load) -> None:
        if not load.requests and not load.unpulled:
            del self._loads[endpoint]
