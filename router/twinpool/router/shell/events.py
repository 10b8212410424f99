"""Follows the KV events of engines, and answers which of them hold a prompt: the exact index, in the control process.

One task for each data-parallel rank that publishes events. Every few seconds it asks for a replay of what should come
next: that repairs what was lost last, which no later message would show, and tells a silent engine from one that is
gone. Always true: an engine that does not answer is not relied on; only pods of the pool are dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final, cast

import zmq
import zmq.asyncio

from twinpool.router.logic.index_events import CLEARED, Take, events_of
from twinpool.router.logic.index_exact import ExactIndex, Held
from twinpool.router.logic.index_source import Source, common_size
from twinpool.router.logic.seats import Publisher, publishers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.logic.metrics import Numbers

log = logging.getLogger(__name__)

#: Blocks that the index has room for: 16 MiB, as many as some 130 GB of KV cache of a 8B model have.
CAPACITY: Final = 2**20
_ASK_SECONDS: Final = 2.0
#: vLLM looks for questions between messages, at least each 0.1 s.
_ANSWER_SECONDS: Final = 10.0
_MAX_MESSAGE: Final = 64 * 2**20
#: Messages that ZMQ keeps while this process is busy; more are lost, and replayed.
_HIGH_WATER: Final = 10_000
#: Messages that are taken before others in this process have their turn, and the time until it is looked for more.
_AT_ONCE: Final = 64
_LOOK_SECONDS: Final = 0.05
_END: Final = -1


class Followers:
    """The engines that publish events. ``changed``: others are relied on than before; ``emptied``: one lost all."""

    def __init__(self, changed: Callable[[], None], emptied: Callable[[str], None]) -> None:
        self._changed = changed
        self._emptied = emptied
        self._context: zmq.asyncio.Context | None = None
        self._index: ExactIndex | None = None
        #: What follows, whom, and what is known of it, by the rank's name.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._followed: dict[str, Publisher] = {}
        self.sources: dict[str, Source] = {}
        self._relied: tuple[int, frozenset[str]] = (0, frozenset())

    @property
    def relied(self) -> tuple[int, frozenset[str]]:
        """Return the block size, and the names of the ranks whose events routing may rely on."""
        return self._relied

    def watch(self, endpoints: Iterable[Endpoint]) -> None:
        """Follow these endpoints, as far as they publish events, and no others."""
        wanted = {each.name: each for endpoint in endpoints for each in publishers(endpoint)}
        if wanted and self._context is None:
            self._context, self._index = zmq.asyncio.Context(), ExactIndex(CAPACITY)
        # A rank that publishes at another address than before is another process.
        for name in [name for name, each in self._followed.items() if wanted.get(name) != each]:
            self._tasks.pop(name).cancel()
            del self._followed[name], self.sources[name]
        if self._index is not None:
            self._index.keep(self._followed)
        for name in wanted.keys() - self._followed.keys():
            self._followed[name], self.sources[name] = wanted[name], Source()
            self._tasks[name] = asyncio.ensure_future(self._follow(wanted[name]))
        self._judge()

    def close(self) -> None:
        """Follow nobody any more."""
        self.watch(())
        if self._context is not None:
            self._context.destroy(linger=0)

    def located(self, names: Sequence[int]) -> list[tuple[str, Held]]:
        """Return which ranks hold how many of the leading blocks."""
        index, (_, relied) = self._index, self._relied
        if index is None:
            return []
        index.expire(asyncio.get_running_loop().time())
        return [(holder, held) for holder, held in index.leading(names).items() if holder in relied]

    def sent(self, rank: str, names: Sequence[int], wait: float) -> None:
        """A prompt of these blocks was sent to a rank, where it is expected to be read in ``wait`` seconds."""
        if self._index is not None and rank in self.sources:
            self._index.expect(rank, names, asyncio.get_running_loop().time(), wait)

    def blocks(self, rank: str) -> int:
        """Return how many blocks a rank has by its events."""
        return 0 if self._index is None else self._index.blocks(rank)

    def coverage(self, rank: str) -> float:
        """Return the share of a rank's blocks that the index has."""
        return 1.0 if self._index is None else self._index.coverage(rank)

    def count(self, numbers: Numbers, endpoint: Endpoint) -> None:
        """Add the gauges and counters of an endpoint's ranks."""
        for each in publishers(endpoint):
            source = self.sources.get(each.name)
            if source is None:
                continue
            rank = str(each.rank)
            labels = (endpoint.pod, endpoint.role, rank)
            numbers.add("twinpool_router_index_relied", labels, float(each.name in self._relied[1]))
            numbers.add("twinpool_router_index_coverage", labels, self.coverage(each.name))
            numbers.add("twinpool_router_index_blocks", labels, float(self.blocks(each.name)))
            numbers.add("twinpool_router_kv_event_gaps_total", (endpoint.pod, rank, "asked"), float(source.gaps))
            numbers.add("twinpool_router_kv_event_gaps_total", (endpoint.pod, rank, "reset"), float(source.resets))

    def table(self) -> dict[str, int]:
        """Return the size of the table: entries in use, the most that there can be, sets of holders, bytes."""
        if self._index is None:
            return {"entries": 0, "capacity": 0, "sets": 0, "bytes": 0}
        table = self._index.table
        return {
            "entries": table.entries,
            "capacity": table.capacity,
            "sets": len(table.sets),
            "bytes": table.table_bytes,
        }

    async def _follow(self, rank: Publisher) -> None:
        assert self._context is not None
        sub: zmq.Socket[bytes] = cast("Any", self._context).socket(zmq.SUB, socket_class=zmq.Socket)
        replay = self._context.socket(zmq.DEALER)
        try:
            for socket in (sub, replay):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
                socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE)
            sub.subscribe(b"")
            sub.connect(f"tcp://{rank.host}:{rank.events}")
            missing = asyncio.Event()
            async with asyncio.TaskGroup() as both:
                both.create_task(self._listen(rank, sub, missing))
                both.create_task(self._ask(rank, replay, missing))
        except Exception:
            # A surprise must not end a router that serves: this worker is estimated from now on.
            log.exception("the KV events of %s (rank %d) cannot be followed", rank.pod, rank.rank)
            self.sources[rank.name].answers = False
            self._judge()
        finally:
            sub.close()
            replay.close()

    async def _listen(self, rank: Publisher, sub: zmq.Socket[bytes], missing: asyncio.Event) -> None:
        """Take what is published, all that came at a time.

        An engine that works publishes at each step: a future for each message, and waking up for it, would cost more
        than the messages do.
        """
        while True:
            came = 0
            with contextlib.suppress(zmq.Again):
                while came < _AT_ONCE:
                    self._published(rank, sub.recv_multipart(zmq.NOBLOCK), missing)
                    came += 1
            if came:
                await asyncio.sleep(_LOOK_SECONDS if came < _AT_ONCE else 0.0)
            else:
                await _readable(sub.fileno())

    def _published(self, rank: Publisher, frames: Sequence[bytes], missing: asyncio.Event) -> None:
        source = self.sources[rank.name]
        events = events_of(frames[-1]) if len(frames) == 3 and len(frames[1]) == 8 else None
        if events is None:
            return
        source.messages += 1
        take = source.feed.receive(int.from_bytes(frames[1], "big"), events)
        if not rank.replay:
            source.answers = True
        self._apply(rank, source, take)
        if take.replay is None:
            return
        source.gaps += 1
        if rank.replay:
            missing.set()
        else:
            self._apply(rank, source, source.feed.replay_ended())

    async def _ask(self, rank: Publisher, replay: zmq.asyncio.Socket, missing: asyncio.Event) -> None:
        """Ask for what is missing, when something is, and every few seconds for what may be."""
        if not rank.replay:
            return
        source = self.sources[rank.name]
        replay.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for an engine that is not there
        replay.connect(f"tcp://{rank.host}:{rank.replay}")
        while True:
            missing.clear()
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await replay.send_multipart([b"", source.feed.wanted.to_bytes(8, "big")])
                    again = await self._replayed(rank, source, replay)
                source.answers = True
            except TimeoutError:
                again, source.answers = False, False
            self._judge()
            if not again:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ASK_SECONDS):
                        await missing.wait()

    async def _replayed(self, rank: Publisher, source: Source, replay: zmq.asyncio.Socket) -> bool:
        """Take an answer to its end; return whether to ask again at once."""
        while True:
            frames = await replay.recv_multipart()
            if len(frames) != 4 or len(frames[2]) != 8:
                continue
            number = int.from_bytes(frames[2], "big", signed=True)
            if number == _END:
                take = source.feed.replay_ended()
                self._apply(rank, source, take)
                return take.replay is not None
            events = events_of(frames[3])
            if events is not None:
                self._apply(rank, source, source.feed.replayed(number, events))

    def _apply(self, rank: Publisher, source: Source, take: Take) -> None:
        assert self._index is not None
        wrong, size = source.wrong, source.size
        if take.reset:
            source.resets += 1
            self._index.reset(rank.name)
            self._emptied(rank.endpoint)
        for events in take.batches:
            source.check(events)
            self._index.apply(rank.name, events)
            if any(event.type == CLEARED for event in events):
                self._emptied(rank.endpoint)
        if (source.wrong > 0) != (wrong > 0) or source.size != size:
            self._judge()

    def _judge(self) -> None:
        """Tell when others are relied on than before."""
        size = common_size(self.sources.values())
        usable = frozenset(name for name, source in self.sources.items() if not source.trouble(size))
        relied = (size, usable if size else frozenset[str]())
        if relied != self._relied:
            self._relied = relied
            self._changed()

    def state(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return what is known of an endpoint's events, as ``/admin/index`` shows it; of several ranks, of each."""
        if not endpoint.events:
            return {"relied": False, "reason": "it publishes no KV events"}
        found = {each.rank: self._rank_state(each) for each in publishers(endpoint)}
        if endpoint.ranks == 1:
            return found[0]
        unknown = {"relied": False, "reason": "the address of its pod is not known"}
        ranks = [{"rank": rank, **found.get(rank, unknown)} for rank in range(endpoint.ranks)]
        return {"relied": all(each["relied"] for each in ranks), "ranks": ranks}

    def _rank_state(self, rank: Publisher) -> dict[str, Any]:
        source = self.sources.get(rank.name)
        if source is None:
            return {
                "relied": False,
                "reason": "it is not followed: the worker is not admitted, or the policy asks for no cache",
            }
        return {
            "relied": rank.name in self._relied[1],
            "reason": source.trouble(self._relied[0]),
            "address": f"{rank.host}:{rank.events}",
            "blockSize": source.size,
            "blocks": self.blocks(rank.name),
            "coverage": round(self.coverage(rank.name), 4),
            "messages": source.messages,
            "gaps": source.gaps,
            "resets": source.resets,
            "namesRight": source.right,
            "namesWrong": source.wrong,
        }


async def _readable(descriptor: int) -> None:
    """Wait until there is something to read."""
    loop = asyncio.get_running_loop()
    came: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: None if came.done() else came.set_result(None))
    try:
        await came
    finally:
        loop.remove_reader(descriptor)
