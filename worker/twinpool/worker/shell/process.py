"""The engine's processes: start them in a group of their own, pass their output on, end them all, reap everything.

The launcher is PID 1 of its container (or a subreaper elsewhere), so every orphan below the engine becomes its child.
Only :meth:`EngineProcess.reap` waits for children; nothing else may, or an exit code would be lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.worker.logic.experts import MARK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.worker.engines.command import Command

#: Last lines kept, and the longest line, in bytes: they bound what an engine can make the launcher hold. The generic
#: traceback that vLLM prints after the cause has 60 lines.
LAST_LINES = 400
LONGEST_LINE = 2000
MARKED_LINES = 32
#: Seconds for which survivors of a dead engine are chased before the next start.
SWEEP_SECONDS = 10.0
_CHUNK = 65536
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make orphans of the engine children of this process where it is not PID 1 (Linux; elsewhere nothing changes)."""
    if os.getpid() == 1:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Tail:
    """The last lines of a byte stream, with bounded memory."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=LAST_LINES)
        self._marked: deque[bytes] = deque(maxlen=MARKED_LINES)
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Add bytes as they come; progress bars that end in a carriage return count as lines."""
        *lines, self._partial = (self._partial + data).replace(b"\r", b"\n").split(b"\n")
        self._partial = self._partial[:LONGEST_LINE]
        self._lines.extend(line[:LONGEST_LINE] for line in lines if line.strip())
        self._marked.extend(line[:LONGEST_LINE] for line in lines if MARK in line)

    def marked(self) -> tuple[str, ...]:
        """Return the last lines in which the engine told of its experts, which others do not push out."""
        return tuple(line.decode(errors="replace") for line in list(self._marked))

    def lines(self) -> tuple[str, ...]:
        """Return the lines so far, oldest first, the unfinished one last."""
        raw = [*list(self._lines), *([self._partial] if self._partial.strip() else [])]
        return tuple(line.decode(errors="replace") for line in raw)


class EngineProcess:
    """One start of the engine.

    Raises
    ------
    OSError
        When the program cannot be started.
    """

    def __init__(self, command: Command) -> None:
        self.tail = Tail()
        self._process = subprocess.Popen(
            command.argv,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._pass_on, name="engine output", daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        out = sys.stdout.fileno()
        with pipe:
            while chunk := os.read(pipe.fileno(), _CHUNK):
                self.tail.feed(chunk)
                _write_all(out, chunk)

    def terminate(self) -> None:
        """Send SIGTERM to the first process, which ends the others itself."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to the whole group, unless it is gone: its number may be another's by now."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def finish(self, returncode: int) -> None:
        """Clean up after the first process was reaped: end the survivors and read the rest of the output."""
        self.kill()
        self._process.returncode = returncode
        deadline = time.monotonic() + SWEEP_SECONDS
        while time.monotonic() < deadline and kill_children():
            time.sleep(0.05)
        self._reader.join(timeout=1.0)


def reap() -> Iterator[tuple[int, int]]:
    """Yield the pid and the exit code (negative for a signal) of every child that ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def kill_children() -> bool:
    """Kill and reap all children of this process; return whether any is left.

    Called only when the engine's first process is gone, so they are orphans of it that left its group.
    """
    for _ in reap():
        pass
    left = children()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


def children() -> list[int]:
    """Return the pids of this process's children."""
    own = str(os.getpid())
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            # "pid (name) state ppid ...", where the name may hold spaces and parentheses
            if (entry / "stat").read_text().rpartition(")")[2].split()[1] == own:
                found.append(int(entry.name))
    return found


def _write_all(descriptor: int, data: bytes) -> None:
    """Write ``data``; a closed log must not end the engine."""
    view = memoryview(data)
    with contextlib.suppress(OSError):
        while view:
            view = view[os.write(descriptor, view) :]
