"""The control process: holds the listening socket, follows the pool, publishes it to the data processes, stops them.

Always true: the socket stays open while a data process is replaced, so no connection is refused; not ready is said at
once on SIGTERM, and what runs is served until it ends or the pool's drain time is over.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.core.errors import InvalidValue
from twinpool.core.protocol import RENDERER_ROLE
from twinpool.router.logic import arrivals
from twinpool.router.logic.balance import to_shed
from twinpool.router.logic.copies import Copies, Copy, loads_of, write_books
from twinpool.router.logic.endpoints import directory
from twinpool.router.logic.lag import Lag
from twinpool.router.logic.ledger import Load
from twinpool.router.logic.metrics import Numbers, render, total
from twinpool.router.logic.policy import PREFIX_AWARE
from twinpool.router.shell import channel
from twinpool.router.shell.admin import JSON, METRICS, AdminServer
from twinpool.router.shell.children import Child
from twinpool.router.shell.copies import PATH, follow
from twinpool.router.shell.debug import debug_page, decisions_page, follow_lag
from twinpool.router.shell.discovery import PodWatch, follow_file
from twinpool.router.shell.events import Followers
from twinpool.router.shell.pages import books_of, entry_of, least_room, loads_in, predictions_of
from twinpool.router.shell.probes import Prober
from twinpool.router.shell.secrets import read_keys

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.settings import Settings

log = logging.getLogger(__name__)

#: Kubernetes itself needs up to a minute until a changed Secret is in the pod.
_KEYS_SECONDS = 2.0
_BALANCE_SECONDS = 5.0
#: Time in which changes that probes bring are gathered; a probe itself takes longer to find a worker gone.
_GATHER_SECONDS = 0.05
#: Data processes that did not end by themselves this long after the drain time are killed.
_KILL_SECONDS = 5.0


class Control:
    """Everything that is not on a request's path."""

    def __init__(self, settings: Settings, listener: socket.socket) -> None:
        self._settings = settings
        self._listener = listener
        self._found: tuple[Endpoint, ...] = ()
        self._published: tuple[Endpoint, ...] = ()
        self._synced = False
        self._stopping = asyncio.Event()
        self._prober = Prober(self._publish_soon)
        self._gathering: asyncio.TimerHandle | None = None
        self._followers = Followers(self._tell_relied, self._tell_emptied)
        self._keys = None if settings.keys is None else read_keys(settings.keys)
        self._children = [Child(listener, self._greeting, self._asked) for _ in range(settings.workers)]
        self._questions = 0
        self._lag = Lag()
        #: What nobody else is called: this process.
        self._name = os.urandom(8).hex()
        self._copies = Copies(self._name, settings.workers)
        self._copies.watch(Copy(f"{host}:{port}", host, port) for host, port in settings.copies)
        #: Nothing asks what workers hold where the policy does not.
        self._aware = settings.config.policy in PREFIX_AWARE or settings.config.conditional == "auto"

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain.

        Raises
        ------
        InvalidValue
            When the admin port is taken or the source of endpoints cannot be used at all.
        """
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        admin = await self._start_admin()
        discovery = asyncio.ensure_future(self._discover())
        secrets = asyncio.ensure_future(self._follow_keys())
        balance = asyncio.ensure_future(self._balance())
        books = asyncio.ensure_future(follow(self._copies, self._tell_elsewhere))
        lag = asyncio.ensure_future(follow_lag(self._lag))
        children = [asyncio.ensure_future(child.run()) for child in self._children]
        stop = asyncio.ensure_future(self._stopping.wait())
        log.info("serving pool %s on %s:%d", settings.config.pool, settings.host, settings.port)
        try:
            await asyncio.wait([stop, discovery, *children], return_when=asyncio.FIRST_COMPLETED)
            self._stopping.set()
            for ended in (discovery, *children):
                if ended.done():
                    ended.result()
            await self._drain(children)
        finally:
            for child in self._children:
                child.kill()
            self._prober.close()
            if self._gathering is not None:
                self._gathering.cancel()
            self._followers.close()
            tasks = (discovery, secrets, balance, books, lag, stop, *children)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            admin.close()

    async def _start_admin(self) -> asyncio.Server:
        pages = {
            "/metrics": self._metrics_page,
            "/ready": self._ready_page,
            "/health": self._health_page,
            "/admin/endpoints": self._endpoints_page,
            "/admin/index": self._index_page,
            "/admin/ledger": self._ledger_page,
            PATH: self._books_page,
            "/admin/work": self._work_page,
            "/debug": self._debug_page,
            "/debug/decisions": self._decisions_page,
        }
        host, port = self._settings.host, self._settings.admin_port
        try:
            return await AdminServer(pages).start(host, port)
        except OSError as error:
            text = f"cannot listen on {host}:{port}: {error.strerror}"
            raise InvalidValue(text, "give another --admin-port") from None

    async def _discover(self) -> None:
        if self._settings.endpoints is not None:
            await follow_file(Path(self._settings.endpoints), self._take)
        else:
            await PodWatch(self._settings.config, self._take, self._copies.watch).run()

    async def _drain(self, children: Sequence[asyncio.Future[None]]) -> None:
        lame_duck, timeout = self._settings.lame_duck, self._settings.config.drain_timeout
        log.info("draining for at most %g s", timeout)
        for child in self._children:
            child.drain(lame_duck, timeout)
        # The last holder's close refuses connections; while one is open, they would wait for nobody.
        asyncio.get_running_loop().call_later(lame_duck, self._listener.close)
        await asyncio.wait(children, timeout=max(lame_duck, timeout) + _KILL_SECONDS)

    async def _balance(self) -> None:
        """Every few seconds, have hot data processes give connections up."""
        before = [child.cpu for child in self._children]
        while len(self._children) > 1:
            await asyncio.sleep(_BALANCE_SECONDS)
            now = [child.cpu for child in self._children]
            # A process that was replaced has used less than its predecessor: it is not hot.
            shares = [max(b - a, 0.0) / _BALANCE_SECONDS for a, b in zip(before, now, strict=True)]
            before = now
            for child, count in zip(
                self._children, to_shed(shares, [child.clients for child in self._children]), strict=True
            ):
                if count:
                    child.tell(channel.Shed(count))

    # The books of other processes.

    def _tell_elsewhere(self) -> None:
        """Tell each data process what all others have; it answers with what it has itself."""
        own = [loads_of(child.loads) for child in self._children]
        others = self._copies.others(own, asyncio.get_running_loop().time())
        for child, those in zip(self._children, others, strict=True):
            child.tell(channel.Elsewhere(those))

    async def _books_page(self) -> tuple[int, str, bytes]:
        """Show other routers what this one's data processes have."""
        own = loads_of(entry for child in self._children for entry in child.loads)
        return 200, JSON, write_books(self._name, len(self._children), own)

    # The exact index.

    def _asked(self, child: Child, message: channel.Locate | channel.Sent) -> None:
        """A data process asks who holds a prompt, or says where one went."""
        if isinstance(message, channel.Sent):
            self._followers.sent(message.endpoint, message.names, message.wait)
        else:
            child.tell(channel.Located(message.number, self._followers.located(message.names)))

    def _tell_relied(self) -> None:
        size, endpoints = self._followers.relied
        log.info("routing relies on the KV events of %d engines", len(endpoints))
        for child in self._children:
            child.tell(channel.Relied(size, endpoints))

    def _tell_emptied(self, endpoint: str) -> None:
        for child in self._children:
            child.tell(channel.Emptied(endpoint))

    # API keys.

    def _greeting(self) -> tuple[channel.Down, ...]:
        return channel.Hello(self._settings, self._keys), self._snapshot(), channel.Relied(*self._followers.relied)

    async def _follow_keys(self) -> None:
        """Read the keys again every few seconds; those that cannot be read any more stay."""
        while self._settings.keys is not None:
            await asyncio.sleep(_KEYS_SECONDS)
            try:
                keys = read_keys(self._settings.keys)
            except InvalidValue as error:
                log.warning("keeping the API keys: %s", error)
                continue
            if keys != self._keys:
                self._keys = keys
                log.info("there are %d API keys now", len(keys))
                for child in self._children:
                    child.tell(channel.Keys(keys))

    # Endpoints.

    def _take(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Discovery has a new list."""
        self._synced = True
        self._found = endpoints
        self._prober.watch(endpoint for endpoint in endpoints if endpoint.wanted)
        self._publish()

    def _publish_soon(self) -> None:
        """A probe changed what is known of one worker: tell of it with those of others that come at about its time.

        Each snapshot has every worker, so hundreds that are admitted one by one would cost the square of their number.
        """
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._publish)

    def _publish(self) -> None:
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        snapshot = self._snapshot()
        if snapshot.endpoints == self._published:
            return
        before = {endpoint.id for endpoint in self._published if endpoint.admitted}
        for endpoint in snapshot.endpoints:
            if endpoint.admitted != (endpoint.id in before):
                log.info("%s %s (%s:%d) is %s", endpoint.role, endpoint.pod, endpoint.host, endpoint.port,
                         "admitted" if endpoint.admitted else "not admitted")  # fmt: skip
        self._published = snapshot.endpoints
        if self._aware:
            self._followers.watch(endpoint for endpoint in self._workers if endpoint.admitted)
        workers = {endpoint.pod for endpoint in snapshot.endpoints}
        for child in self._children:
            child.keep_workers(workers)
            child.tell(snapshot)

    def _snapshot(self) -> channel.Endpoints:
        return channel.Endpoints(tuple(self._judged(endpoint) for endpoint in self._found))

    def _judged(self, endpoint: Endpoint) -> Endpoint:
        """Return the endpoint with what the probes say: whether it answers, and which engine of its pod it is.

        A launcher may start an engine again inside its container, which Kubernetes does not count.
        """
        losses = self._prober.losses(endpoint.id)
        return dataclasses.replace(
            endpoint,
            id=f"{endpoint.id}+{losses}" if losses else endpoint.id,
            admitted=endpoint.wanted and self._prober.admitted(endpoint.id),
            kv_tokens=self._prober.kv_tokens(endpoint.id),
        )

    # Admin pages.

    async def _health_page(self) -> tuple[int, str, bytes]:
        return 200, JSON, b'{"status":"ok"}'

    async def _ready_page(self) -> tuple[int, str, bytes]:
        reason = ""
        if self._stopping.is_set():
            reason = "draining"
        elif not self._synced:
            reason = "the list of workers has not been read yet"
        elif not any(child.up for child in self._children):
            reason = "no data process is up yet"
        body = json.dumps({"ready": not reason, "reason": reason}).encode()
        return (503 if reason else 200), JSON, body

    async def _metrics_page(self) -> tuple[int, str, bytes]:
        await self._refresh()
        gauges = Numbers()
        gauges.add("twinpool_router_discovery_synced", (), float(self._synced))
        loads = loads_in(self._children)
        gauges.add("twinpool_router_renderers", (), float(len(directory(self._published).renderers)))
        for endpoint in self._workers:
            labels = (endpoint.pod, endpoint.role)
            load = loads.get(endpoint.id, Load())
            gauges.add("twinpool_router_endpoint_admitted", labels, float(endpoint.admitted))
            gauges.add("twinpool_router_requests_in_flight", labels, float(load.requests))
            gauges.add("twinpool_router_tokens_in_flight", labels, float(load.tokens))
            gauges.add("twinpool_router_handoffs_unpulled", labels, float(load.unpulled))
            self._followers.count(gauges, endpoint)
        text = render(total([gauges, *(child.numbers for child in self._children)]))
        return 200, METRICS, text.encode()

    async def _endpoints_page(self) -> tuple[int, str, bytes]:
        """Show the endpoints and the books as the data processes have them, for the operator's gates and drains.

        ``current`` is false when a data process did not answer: what it has in flight is not known.
        """
        published = self._published
        # Asked after they were told of ``published``, so that what they answer was counted with it in use.
        current = await self._refresh()
        loads = loads_in(self._children)
        warmth: Counter[str] = Counter()
        for child in self._children:
            warmth.update(child.warmth)
        body = {
            "pool": self._settings.config.pool,
            "synced": self._synced,
            "current": current,
            "distrustsRenderers": any(child.distrusts for child in self._children),
            "endpoints": [
                entry_of(endpoint, loads.get(endpoint.id, Load()), warmth[endpoint.id]) for endpoint in published
            ],
        }
        return 200, JSON, json.dumps(body).encode()

    async def _ledger_page(self) -> tuple[int, str, bytes]:
        """Show the books of each data process, also of workers that are gone: what they are still owed.

        ``current`` is false when a process did not answer; its books are then those of its last report.
        """
        current = await self._refresh()
        books = [{identity: books_of(load) for identity, load in child.loads} for child in self._children]
        now, learnt = asyncio.get_running_loop().time(), [predictions_of(child.foresight) for child in self._children]
        body = {"current": current, "processes": books, "copies": self._copies.state(now), "predictions": learnt}
        return 200, JSON, json.dumps(body).encode()

    async def _index_page(self) -> tuple[int, str, bytes]:
        """Show what the exact index holds, and for each worker whether its events are relied on, and why not."""
        followers = self._followers
        named = [{"name": e.pod, "id": e.id, "role": e.role, **followers.state(e)} for e in self._workers]
        body = {"blockSize": followers.relied[0], "table": followers.table(), "endpoints": named}
        return 200, JSON, json.dumps(body).encode()

    async def _work_page(self) -> tuple[int, str, bytes]:
        """Show the work that arrived since the start and what waits now, for the operator's scaling.

        ``current`` is false when a data process did not answer: its newest numbers are missing.
        """
        current = await self._refresh()
        roles = {endpoint.id: endpoint.role for endpoint in self._published}
        loads = [(roles.get(identity), load) for identity, load in loads_in(self._children).items()]
        numbers = total([child.numbers for child in self._children])
        waiting = numbers.values.get("twinpool_router_requests_waiting", {}).get((), 0.0)
        body = {
            "pool": self._settings.config.pool,
            "current": current,
            "arrivals": dataclasses.asdict(arrivals.total([child.arrivals for child in self._children])),
            "waiting": int(waiting),
            "prefillSeconds": sum(load.backlog for role, load in loads if role == "prefill"),
            "decoding": sum(load.requests for role, load in loads if role == "decode"),
            "kvTokens": least_room(self._published),
        }
        return 200, JSON, json.dumps(body).encode()

    async def _debug_page(self) -> tuple[int, str, bytes]:
        self._questions += 1
        more = {
            "synced": self._synced,
            "stopping": self._stopping.is_set(),
            "endpoints": len(self._published),
            "admitted": sum(endpoint.admitted for endpoint in self._published),
            "eventsReliedOn": len(self._followers.relied[1]),
        }
        return await debug_page(self._children, self._questions, self._settings.config, self._lag, more)

    async def _decisions_page(self) -> tuple[int, str, bytes]:
        self._questions += 1
        return await decisions_page(self._children, self._questions)

    @property
    def _workers(self) -> list[Endpoint]:
        """The endpoints but for renderers, which hold nothing and have no books."""
        return [endpoint for endpoint in self._published if endpoint.role != RENDERER_ROLE]

    async def _refresh(self) -> bool:
        """Get the numbers of this moment; return whether every data process gave them."""
        self._questions += 1
        return all(await asyncio.gather(*(child.refresh(self._questions) for child in self._children)))
