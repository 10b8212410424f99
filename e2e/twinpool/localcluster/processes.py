"""A tree of processes that ends with the process that holds it, however that one ends.

Every child asks the kernel for SIGKILL at its parent's death, and the holder adopts orphaned grandchildren
(PR_SET_CHILD_SUBREAPER), so that it can wait until the very last one is gone. The death signal is sent when the
*thread* that forked ends: only the main thread may spawn.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.localcluster.errors import ClusterError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MARKER = "TWINPOOL_LOCALCLUSTER"
"""Environment variable of every process of a cluster; its value is the cluster's folder."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl() -> Callable[[int, int], int]:
    library = ctypes.CDLL(None, use_errno=True)
    return lambda option, value: int(library.prctl(option, value, 0, 0, 0))


def die_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that ties a child to this thread. For the main thread of a process."""
    assert threading.current_thread() is threading.main_thread(), "children die with the thread that forks them"
    parent, prctl = os.getpid(), _prctl()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return tie


class ProcessTree:
    """Children by name, each with a log file in ``logs``."""

    def __init__(self, logs: Path, marker: str) -> None:
        self._logs = logs
        self._marker = marker
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: dict[str, int] = {}
        if _prctl()(_PR_SET_CHILD_SUBREAPER, 1) != 0:
            raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")

    def spawn(self, name: str, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        """Start a child in a session of its own: a Ctrl-C at the terminal is the holder's alone."""
        assert name not in self._running, f"{name} runs already"
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                command,
                env={**env, MARKER: self._marker},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    def log(self, name: str) -> Path:
        """Return the log file of a child."""
        return self._logs / f"{name}.log"

    def pid(self, name: str) -> int | None:
        """Return the process id of a running child."""
        process = self._running.get(name)
        return process.pid if process else None

    def reap(self) -> dict[str, int]:
        """Collect what has ended, adopted orphans too; return the exit codes of our own children (negative: signal)."""
        self._collect()
        ended, self._ended = self._ended, {}
        return ended

    def _collect(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                for name, process in list(self._running.items()):
                    if process.pid == pid:
                        self._ended[name] = process.returncode = os.waitstatus_to_exitcode(status)
                        del self._running[name]

    def kill(self, name: str, timeout: float = 10) -> None:
        """Kill one child, and return when it is gone; its own children follow by their death signals."""
        process = self._running.get(name)
        if process is None:
            return
        os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + timeout
        while name in self._running and time.monotonic() < deadline:
            self._collect()
            time.sleep(0.01)
        self._ended.pop(name, None)

    def kill_all(self, timeout: float = 20) -> None:
        """Kill every descendant, and return when none is left.

        Raises
        ------
        ClusterError
            Some are still there after ``timeout`` seconds.
        """
        for process in self._running.values():
            os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + timeout
        while children := _children():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"processes {sorted(children)} do not end", "look at them with ps; they are not ours to wait for"
                )
            for pid in children:  # an adopted orphan that its parent's death did not end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._collect()
            time.sleep(0.01)


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def marked(marker: str) -> list[int]:
    """Return the ids of all processes that carry this mark: what is left of a cluster whose supervisor is gone."""
    entry = f"{MARKER}={marker}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def end_marked(marker: str, timeout: float = 10) -> None:
    """Wait until no marked process is left; those that do not end by themselves within a second are killed."""
    start = time.monotonic()
    while pids := marked(marker):
        waited = time.monotonic() - start
        if waited > timeout:
            raise ClusterError(f"processes {pids} of an earlier cluster do not end", "end them, then start again")
        if waited > 1:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
