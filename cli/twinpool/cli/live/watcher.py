"""Looks at a pool every second, in a thread of its own, and keeps the newest frame for whoever asks."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from twinpool.cli.live.frame import Snapshot, frame
from twinpool.cli.pools import observe
from twinpool.cli.scrape import Scrape, added, parse
from twinpool.core import protocol
from twinpool.core.errors import TwinpoolError
from twinpool.operator.logic import names

if TYPE_CHECKING:
    from twinpool.cli.forward import Forwards
    from twinpool.cli.kubectl import Kubectl
    from twinpool.operator.logic.observed import Observed, PodView

#: Seconds between two looks at the pods' pages, and at the pool and its pods, which takes two runs of kubectl.
EVERY = 1.0
OBJECTS_EVERY = 4.0
#: Seconds that rates and percentiles are of.
WINDOW = 15.0


class Watcher:
    """The newest frame of one pool."""

    def __init__(self, kubectl: Kubectl, forwards: Forwards, pool: str) -> None:
        self._kubectl, self._forwards, self._pool = kubectl, forwards, pool
        self._observed: Observed | None = None
        self._observed_at = float("-inf")
        self._snapshots: deque[Snapshot] = deque()
        self._stop = threading.Event()
        self.frame: dict[str, Any] = {}
        #: Why the frame is old, in words; empty while it is not.
        self.problem = "nothing was seen yet"

    def run(self) -> None:
        """Look until :meth:`stop` is called."""
        while not self._stop.is_set():
            try:
                self.look(time.monotonic())
                self.problem = ""
            except TwinpoolError as error:
                self.problem = str(error)
            self._stop.wait(EVERY)

    def stop(self) -> None:
        """End :meth:`run`."""
        self._stop.set()

    def look(self, now: float) -> None:
        """Make the frame of ``now`` (seconds).

        Raises
        ------
        TwinpoolError
            When the cluster cannot be asked, or has no such pool.
        """
        self._snapshots.append(self.snapshot(now))
        while len(self._snapshots) > 2 and self._snapshots[1].at <= now - WINDOW:
            self._snapshots.popleft()
        self.frame = frame(self._snapshots[0], self._snapshots[-1])

    def snapshot(self, now: float) -> Snapshot:
        """Return the moment ``now`` (seconds).

        Raises
        ------
        TwinpoolError
            When the cluster cannot be asked, or has no such pool.
        """
        if self._observed is None or now - self._observed_at >= OBJECTS_EVERY:
            self._observed, _ = observe(self._kubectl, self._pool)
            self._observed_at = now
            self._forwards.keep({pod.name for pod in self._observed.pods})
        pods = [pod for pod in self._observed.pods if pod.phase == "Running" and pod.rank == 0]
        routers = {pod.name: self._scrape(pod.name, protocol.ROUTER_ADMIN_PORT) for pod in pods if _routes(pod.role)}
        engines = {pod.name: self._worker(pod) for pod in pods if not _routes(pod.role)}
        return Snapshot(now, self._observed, _answers(routers), _answers(engines))

    def _worker(self, pod: PodView) -> Scrape | None:
        """Return what an engine counts, and its launcher where experts are balanced: vLLM counts nothing of them."""
        page = self._scrape(pod.name, protocol.ENGINE_PORT)
        assert self._observed is not None
        spec = self._observed.pool.spec
        role = spec.prefill if pod.role == "prefill" else spec.decode
        if page is None or role is None or role.expert_balancing is None:
            return page
        launcher = self._scrape(pod.name, protocol.LAUNCHER_PORT)
        return page if launcher is None else added([page, launcher])

    def _scrape(self, pod: str, port: int) -> Scrape | None:
        text = self._forwards.page(pod, port, "/metrics")
        try:
            return None if text is None else parse(text)
        except ValueError:
            return None


def _routes(role: str) -> bool:
    return role == names.ROUTER


def _answers(pages: dict[str, Scrape | None]) -> dict[str, Scrape]:
    return {name: page for name, page in pages.items() if page is not None}
