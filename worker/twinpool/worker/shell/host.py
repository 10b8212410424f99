"""What the launchers of all ranks share: one loop that turns signals, child exits and answers into events.

One thread (the main one) owns the state. Questions run on a helper thread each, because a probe token can take minutes
while SIGTERM must be heard at once; there are never more than two questions at a time per start: a look and a probe.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.command import Command, Pod, behind_preflight, ranks, redacted, wants_preflight
from twinpool.worker.logic import experts, tiers, weights
from twinpool.worker.logic.events import Begin, Quit, StopEngine, Terminate, Tick
from twinpool.worker.logic.failure import failure_reason, termination_message
from twinpool.worker.logic.machine import findings, version_finding
from twinpool.worker.logic.preflight import Result
from twinpool.worker.logic.report import Snapshot
from twinpool.worker.logic.speculation import choose
from twinpool.worker.release import version
from twinpool.worker.shell import machine, process
from twinpool.worker.shell.endpoint import Endpoint
from twinpool.worker.shell.inbox import Inbox
from twinpool.worker.shell.preflight import this_program
from twinpool.worker.shell.surroundings import look
from twinpool.worker.shell.trimmer import Trimmer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from twinpool.core.protocol import WorkerConfig
    from twinpool.worker.engines.command import Place
    from twinpool.worker.logic.machine import Finding
    from twinpool.worker.logic.report import Life

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
        The path of the model, of the one that drafts for it, or of an adapter is absolute and does not exist.
    """
    paths = [("model", config.model_path, "model.source"), ("draft model", config.draft_model, "speculation.model")]
    paths += [("adapter", path, "model.adapters") for path in config.adapter_paths]
    for what, path, field in paths if config.engine == "vllm" else ():
        if path is not None and path.startswith("/") and not Path(path).exists():
            raise InvalidValue(
                f"the {what}'s path {path} does not exist in the engine's container",
                f"check {field}, and that the volume is mounted there",
            )


def _trimmed(config: WorkerConfig) -> dict[str, tuple[Path, int]]:
    """Return the folders of KV tiers that vLLM lets grow without end, and their sizes."""
    folders = {"disk": protocol.KV_DISK_DIRECTORY, "shared": protocol.KV_SHARED_DIRECTORY}
    have = tiers.sizes(config) if config.engine == "vllm" else {}
    return {kind: (Path(folder), have[kind]) for kind, folder in folders.items() if kind in have}


def _scratch(*, wanted: bool) -> Path | None:
    """Return a folder for what the launcher's other processes find; None where there are none."""
    if not wanted:
        return None
    try:
        return Path(tempfile.mkdtemp(prefix="twinpool-"))
    except OSError as error:
        raise InvalidValue(
            f"there is no folder for temporary files: {error.strerror}", "mount a writable /tmp"
        ) from None


def cannot_start(program: str, error: OSError) -> InvalidValue:
    """Return what to say when the program of an engine or a renderer is not there."""
    return InvalidValue(
        f"cannot start {program!r}: {error.strerror}", "set engine.python to an interpreter of the image"
    )


def write_termination_message(message: str, environment: Mapping[str, str]) -> None:
    """Leave ``message`` where the kubelet reads it; outside a pod the file does not exist and nothing is written."""
    path = Path(environment.get(TERMINATION_LOG_ENV, TERMINATION_LOG))
    try:
        if path.exists() or TERMINATION_LOG_ENV in environment:
            path.write_text(message, encoding="utf-8")
    except OSError as error:
        log(f"cannot write the termination message to {path}: {error.strerror}")


