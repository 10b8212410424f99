"""CPU seconds of a process with everything below it, from ``/proc``.

Wall time on a shared machine says little; the CPU that work cost says what a core can carry.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """One line of ``/proc/PID/stat``: ticks of the process itself and of its children that ended (proc(5))."""

    pid: int
    parent: int
    ticks: int


def parse_stat(text: str) -> ProcessTimes:
    """Read ``/proc/PID/stat``; the command in parentheses may hold spaces and parentheses of its own."""
    pid, _, rest = text.partition(" ")
    fields = rest[rest.rindex(")") + 2 :].split()
    # Fields 14 to 17 of proc(5): utime, stime, cutime, cstime; ``fields`` starts with field 3.
    return ProcessTimes(int(pid), int(fields[1]), sum(int(value) for value in fields[11:15]))


def tree_ticks(processes: Iterable[ProcessTimes], root: int) -> int:
    """Return the ticks of ``root`` and all its living descendants, with their children that ended."""
    children: dict[int, list[ProcessTimes]] = {}
    total, waiting = 0, [root]
    for process in processes:
        children.setdefault(process.parent, []).append(process)
        if process.pid == root:
            total += process.ticks
    while waiting:
        for child in children.get(waiting.pop(), ()):
            total += child.ticks
            waiting.append(child.pid)
    return total


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds that the process tree under ``pid`` has used so far; 0 once it is gone."""
    return tree_ticks(_all_processes(), pid) / os.sysconf("SC_CLK_TCK")


def _all_processes() -> Iterable[ProcessTimes]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield parse_stat((entry / "stat").read_text())
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
