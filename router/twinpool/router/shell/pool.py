"""What a data process knows of the pool, and its choices: the impure inputs of :mod:`twinpool.router.logic.policy`.

The ledger is this process's own; what others have admitted comes from the control process (:meth:`Pool.others`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from twinpool.router.logic import endpoints, policy, seats, share
from twinpool.router.logic.breaker import Breaker
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.copies import STALE_SECONDS, by_endpoint
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.meter import Meter
from twinpool.router.logic.metrics import Numbers, keep_workers
from twinpool.router.logic.places import Elsewhere, places
from twinpool.router.logic.queue import LEAST_URGENT, MOST_URGENT
from twinpool.router.logic.rate import Rates
from twinpool.router.logic.warmth import Warmth
from twinpool.router.shell.access import AccessLog
from twinpool.router.shell.admission import Admission
from twinpool.router.shell.locator import Locator
from twinpool.router.shell.rendering import Rendering
from twinpool.router.shell.upstream import Connections

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Iterable, Sequence
    from random import Random

    from twinpool.core.protocol import RouterConfig
    from twinpool.router.logic.asked import Asked, Work
    from twinpool.router.logic.copies import Others
    from twinpool.router.logic.endpoints import Directory, Endpoint
    from twinpool.router.logic.keys import Keyring
    from twinpool.router.logic.request import Request
    from twinpool.router.settings import Limits
    from twinpool.router.shell.tracing import Tracing


class Pool:
    """Endpoints, books and connections of one data process."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, config: RouterConfig, limits: Limits, rng: Random, processes: int = 1
    ) -> None:
        self.loop = loop
        self._processes = processes
        #: For what is measured; the loop's own clock has whole milliseconds only.
        self.clock = time.monotonic
        self.config = config
        self.limits = limits
        self.rng = rng
        self.directory: Directory = endpoints.EMPTY
        self._shares: dict[str, float] = {}
        #: Under which names there is something in the books: endpoints, and seats of those with several ranks.
        self._booked: Collection[str] = ()
        self.ledger = Ledger(processes - 1)
        self._elsewhere = Elsewhere({}, processes - 1, processes - 1)
        #: When the work of others was heard of last.
        self._heard = 0.0
        self.chooser = Chooser(config, self.ledger, rng)
        self.meter = Meter(self.ledger)
        self.warmth = Warmth()
        self.breaker = Breaker()
        self.numbers = Numbers()
        #: None where no request is traced.
        self.tracing: Tracing | None = None
        self.locator = Locator(loop, self.numbers)
        self.connections = Connections(loop, limits)
        #: None where the pool has no renderers.
        self.rendering: Rendering | None = None
        if config.renders:
            self.rendering = Rendering(loop, self.clock, limits, self.numbers, self.connections, self.chooser)
        self.access = AccessLog(config.access_log, rng, self.numbers)
        self.admission = Admission(
            loop,
            self.numbers,
            size=-(-config.queue_max // processes),
            timeout=config.queue_timeout,
            patience=config.queue_timeout if config.ttft is None else config.ttft,
            hold=config.queue_hold,
            objective=config.ttft is not None,
        )
        self.draining = False
        #: Connections to close after their next answer.
        self.shed = 0
        #: What keys may ask of this process; None: any number.
        self.rates: Rates | None = None
        if config.key_requests or config.key_tokens:
            self.rates = Rates(config.key_requests / processes, config.key_tokens / processes)
        #: None where nobody needs an API key.
        self.keyring: Keyring | None = None
        #: Bytes of request bodies held.
        self.body_bytes = 0

    def update(self, known: Iterable[Endpoint]) -> None:
        """Replace the endpoints."""
        known = tuple(known)
        self.directory = endpoints.directory(known)
        self._shares = share.shares(self.directory)
        admitted = (endpoint.id for endpoint in known if endpoint.admitted)
        self.breaker.keep(self.directory.known, admitted, self.loop.time())
        self.chooser.ranks.seats = seats.seats_of(known)
        self._booked = seats.names_of(self.directory.known, self.chooser.ranks.seats)
        self.chooser.keep(self._booked)
        self.meter.keep(self.directory.known)
        self.warmth.keep(self.directory.known)
        self.connections.sweep(set(self.directory.known))
        if self.rendering is not None:
            self.rendering.update(self.directory.renderers)
        keep_workers(self.numbers, {endpoint.pod for endpoint in known})
        self._resize()

    def others(self, others: Others) -> None:
        """Take this for the work of all other processes."""
        self._heard = self.loop.time()
        loads = by_endpoint(others.loads, self._booked)
        self.ledger.elsewhere(loads, others.unheard)
        whole = {name: load for name, load in loads.items() if name in self.directory.known}
        self._elsewhere = Elsewhere(whole, others.processes, others.unheard)
        self._resize()

    def expire(self) -> None:
        """Forget the work of others when it was not heard of for long; siblings are then supposed to have as much."""
        if self._heard and self.loop.time() - self._heard > STALE_SECONDS:
            self._heard = 0.0
            self.ledger.elsewhere({}, self._processes - 1)
            self._elsewhere = Elsewhere({}, self._processes - 1, self._processes - 1)
            self._resize()

    def _resize(self) -> None:
        """Reckon anew how much may be at the workers."""
        prefill, decode = self.directory.prefill, self.directory.decode
        factor = self.chooser.foresight.prefill.factor
        self.admission.resize(*places(self.config, prefill, decode, self._elsewhere, self._processes, factor))

    def priority(self, request: Request) -> int:
        """Return the priority that a request has in the queue."""
        if not self.config.queue_priorities:
            return 0
        return min(max(request.priority, MOST_URGENT), LEAST_URGENT)

    def hands_off(self, asked: Asked) -> bool:
        """Decide whether a request that could be split over two workers is.

        Decode workers without a place left have no time for prompts: what they lose, everybody waits for.
        """
        if not self.config.disaggregated:
            return False
        if self.config.conditional == "auto" and self.admission.crowded and self.directory.prefill:
            return True
        return self.chooser.hands_off(asked, self.directory.prefill, self.directory.decode)

    def choose_prefill(self, asked: Asked, tried: Collection[str]) -> Endpoint | None:
        """Choose a prefill worker that was not tried yet."""
        candidates: Sequence[Endpoint] = self.directory.prefill
        if tried:
            candidates = tuple(endpoint for endpoint in candidates if endpoint.id not in tried)
        if not candidates:
            return None
        if len(self._shares) > 1:
            candidates = share.of_one_revision(candidates, self._shares, self.rng)
        usable = self._usable(candidates)
        return self._chosen(self.chooser.prefill(asked, usable), again=bool(tried))

    def choose_decode(
        self, asked: Asked, revision: str | None, tried: Collection[str], source: Endpoint | None = None
    ) -> Endpoint | None:
        """Choose a decode worker, of one revision for a handoff, of any for a whole request.

        ``source`` is the worker that has prefilled. Those tried before come last: asking again beats giving up, as what
        failed may have been a stale connection.
        """
        candidates = self.decodes(revision)
        if not candidates:
            return None
        usable = self._usable(policy.preferred(candidates, tried) if tried else candidates)
        chosen = self.chooser.decode(asked, usable, whole=revision is None, source=source)
        return self._chosen(chosen, again=bool(tried))

    def decodes(self, revision: str | None) -> tuple[Endpoint, ...]:
        """Return the admitted decode workers, of one revision or of all."""
        if revision is None:
            return self.directory.decode
        return self.directory.decode_by_revision.get(revision, ())

    def sent(self, asked: Asked, endpoint: Endpoint) -> Work:
        """A prompt goes to ``endpoint`` to be prefilled: return what that is expected to be."""
        work = self.chooser.sent(asked, endpoint)
        if asked.names:
            self._expect(asked, endpoint, self.chooser.expected(work, endpoint.id))
        return work

    def received(self, asked: Asked, endpoint: Endpoint) -> None:
        """The KV of a prompt goes to ``endpoint``."""
        self.chooser.received(asked, endpoint)
        if asked.names:
            self._expect(asked, endpoint)

    def _expect(self, asked: Asked, endpoint: Endpoint, wait: float = 0.0) -> None:
        """Say where a prompt is expected to be held; which rank an engine will choose is not known."""
        if endpoint.ranks == 1 or endpoint.seat:
            self.locator.sent(endpoint.seat or endpoint.id, asked.names, wait)

    def prefilled(self, endpoint: Endpoint, work: Work, seconds: float, cached: int | None, prompt: int) -> None:
        """A prefill of ``prompt`` tokens took ``seconds``; the engine says how many were ``cached``, if it says so."""
        expected = self.chooser.expected(work, endpoint.id)
        if expected:
            self.numbers.observe("twinpool_router_prefill_prediction_ratio", seconds / expected, (endpoint.pod,))
        right = self.chooser.prefilled(endpoint, work, seconds, cached)
        if right is not None:
            outcome = "right" if right else "wrong"
            self.numbers.add("twinpool_router_index_predictions_total", (endpoint.pod, str(endpoint.rank), outcome))
        self.meter.prefilled(endpoint, work, prompt, seconds, cached)
        if cached:
            self.warmth.add(endpoint.id, cached, self.clock())
        if cached is not None:
            self.numbers.observe("twinpool_router_prefill_by_cache_seconds", seconds, ("warm" if cached else "cold",))

    def _usable(self, candidates: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if self.breaker.quiet:
            return candidates
        avoided = self.breaker.avoided(self.loop.time(), self.rng)
        return policy.preferred(candidates, avoided) if avoided else candidates

    def _chosen(self, endpoint: Endpoint, *, again: bool) -> Endpoint:
        if not self.breaker.quiet:
            self.breaker.chosen(endpoint.id, self.loop.time())
        if endpoint.ranks > 1:
            if again:  # what failed may have been a rank that its leader knows to avoid
                endpoint = self.directory.known[endpoint.id]
            self.numbers.add(
                "twinpool_router_rank_choices_total", (endpoint.role, "router" if endpoint.seat else "engine")
            )
        return endpoint

    def suspects(self) -> Iterable[str]:
        """Return the ids of endpoints that are avoided after failures."""
        return self.breaker.suspects(self.loop.time()) & self.directory.known.keys()

    def failed(self, endpoint: Endpoint, kind: str) -> None:
        """A leg to ``endpoint`` failed; ``kind`` is a label of ``twinpool_router_worker_failures_total``."""
        self.breaker.failed(endpoint.id, self.loop.time())
        self.numbers.add("twinpool_router_worker_failures_total", (endpoint.role, kind))

    def succeeded(self, endpoint: Endpoint) -> None:
        """A leg to ``endpoint`` was answered."""
        if not self.breaker.quiet:
            self.breaker.succeeded(endpoint.id, self.loop.time())
