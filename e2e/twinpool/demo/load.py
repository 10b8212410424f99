"""Constant load on a pool, as its users see it: every request has one right answer, and every other outcome is kept.

Requests go to the Ready router pods in turn, as they do behind a Service, each on a connection of its own. Half of them
are streamed. The simulated engine answers a prompt the same way every time, so an answer from a wrong KV cache shows.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.demo.client import post, stream
from twinpool.demo.scenario import is_ready
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from twinpool.localcluster.cluster import Cluster

#: Seconds between two looks at which routers are Ready, about what an EndpointSlice takes to reach a node.
_LOOK = 0.5


class Load:
    """Clients that ask without a pause for the time of a ``with`` block; ``failures`` says what went wrong."""

    def __init__(self, cluster: Cluster, namespace: str, pool: str, model: str, clients: int = 4) -> None:
        self._cluster, self._namespace, self._pool = cluster, namespace, pool
        self._bodies = [
            {"model": model, "prompt": f"the answer to number {n} never changes", "max_tokens": 16, "temperature": 0}
            for n in range(8)
        ]
        self._expected: list[str] = []
        self._routers: tuple[str, ...] = ()
        self._turn = itertools.count()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.answered = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._look_on, name="routers")]
        self._threads += [threading.Thread(target=self._ask_on, args=(n,), name=f"client {n}") for n in range(clients)]

    def __enter__(self) -> Load:
        self._look()
        self._expected = [_text(self._url(), body) for body in self._bodies]
        for thread in self._threads:
            thread.start()
        self.more(8)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=120)
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        if hanging and kind is None:
            raise AssertionError(f"these never got an answer: {', '.join(hanging)}")

    def more(self, count: int, timeout: float = 60.0) -> None:
        """Wait until that many more requests have ended."""
        reached = self.ended + count
        wait_until(lambda: self.ended >= reached, timeout, f"{count} more requests have ended")

    @property
    def ended(self) -> int:
        """How many requests have ended, one way or the other."""
        return self.answered + len(self.failures)

    def _look(self) -> None:
        selector = f"{protocol.LABEL_POOL}={self._pool},{protocol.LABEL_ROLE}=router"
        pods: Sequence[Any] = self._cluster.json("-n", self._namespace, "get", "pods", "-l", selector)["items"]
        self._routers = tuple(pod["status"]["podIP"] for pod in pods if is_ready(pod))

    def _look_on(self) -> None:
        while not self._stop.wait(_LOOK):
            self._look()

    def _url(self) -> str:
        routers = self._routers
        return f"http://{routers[next(self._turn) % len(routers)]}:{protocol.ROUTER_PORT}/v1/completions"

    def _ask_on(self, number: int) -> None:
        for turn in itertools.count(number):
            if self._stop.is_set():
                return
            self._ask(turn)

    def _ask(self, turn: int) -> None:
        which = turn % len(self._bodies)
        streamed, began = bool(turn // len(self._bodies) % 2), time.monotonic()
        try:
            url = self._url()
            text = (_streamed if streamed else _text)(url, self._bodies[which])
            wrong = "" if text == self._expected[which] else f"wrong answer: {text!r}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        with self._lock:
            if wrong:
                took = time.monotonic() - began
                self.failures.append(f"{'stream' if streamed else 'request'} after {took:.1f} s: {wrong}")
            else:
                self.answered += 1


def _text(url: str, body: dict[str, Any]) -> str:
    reply = post(url, body, timeout=60)
    if reply.status != 200:
        raise RuntimeError(f"HTTP {reply.status}: {reply.body.decode(errors='replace')}")
    text: str = json.loads(reply.body)["choices"][0]["text"]
    return text


def _streamed(url: str, body: dict[str, Any]) -> str:
    return "".join(choice["text"] for event in stream(url, body, timeout=60) for choice in event["choices"])
