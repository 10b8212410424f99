"""What routers report of arriving work, kept for the pools that scale, and the decisions that follow from it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.units import parse_duration
from twinpool.operator.logic import autoscaler
from twinpool.operator.logic.scaling_report import Work, read_work
from twinpool.operator.logic.scaling_step import State
from twinpool.operator.logic.scaling_window import Look, remembered
from twinpool.operator.shell.questions import Questions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.operator.logic.observed import Observed, PodView
    from twinpool.operator.shell.watch import PoolKey


class ArrivingWork(Questions[Work]):
    """What routers of pools that scale report, by name of their pods, and what they did within the last window."""

    path = "/admin/work"
    slow = 1.0

    def __init__(self, changed: Callable[[PoolKey], None], clock: Callable[[], float] = time.time) -> None:
        super().__init__(changed)
        self._clock = clock
        self._lengths: dict[PoolKey, float] = {}
        self.looks: dict[PoolKey, tuple[Look, ...]] = {}

    def port(self) -> int:
        """See :class:`Questions`."""
        return protocol.ROUTER_ADMIN_PORT

    def key(self, pod: PodView) -> str:
        """See :class:`Questions`."""
        return pod.name

    def read(self, document: Any) -> Work | None:
        """See :class:`Questions`."""
        return read_work(document)

    def gist(self, answer: Work) -> object:
        """Return whether somebody waits: a pool without groups is to get some at once."""
        return answer.waiting > 0

    def keep(self, key: PoolKey, length: float) -> None:
        """Remember ``length`` seconds of a pool's answers."""
        self._lengths[key] = length

    def heard(self, key: PoolKey, answers: Mapping[str, Work | None]) -> None:
        """See :class:`Questions`."""
        look = Look(self._clock(), {name: work for name, work in answers.items() if work is not None})
        self.looks[key] = remembered(self.looks.get(key, ()), look, self._lengths.get(key, 0.0))

    def forget(self, key: PoolKey) -> None:
        """See :class:`Questions`."""
        super().forget(key)
        self.looks.pop(key, None)
        self._lengths.pop(key, None)


class Autoscaler:
    """Decides at each look at a pool; remembers what one process must."""

    def __init__(self, changed: Callable[[PoolKey], None], clock: Callable[[], float] = time.time) -> None:
        self.work = ArrivingWork(changed, clock)
        self._clock = clock
        self._states: dict[PoolKey, State] = {}

    def look(self, key: PoolKey, observed: Observed) -> Observed:
        """Return the pool with the decision of this moment, and have its routers asked as long as it scales."""
        asked = autoscaler.to_ask(observed)
        self.work.follow(key, asked)
        scaling = observed.pool.spec.scaling
        if scaling is None:
            self.forget(key)
            return observed
        self.work.keep(key, parse_duration(scaling.window))
        looks = self.work.looks.get(key, ())
        found, self._states[key] = autoscaler.scaled(observed, self._states.get(key, State()), looks, self._clock())
        return found

    def forget(self, key: PoolKey) -> None:
        """Forget a pool that is gone, or scales no more."""
        self.work.forget(key)
        self._states.pop(key, None)

    def forget_all(self) -> None:
        """Forget every pool: another operator leads."""
        self.work.forget_all()
        for key in list(self._states):
            self.forget(key)

    async def close(self) -> None:
        """Ask nobody any more."""
        await self.work.close()