class Host(ABC):
    """Runs one engine until the pod must go or the engine cannot be kept. What decides is in the subclass's logic.

    Raises
    ------
    InvalidValue
        When the settings cannot be used, the model is not there in full, or GPUs are missing.
    PortTaken
        When the launcher's own port cannot be bound.
    """

    #: Answers a question of another rank; None where nobody asks.
    _hear: Callable[[bytes], tuple[int, str]] | None = None

    def __init__(self, config: WorkerConfig, environment: Mapping[str, str], state: Life) -> None:
        check_model_path(config)
        self._pod = Pod.from_environment(environment)
        self._config = config
        self._environment = environment
        self._process: process.EngineProcess | None = None
        self._inbox = Inbox()
        self._terminate = False
        self._quit: Quit | None = None
        self._findings = self._checked(config)
        found = look(config)
        self._expert_layers = experts.expert_layers(found)
        self._speculation = choose(config, found)
        self._snapshot = Snapshot(
            state,
            config.engine,
            config.model,
            config.role,
            version(),
            speculation=self._speculation.words if self._speculation else "",
            tiers=tiers.expected(config, found),
            findings=self._findings,
        )
        self._trimmer = Trimmer(_trimmed(config), log)
        fetches, measures = weights.wanted(config, environment), wants_preflight(config)
        self._scratch = _scratch(wanted=fetches or measures)
        self._weights = self._scratch / "weights.json" if self._scratch and fetches else None
        self._preflight = self._scratch / "preflight.json" if self._scratch and measures else None
        self._endpoint = Endpoint(self._pod.ip, protocol.LAUNCHER_PORT, self._read, self._hear)

    @staticmethod
    def _checked(config: WorkerConfig) -> tuple[Finding, ...]:
        """Look at the machine; what does not stop the engine is logged and returned."""
        skew = version_finding(version(), config.operator_version)
        found = (
            *findings(machine.look(config), config.gpus, ranks(config) // config.nodes),
            *((skew,) if skew else ()),
        )
        for each in found:
            if each.fatal:
                raise InvalidValue(f"{each.name}: {each.text}", each.advice)
            log(f"WARNING: {each}")
        return found

    @abstractmethod
    def _step(self, event: Any) -> tuple[Life, tuple[Any, ...]]:
        """Take an event in; return the state after it and what to do."""

    @abstractmethod
    def _due(self) -> float | None:
        """Return the time at which the state changes by itself."""

    @abstractmethod
    def _ended(self, reason: str) -> Any:
        """Return the event that the engine ended."""

    @abstractmethod
    def _start(self, action: Any) -> None:
        """Start the engine."""

    @abstractmethod
    def _ask(self, action: Any) -> None:
        """Ask what the action wants to know and put the answer into the inbox; runs on a thread of its own."""

    def run(self) -> int:
        """Run to the end; return the exit code."""
        process.become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        self._inbox.wake_on_signals()
        self._trimmer.start()
        self._quit = self._load_weights()
        if self._quit is None:
            self._handle(Begin())
        while self._quit is None:
            self._handle(self._next_event())
        return self._leave(self._quit)

    def _load_weights(self) -> Quit | None:
        """Have the model fetched and checked; return how to leave when the engine cannot be started then.

        What comes in meanwhile is dropped: other ranks repeat what they say.
        """
        if self._weights is None:
            return None
        argv = (self._config.python, *this_program(), "weights", str(self._weights))
        try:
            self._process = process.EngineProcess(Command(argv, self._environment, on_cpu=True))
        except OSError as error:
            return Quit(1, str(cannot_start(argv[0], error)))
        limit = self._config.startup_timeout
        deadline = time.monotonic() + limit
        while (code := self._reaped()) is None:
            if self._terminate:
                return Quit(0, "the pod must go and no engine runs")
            if time.monotonic() >= deadline:
                return Quit(1, f"{self._fetched() or 'weights'}, not within the startup timeout of {limit:g} s")
            self._inbox.take(min(1.0, deadline - time.monotonic()))
        lines = self._process.tail.lines()
        if code:
            return Quit(1, failure_reason(lines, code))
        self._process = None
        return None

    def _fetched(self) -> weights.Progress | None:
        """Return how far the weights are; None where nothing is fetched or checked."""
        if self._weights is not None:
            with contextlib.suppress(OSError):
                return weights.Progress.from_json(self._weights.read_bytes())
        return None

    def _speculative(self) -> str:
        """Return the value of ``--speculative-config``, empty for none."""
        return self._speculation.argument if self._speculation else ""

    def _announce(self, command: Command) -> None:
        if self._config.engine == "vllm" and command.on_cpu:
            wanted = f"{self._config.gpus} were asked for" if self._config.gpus else "none was asked for"
            log(f"WARNING: NO GPU IS USED ({wanted}, {visible_gpus()} visible): vLLM runs on the CPU, slowly")
        if self._speculation is not None:
            log(f"speculation: {self._speculation.words}")
        if self._snapshot.tiers:
            log(f"KV tiers: {self._snapshot.tiers}")
        log(f"{self._config.role} of pool {self._config.pool} starts {shlex.join(redacted(command.argv))}")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._terminate = True

    def _next_event(self) -> Any:
        """Return the next event: a signal's, an answer, or a tick when one is due."""
        if self._terminate:
            self._terminate = False
            return Terminate()
        code = self._reaped()
        if code is not None and self._process is not None:
            return self._ended(failure_reason(self._process.tail.lines(), code))
        due = self._due()
        return self._inbox.take(None if due is None else max(0.0, due - time.monotonic())) or Tick()

    def _reaped(self) -> int | None:
        """Reap every child that ended; return the engine's exit code, if it is among them."""
        code = None
        for pid, exit_code in process.reap():
            if self._process is not None and pid == self._process.pid:
                code = exit_code
        if code is not None and self._process is not None:
            self._process.finish(code)
        return code

    def _handle(self, event: Any) -> None:
        before = self._snapshot.state
        state, actions = self._step(event)
        self._publish(state)
        if state.phase != before.phase:
            log(f"{state.phase}" + (f": {state.reason}" if state.reason else ""))
        for action in actions:
            self._execute(action)

    def _execute(self, action: Any) -> None:
        if isinstance(action, StopEngine):
            self._stop(force=action.force)
        elif isinstance(action, Quit):
            self._quit = action
        elif self.starts(action):
            self._start(action)
        else:
            threading.Thread(target=self._ask, args=(action,), name="question", daemon=True).start()

    @staticmethod
    @abstractmethod
    def starts(action: Any) -> bool:
        """Return whether the action starts the engine."""

    def _spawn(self, command: Command, place: Place, failed: Callable[[str], Any]) -> None:
        """Start the engine, behind a preflight where one is due; ``failed`` makes the event that it cannot start."""
        if self._preflight is not None:
            self._preflight.unlink(missing_ok=True)
            program = [sys.executable, *this_program()]
            command = behind_preflight(command, self._config, self._pod, place, program, str(self._preflight))
        fetched = self._fetched()
        if fetched is not None and fetched.offline:
            command = replace(command, environment={**command.environment, "HF_HUB_OFFLINE": "1"})
        try:
            for path, text in command.files.items():
                Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            self._process = None
            self._inbox.put(failed(f"cannot write {path}: {error.strerror} - mount a writable /tmp"))
            return
        try:
            self._process = process.EngineProcess(command)
        except OSError as error:
            self._process = None
            self._inbox.put(failed(str(cannot_start(command.argv[0], error))))
        self._publish(self._snapshot.state)

    def _stop(self, *, force: bool) -> None:
        if self._process is None:
            return
        if force:
            self._process.kill()
        else:
            self._process.terminate()

    def _publish(self, state: Life) -> None:
        idle = state.phase in ("joining", "backoff", "stopped")
        pid = self._process.pid if self._process and not idle else None
        self._snapshot = replace(self._snapshot, state=state, pid=pid)

    def _read(self) -> Snapshot:
        """Return the snapshot with the lines of this moment; called on the endpoint's threads."""
        current = self._process
        found = None
        if self._preflight is not None:
            with contextlib.suppress(OSError):
                found = Result.from_json(self._preflight.read_bytes())
        lines = current.tail.lines() if current else ()
        return replace(self._snapshot, last_lines=lines, preflight=found, weights=self._fetched())

    def _leave(self, end: Quit) -> int:
        """End what is left, say why, and return the exit code."""
        lines = self._process.tail.lines() if self._process else ()
        if self._process is not None:
            self._process.kill()
        if end.code:
            log(f"leaving with exit code {end.code}: {end.reason}")
            write_termination_message(termination_message(end.reason, lines), self._environment)
        self._endpoint.close()
        self._inbox.close()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        return end.code
