"""Asks the pool's renderers for the token ids of prompts.

Always true: a request asks at most one renderer, once; what does not come in time, or comes broken, is dropped and the
request goes on without; and only the pool's own renderers are dialled, never its workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from twinpool.router.logic.breaker import Breaker
from twinpool.router.logic.framing import unchunk
from twinpool.router.logic.rendering import Gain, Rendered, Trust, read_rendered, renderable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from twinpool.router.logic.asked import Asked
    from twinpool.router.logic.chooser import Chooser
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.framing import Head
    from twinpool.router.logic.metrics import Numbers
    from twinpool.router.settings import Limits
    from twinpool.router.shell.call import Call
    from twinpool.router.shell.upstream import Connections, Upstream

#: Takes what a renderer said; None: nothing of use, or nothing in time.
Listener = Callable[[Rendered | None], None]

#: Renders under way at one renderer for one data process. It works on one at a time, so more would only wait.
_AT_ONCE: Final = 4


class Question:
    """One prompt at one renderer (:class:`twinpool.router.shell.upstream.Leg`)."""

    __slots__ = ("_head", "_listener", "_owner", "_pieces", "_size", "_started", "_task", "_timer", "_upstream",
                 "endpoint", "size")  # fmt: skip

    def __init__(self, owner: Rendering, endpoint: Endpoint, size: int, listener: Listener) -> None:
        self._owner = owner
        self.endpoint = endpoint
        #: Bytes of the request.
        self.size = size
        self._listener: Listener | None = listener
        self._started = owner.clock()
        self._timer = owner.loop.call_later(owner.gain.patience(size), self._end, "late")
        self._task: asyncio.Task[None] | None = None
        self._upstream: Upstream | None = None
        self._head: Head | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def ask(self, connections: Connections, head: tuple[bytes, bytes], body: bytes) -> None:
        """Send the request on an idle connection, or on a new one."""
        upstream = connections.take(self.endpoint)
        if upstream is not None:
            self._send(upstream, head, body)
        else:
            self._task = self._owner.loop.create_task(self._connect(connections, head, body))

    async def _connect(self, connections: Connections, head: tuple[bytes, bytes], body: bytes) -> None:
        upstream = await connections.connect(self.endpoint)
        self._task = None
        if upstream is None:
            self._end("failed")
        else:
            self._send(upstream, head, body)

    def _send(self, upstream: Upstream, head: tuple[bytes, bytes], body: bytes) -> None:
        self._upstream = upstream
        upstream.send(self, head, body)

    def cancel(self) -> None:
        """Nobody wants the answer any more."""
        self._listener = None
        self._end("dropped")

    def on_head(self, head: Head) -> None:
        """See :class:`twinpool.router.shell.upstream.Leg`."""
        self._head = head

    def on_body(self, data: bytes) -> None:
        """Collect, within the limit."""
        self._size += len(data)
        self._pieces.append(data)
        if self._size > self._owner.limits.prefill_answer:
            self._end("failed")

    def on_end(self) -> None:
        """Read the whole answer; one that refuses is about the request, which its worker will refuse too."""
        head, self._upstream = self._head, None
        assert head is not None
        body = b"".join(self._pieces)
        rendered = read_rendered(unchunk(body) if head.chunked else body) if head.status == 200 else None
        if rendered is not None:
            self._end("rendered", rendered)
        else:
            self._end("unusable" if head.status < 500 else "failed")

    def on_lost(self, fill: bytes | None) -> None:  # noqa: ARG002 - nobody sees this answer
        """Report the loss."""
        self._upstream = None
        self._end("failed")

    def _end(self, outcome: str, rendered: Rendered | None = None) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None
        self._owner.ended(self, outcome, self._owner.clock() - self._started)
        if self._listener is not None:
            self._listener(rendered)


class Rendering:
    """The questions of one data process, and what was learnt of them."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
        limits: Limits,
        numbers: Numbers,
        connections: Connections,
        chooser: Chooser,
    ) -> None:
        self.loop = loop
        self.clock = clock
        self.limits = limits
        self.gain = Gain()
        self.trust = Trust()
        self._numbers = numbers
        self._connections = connections
        self._chooser = chooser
        self._breaker = Breaker()
        #: Those to ask, and the last of whom anything was learnt.
        self._serving: tuple[Endpoint, ...] = ()
        self._judged: set[str] = set()
        #: Renders under way by renderer.
        self._running: Counter[str] = Counter()

    @property
    def distrusts(self) -> bool:
        """Whether engines read other tokens than the renderers made, so that nobody is asked."""
        return self.trust.lost(self.clock())

    def update(self, renderers: tuple[Endpoint, ...]) -> None:
        """Ask these from now on; where all of them are others, nothing is known of them."""
        known = {each.id for each in renderers}
        if known:
            if not known & self._judged:
                self.trust.renew()
            self._judged = known
        self._breaker.keep(known, (), self.clock())
        self._serving = renderers

    def ask(self, call: Call, asked: Asked, workers: Sequence[Endpoint], listener: Listener) -> Question | None:
        """Ask for the ids of a prompt if a choice among ``workers`` is worth it; None: nobody is asked."""
        request, now = call.request, self.clock()
        if not self._serving or not renderable(call.route, request) or self.trust.lost(now):
            return None
        size = len(request.body)
        if not self.gain.worth(size, self._chooser.stake(asked, workers)):
            return None
        endpoint = self._free(now)
        if endpoint is None:
            self._numbers.add("twinpool_router_renders_total", ("busy",))
            return None
        self._running[endpoint.id] += 1
        self._breaker.chosen(endpoint.id, now)
        question = Question(self, endpoint, size, listener)
        target = b"%b/render" % call.route.value.encode()
        question.ask(self._connections, (target, call.forwarded.prefill), request.body)
        return question

    def _free(self, now: float) -> Endpoint | None:
        suspects = self._breaker.suspects(now)
        usable = [each for each in self._serving if each.id not in suspects and self._running[each.id] < _AT_ONCE]
        return min(usable, key=lambda each: self._running[each.id], default=None)

    def ended(self, question: Question, outcome: str, seconds: float) -> None:
        """A question was answered, or given up, after so long."""
        endpoint = question.endpoint.id
        self._running[endpoint] -= 1
        self._numbers.add("twinpool_router_renders_total", (outcome,))
        if outcome in ("rendered", "late"):
            self.gain.took(question.size, seconds)
        if outcome in ("late", "failed"):
            self._breaker.failed(endpoint, self.clock())
        elif outcome != "dropped":
            self._breaker.succeeded(endpoint, self.clock())
        if outcome == "rendered":
            self._numbers.observe("twinpool_router_render_seconds", seconds)

    def learn(self, before: Asked, after: Asked, workers: Sequence[Endpoint]) -> None:
        """It is known now what workers hold of a prompt: was that worth its render?"""
        stake = self._chooser.stake(before, workers)
        if stake > 0:
            self.gain.brought(self._chooser.saved(before, after, workers) / stake)

    def judge(self, same: bool) -> None:
        """An engine read the tokens that a renderer had made, or others."""
        self.trust.judge(same, self.clock())
        self._numbers.add("twinpool_router_render_checks_total", ("right" if same else "wrong",))
