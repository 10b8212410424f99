"""The launcher of a worker, or of rank 0 of a group that spans nodes: starts, probes, drains, restarts its engine."""

from __future__ import annotations

import os
import sys
import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.worker.engines.command import Place
from twinpool.worker.engines.select import engine_command
from twinpool.worker.logic import experts, load, speculation, supervisor, tiers
from twinpool.worker.logic.events import (
    CheckHealth,
    Exited,
    HealthSeen,
    LoadSeen,
    Look,
    RankHeard,
    Seen,
    SendProbe,
    StartEngine,
    Timing,
)
from twinpool.worker.logic.ranks import Answer, Report
from twinpool.worker.shell import disk
from twinpool.worker.shell.engine_client import EngineClient
from twinpool.worker.shell.follower import Follower
from twinpool.worker.shell.host import Host, visible_gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.expert_load import Balance
    from twinpool.core.protocol import WorkerConfig
    from twinpool.worker.logic.report import Snapshot

_BAD_REQUEST, _CONFLICT = 400, 409


class Launcher(Host):
    """Runs one engine that answers HTTP."""

    def __init__(self, config: WorkerConfig, environment: Mapping[str, str]) -> None:
        self._state = supervisor.State(instance=uuid.uuid4().hex)
        self._timing = Timing(config.startup_timeout, config.drain_timeout, config.nodes, config.stall_timeout)
        if config.nodes > 1:
            self._hear = self._rank_asks
        super().__init__(config, environment, self._state)
        gpus, leader = visible_gpus(), Place(leader=self._pod.ip)
        self._command = engine_command(
            config, self._pod, environment, gpus, sys.executable, leader, self._speculative()
        )
        self._kept: speculation.Kept | None = None
        self._tiers: tiers.TierState | None = None
        self._client = EngineClient(
            self._pod.ip, protocol.ENGINE_PORT, config.model, environment.get("VLLM_API_KEY", ""), config.data
        )

    def run(self) -> int:
        """Run to the end; return the exit code."""
        self._announce(self._command)
        return super().run()

    def _step(self, event: Any) -> supervisor.Step:
        self._state, actions = supervisor.step(self._state, event, time.monotonic(), self._timing)
        return self._state, actions

    def _due(self) -> float | None:
        return supervisor.next_wakeup(self._state)

    def _ended(self, reason: str) -> Exited:
        return Exited(self._state.epoch, reason)

    @staticmethod
    def starts(action: Any) -> bool:
        """Return whether the action starts the engine."""
        return isinstance(action, StartEngine)

    def _start(self, action: StartEngine) -> None:
        self._spawn(self._command, Place(leader=self._pod.ip), lambda reason: Exited(action.epoch, reason))

    def _ask(self, action: Any) -> None:
        if isinstance(action, CheckHealth):
            self._inbox.put(HealthSeen(action.epoch, self._client.healthy() is True))
        elif isinstance(action, SendProbe):
            self._inbox.put(self._client.probe(action.timeout, action.epoch))
        elif isinstance(action, Look):
            health = self._client.healthy()
            metrics = self._client.metrics()
            self._kept = speculation.read(metrics)
            self._tiers = tiers.read(self._config, metrics, self._trimmer.removed)
            self._inbox.put(Seen(action.epoch, health, load.work(metrics), disk.full(disk.places(self._environment))))
        else:
            metrics = self._client.metrics()
            # Only a prefill worker keeps blocks for others after a request has ended.
            held = self._config.role == "prefill" and load.kv_held(metrics)
            self._inbox.put(LoadSeen(action.epoch, load.busy(metrics), held))

    def _read(self) -> Snapshot:
        return replace(super()._read(), kept=self._kept, tier_state=self._tiers, experts=self._balance())

    def _balance(self) -> Balance | None:
        current = self._process
        if current is None or not self._config.expert_balancing:
            return None
        return experts.read(self._config, current.tail.marked(), self._expert_layers)

    def _rank_asks(self, body: bytes) -> tuple[int, str]:
        """Take in what another rank says and answer with the run; called on the endpoint's threads.

        Whoever does not know this pod's uid has another leader in mind, or no business here.
        """
        report = Report.from_json(body)
        if report is None:
            return _BAD_REQUEST, "not the report of a rank\n"
        if not self._pod.uid or report.uid != self._pod.uid:
            return _CONFLICT, "this pod is another one\n"
        self._inbox.put(RankHeard(report))
        state = self._state
        return 200, Answer(state.run, state.phase, state.ready).to_json()


def run(config: WorkerConfig, environment: Mapping[str, str] = os.environ) -> int:
    """Run the launcher for ``config``, as the rank that the pod has in its group; return the exit code."""
    rank = environment.get(protocol.NODE_RANK_ENV, "0") if config.nodes > 1 else "0"
    host: Host = Launcher(config, environment) if rank == "0" else Follower(config, environment, int(rank))
    return host.run()
