"""The launcher's main loop: turn signals, child exits and answers into events, and actions into I/O.

One thread (this one) owns the state. Questions to the engine run on a helper thread each, because a probe token can
take minutes while SIGTERM must be heard at once; there is never more than one question at a time per start.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.command import Pod, redacted
from twinpool.worker.engines.select import engine_command
from twinpool.worker.logic import load, supervisor
from twinpool.worker.logic.failure import failure_reason, termination_message
from twinpool.worker.logic.report import Snapshot
from twinpool.worker.release import version
from twinpool.worker.shell import process
from twinpool.worker.shell.endpoint import Endpoint
from twinpool.worker.shell.engine_client import EngineClient
from twinpool.worker.shell.inbox import Inbox

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from twinpool.core.protocol import WorkerConfig
    from twinpool.worker.engines.command import Command

#: Overrides where the termination message goes, for runs outside a pod.
TERMINATION_LOG_ENV = "TWINPOOL_TERMINATION_LOG"
TERMINATION_LOG = "/dev/termination-log"


def log(message: str) -> None:
    """Write one line of the launcher's own to stderr, told apart from the engine's by its prefix."""
    print(f"twinpool-worker: {message}", file=sys.stderr, flush=True)


def visible_gpus() -> int:
    """Count the GPU devices in this container (NVIDIA, or AMD's one kernel driver)."""
    return len(list(Path("/dev").glob("nvidia[0-9]*"))) + len(list(Path("/dev").glob("kfd")))


def check_model_path(config: WorkerConfig) -> None:
    """Refuse a model folder that is not there, which vLLM takes for a wrong id after half a minute of imports.

    Raises
    ------
    InvalidValue
        The model's path is absolute and does not exist.
    """
    if config.engine == "vllm" and config.model_path.startswith("/") and not Path(config.model_path).exists():
        raise InvalidValue(
            f"the model's path {config.model_path} does not exist in the engine's container",
            "check model.source, and that the volume is mounted there",
        )


def write_termination_message(message: str, environment: Mapping[str, str]) -> None:
    """Leave ``message`` where the kubelet reads it; outside a pod the file does not exist and nothing is written."""
    path = Path(environment.get(TERMINATION_LOG_ENV, TERMINATION_LOG))
    try:
        if path.exists() or TERMINATION_LOG_ENV in environment:
            path.write_text(message, encoding="utf-8")
    except OSError as error:
        log(f"cannot write the termination message to {path}: {error.strerror}")


class Launcher:
    """Runs one engine until the pod must go or the engine cannot be kept.

    Raises
    ------
    InvalidValue
        When the settings cannot be turned into a command, or the model is not there.
    PortTaken
        When the launcher's own port cannot be bound.
    """

    def __init__(self, config: WorkerConfig, environment: Mapping[str, str]) -> None:
        pod = Pod.from_environment(environment)
        check_model_path(config)
        self._config = config
        self._environment = environment
        self._command = engine_command(config, pod, environment, visible_gpus(), sys.executable)
        self._client = EngineClient(pod.ip, protocol.ENGINE_PORT, config.model, environment.get("VLLM_API_KEY", ""))
        self._timing = supervisor.Timing(config.startup_timeout, config.drain_timeout)
        self._state = supervisor.State()
        self._process: process.EngineProcess | None = None
        self._inbox = Inbox()
        self._terminate = False
        self._quit: supervisor.Quit | None = None
        self._snapshot = Snapshot(self._state, config.engine, config.model, config.role, version())
        self._endpoint = Endpoint(pod.ip, protocol.LAUNCHER_PORT, self._read)

    def run(self) -> int:
        """Run to the end; return the exit code."""
        process.become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        self._inbox.wake_on_signals()
        self._announce(self._command)
        self._handle(supervisor.Begin())
        while self._quit is None:
            self._handle(self._next_event())
        return self._leave(self._quit)

    def _announce(self, command: Command) -> None:
        if self._config.engine == "vllm" and command.on_cpu:
            wanted = f"{self._config.gpus} were asked for" if self._config.gpus else "none was asked for"
            log(f"WARNING: NO GPU IS USED ({wanted}, {visible_gpus()} visible): vLLM runs on the CPU, slowly")
        log(f"{self._config.role} of pool {self._config.pool} starts {shlex.join(redacted(command.argv))}")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._terminate = True

    def _next_event(self) -> supervisor.Event:
        """Return the next event: a signal's, an answer, or a tick when one is due."""
        if self._terminate:
            self._terminate = False
            return supervisor.Terminate()
        exited = self._reap()
        if exited is not None:
            return exited
        due = supervisor.next_wakeup(self._state)
        return self._inbox.take(None if due is None else max(0.0, due - time.monotonic())) or supervisor.Tick()

    def _reap(self) -> supervisor.Exited | None:
        """Reap every child that ended; return the engine's end, if it is among them."""
        code = None
        for pid, exit_code in process.reap():
            if self._process is not None and pid == self._process.pid:
                code = exit_code
        if code is None or self._process is None:
            return None
        self._process.finish(code)
        return supervisor.Exited(self._state.epoch, failure_reason(self._process.tail.lines(), code))

    def _handle(self, event: supervisor.Event) -> None:
        before = self._state
        self._state, actions = supervisor.step(before, event, time.monotonic(), self._timing)
        self._publish()
        if self._state.phase != before.phase:
            log(f"{self._state.phase}" + (f": {self._state.reason}" if self._state.reason else ""))
        for action in actions:
            self._execute(action)

    def _execute(self, action: supervisor.Action) -> None:
        if isinstance(action, supervisor.StartEngine):
            self._start(action.epoch)
        elif isinstance(action, supervisor.StopEngine):
            self._stop(force=action.force)
        elif isinstance(action, supervisor.Quit):
            self._quit = action
        else:
            threading.Thread(target=self._ask, args=(action,), name="question", daemon=True).start()

    def _start(self, epoch: int) -> None:
        try:
            self._process = process.EngineProcess(self._command)
        except OSError as error:
            self._process = None
            reason = f"cannot start {self._command.argv[0]!r}: {error.strerror} - set engine.python to an interpreter"
            self._inbox.put(supervisor.Exited(epoch, f"{reason} of the image"))
        self._publish()

    def _stop(self, *, force: bool) -> None:
        if self._process is None:
            return
        if force:
            self._process.kill()
        else:
            self._process.terminate()

    def _ask(self, action: supervisor.CheckHealth | supervisor.SendProbe | supervisor.ReadLoad) -> None:
        if isinstance(action, supervisor.CheckHealth):
            self._inbox.put(supervisor.HealthSeen(action.epoch, self._client.healthy()))
        elif isinstance(action, supervisor.SendProbe):
            reason = self._client.probe(action.timeout)
            self._inbox.put(supervisor.ProbeEnded(action.epoch, not reason, reason))
        else:
            metrics = self._client.metrics()
            # Only a prefill worker keeps blocks for others after a request has ended.
            held = self._config.role == "prefill" and load.kv_held(metrics)
            self._inbox.put(supervisor.LoadSeen(action.epoch, load.busy(metrics), held))

    def _publish(self) -> None:
        running = self._process if self._state.phase not in ("backoff", "stopped") else None
        self._snapshot = replace(self._snapshot, state=self._state, pid=running.pid if running else None)

    def _read(self) -> Snapshot:
        """Return the snapshot with the lines of this moment; called on the endpoint's threads."""
        current = self._process
        return replace(self._snapshot, last_lines=current.tail.lines() if current else ())

    def _leave(self, end: supervisor.Quit) -> int:
        """End what is left, say why, and return the exit code."""
        lines = self._process.tail.lines() if self._process else ()
        if self._process is not None:
            self._process.kill()
        if end.code:
            log(f"leaving with exit code {end.code}: {end.reason}")
            write_termination_message(termination_message(end.reason, lines), self._environment)
        self._endpoint.close()
        self._inbox.close()
        return end.code


def run(config: WorkerConfig, environment: Mapping[str, str] = os.environ) -> int:
    """Run the launcher for ``config``; return the exit code."""
    return Launcher(config, environment).run()
