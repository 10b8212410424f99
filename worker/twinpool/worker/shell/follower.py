"""The launcher of a rank above 0 of a group that spans nodes: its engine has no HTTP and follows the leader's runs."""

from __future__ import annotations

import http.client
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.worker.engines.command import Place
from twinpool.worker.engines.select import engine_command
from twinpool.worker.logic import follower
from twinpool.worker.logic.events import Timing
from twinpool.worker.logic.follower import AskLeader, Ended, Heard, Silent, StartRank
from twinpool.worker.logic.machine import clock_finding, skew
from twinpool.worker.logic.ranks import Answer, Report
from twinpool.worker.shell.host import Host, log, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.protocol import Leader, WorkerConfig
    from twinpool.worker.logic.machine import Finding
    from twinpool.worker.logic.report import Snapshot

#: Overrides where the leader is written, for runs outside a pod.
LEADER_FILE_ENV = "TWINPOOL_LEADER_FILE"
#: Seconds for one answer of the leader, and the most of it that is read, in bytes.
ASK_TIMEOUT = 3.0
MAX_ANSWER = 65536


class Follower(Host):
    """Runs one engine that answers to its leader only."""

    def __init__(self, config: WorkerConfig, environment: Mapping[str, str], rank: int) -> None:
        self._state = follower.State()
        self._timing = Timing(config.startup_timeout, config.drain_timeout, config.nodes)
        self._rank = rank
        self._clock: Finding | None = None
        self._file = Path(environment.get(LEADER_FILE_ENV, protocol.LEADER_FILE))
        super().__init__(config, environment, self._state)

    def _step(self, event: Any) -> follower.Step:
        self._state, actions = follower.step(self._state, event, time.monotonic(), self._timing)
        return self._state, actions

    def _due(self) -> float | None:
        return follower.next_wakeup(self._state)

    def _ended(self, reason: str) -> Ended:
        return Ended(reason)

    @staticmethod
    def starts(action: Any) -> bool:
        """Return whether the action starts the engine."""
        return isinstance(action, StartRank)

    def _start(self, action: StartRank) -> None:
        place = Place(self._rank, action.leader)
        command = engine_command(
            self._config, self._pod, self._environment, visible_gpus(), sys.executable, place, self._speculative()
        )
        self._announce(command)
        self._spawn(command, place, Ended)

    def _ask(self, action: AskLeader) -> None:
        leader = self._leader()
        if leader is None:
            self._inbox.put(Silent(f"nobody has named the leader yet (the operator writes it to {self._file})"))
            return
        report = Report(leader.uid, self._rank, self._pod.name, action.run, action.state, action.reason)
        answer, date = _told(leader, report)
        self._compare(clock_finding(skew(date, time.time()), leader.address))
        self._inbox.put(answer)

    def _compare(self, clock: Finding | None) -> None:
        """Keep what is wrong with the clocks, and log it when it was not before."""
        if clock is not None and self._clock is None:
            log(f"WARNING: {clock}")
        self._clock = clock

    def _read(self) -> Snapshot:
        read, clock = super()._read(), self._clock
        return read if clock is None else replace(read, findings=(*read.findings, clock))

    def _leader(self) -> Leader | None:
        try:
            return protocol.Leader.from_json(self._file.read_text(encoding="utf-8"))
        except OSError:
            return None


def _told(leader: Leader, report: Report) -> tuple[Heard | Silent, str | None]:
    """Send the report to the leader and return what it says, and the time on its clock as HTTP writes it."""
    connection = http.client.HTTPConnection(leader.address, protocol.LAUNCHER_PORT, timeout=ASK_TIMEOUT)
    who = f"the leader at {leader.address}"
    try:
        connection.request("POST", "/group", body=report.to_json().encode())
        response = connection.getresponse()
        body = response.read(MAX_ANSWER)
    except (OSError, http.client.HTTPException) as error:
        return Silent(f"{who} does not answer: {type(error).__name__}: {error}"), None
    finally:
        connection.close()
    answer = Answer.from_json(body) if response.status == http.HTTPStatus.OK else None
    if answer is None:
        return Silent(f"{who} answered {response.status}: {body[:200].decode(errors='replace').strip()}"), None
    return Heard(leader.address, answer), response.getheader("Date")
