"""What is wrong with a pod's machine or its model's files before the engine starts, by name, and what to do about it.

An engine meets these minutes later, with an error that names none of them, or runs slowly and says nothing. Always
true: a finding is *fatal* only where no engine could start or serve, so that a doubtful reading stops nobody.
"""

from __future__ import annotations

import csv
import email.utils
import io
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What ``nvidia-smi --query-gpu`` is asked for, in this order.
FIELDS = (
    "index",
    "name",
    "driver_version",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.failure",
    "clocks_throttle_reasons.hw_thermal_slowdown",
    "clocks_throttle_reasons.hw_power_brake_slowdown",
)
#: Least /dev/shm for ranks that talk over it; NVIDIA's PyTorch images ask for ``--shm-size=1g``, containers get 64 MiB.
LEAST_SHM = 2**30
#: Oldest driver for each major version of CUDA (https://docs.nvidia.com/deploy/cuda-compatibility/).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
#: Seconds between two clocks of a group from which on their logs and traces cannot be laid side by side.
MOST_SKEW = 5.0
#: What a file of a model looks like that was cloned without its content.
LFS_POINTER = b"version https://git-lfs"
_SHOWN = 3


FindingName = Literal[
    "ModelIncomplete",
    "GpuCount",
    "GpuUnknown",
    "GpuMemoryDamaged",
    "GpuMemoryErrors",
    "GpuThrottled",
    "DriverTooOld",
    "SharedMemorySmall",
    "ClockSkew",
    "VersionSkew",
]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its name, what and where, and what to do."""

    name: FindingName
    text: str
    advice: str
    fatal: bool = False

    def __str__(self) -> str:
        """Return it as one line."""
        return f"{self.name}: {self.text} - {self.advice}"


@dataclass(frozen=True)
class Gpu:
    """One GPU as ``nvidia-smi`` shows it; ``uncorrected`` counts memory errors since the driver was loaded."""

    index: str
    name: str
    driver: str
    uncorrected: int
    remap_failed: bool
    #: What slows its clocks down, in words.
    slowed: tuple[str, ...]


@dataclass(frozen=True)
class Machine:
    """What was seen."""

    #: Bytes of /dev/shm; None when there is none.
    shm: int | None = None
    #: None when there is no ``nvidia-smi``, or it did not answer: then ``silent`` says why.
    gpus: tuple[Gpu, ...] | None = None
    silent: str = ""
    #: The CUDA that the engine's torch was built for, such as 13.0; empty when that is not known.
    cuda: str = ""
    #: Files of the model that its index lists and the folder does not have in full.
    missing: tuple[str, ...] = ()
    model_path: str = ""


def gpus(text: str) -> tuple[Gpu, ...]:
    """Read the answer to :data:`FIELDS`, as CSV without header; lines of another shape are left out."""
    rows = csv.reader(io.StringIO(text), skipinitialspace=True)
    return tuple(_gpu(row) for row in rows if len(row) == len(FIELDS))


def _gpu(row: Sequence[str]) -> Gpu:
    index, name, driver, errors, remap, heat, power = (cell.strip() for cell in row)
    reasons = (("heat", heat), ("a power brake", power))
    return Gpu(
        index,
        name,
        driver,
        int(errors) if errors.isdecimal() else 0,
        remap.lower() in ("yes", "1"),
        tuple(word for word, state in reasons if state == "Active"),
    )


def cuda_of(source: str) -> str:
    """Return the CUDA that torch was built for, from the text of its ``version.py``; empty for other builds."""
    found = re.search(r"^cuda\b[^=]*= *'([\d.]+)'", source, re.MULTILINE)
    return found.group(1) if found else ""


def shards(index: str | bytes) -> tuple[str, ...]:
    """Return the files that a ``*.index.json`` lists, in order; none when it is not one."""
    try:
        value: Any = json.loads(index)
        return tuple(sorted({str(name) for name in value["weight_map"].values()}))
    except (ValueError, TypeError, KeyError, AttributeError):
        return ()


def skew(date: str | None, now: float) -> float | None:
    """Return how far the clock that wrote an HTTP ``Date`` is behind ``now`` (seconds since 1970); None without one.

    A date has whole seconds, so up to one second is nothing.
    """
    try:
        return now - email.utils.parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return None


def clock_finding(behind: float | None, leader: str) -> Finding | None:
    """Return what is wrong with the clocks of a rank and its leader."""
    if behind is None or abs(behind) < MOST_SKEW:
        return None
    word = "ahead of" if behind > 0 else "behind"
    return Finding(
        "ClockSkew",
        f"this node's clock is {abs(behind):.0f} s {word} that of the leader's node at {leader}",
        "start time synchronisation (chrony, systemd-timesyncd) on both nodes",
    )


def version_finding(own: str, operator: str) -> Finding | None:
    """Return that launcher and operator are of different versions; None when they are not, or one is not known."""
    if own == operator or not operator or own == "unknown":
        return None
    return Finding(
        "VersionSkew",
        f"the launcher is of version {own}, the operator that made this pod of {operator}",
        "set the operator's worker image to its own version; settings that the older one does not know have no effect",
    )


def findings(machine: Machine, wanted: int, local_ranks: int) -> tuple[Finding, ...]:
    """Return what is wrong, for a pod that was given ``wanted`` GPUs and runs ``local_ranks`` ranks."""
    found = [*_model(machine), *_shm(machine, local_ranks)]
    if wanted and machine.gpus is not None:
        found += [*_count(machine.gpus, wanted), *_driver(machine)]
        for gpu in machine.gpus:
            found += _health(gpu)
    elif wanted and machine.silent:
        text = f"nvidia-smi did not answer: {machine.silent}"
        advice = "look at the node's driver (dmesg, journalctl -k); a GPU that has fallen off the bus hangs it"
        found.append(Finding("GpuUnknown", text, advice))
    return tuple(found)


def _model(machine: Machine) -> list[Finding]:
    if not machine.missing:
        return []
    names = ", ".join(machine.missing[:_SHOWN])
    more = len(machine.missing) - _SHOWN
    text = f"{machine.model_path} lacks what its index lists: {names}" + (f" and {more} more" if more > 0 else "")
    advice = "copy the model again, in full; a git clone without git-lfs leaves pointers in place of files"
    return [Finding("ModelIncomplete", text, advice, fatal=True)]


def _shm(machine: Machine, local_ranks: int) -> list[Finding]:
    if local_ranks < 2 or machine.shm is None or machine.shm >= LEAST_SHM:
        return []
    text = f"shared memory (/dev/shm) has {machine.shm / 2**20:.0f} MiB for {local_ranks} ranks that talk over it"
    return [Finding("SharedMemorySmall", text, f"set resources.shm of the role to at least {LEAST_SHM >> 30}Gi")]


def _count(seen: tuple[Gpu, ...], wanted: int) -> list[Finding]:
    if len(seen) == wanted:
        return []
    text = f"{len(seen)} GPUs are visible, the pod was given {wanted}"
    if len(seen) > wanted:
        advice = "others may use them too: remove privileged mode and NVIDIA_VISIBLE_DEVICES from podTemplate and env"
        return [Finding("GpuCount", text, advice)]
    return [Finding("GpuCount", text, "a GPU has failed: drain the node and look at its driver's log", fatal=True)]


def _driver(machine: Machine) -> list[Finding]:
    major = machine.cuda.partition(".")[0]
    oldest = OLDEST_DRIVER.get(int(major)) if major.isdecimal() else None
    for gpu in machine.gpus or ():
        driver = gpu.driver.partition(".")[0]
        if oldest is not None and driver.isdecimal() and int(driver) < oldest:
            text = f"driver {gpu.driver} is older than {oldest}, from which on CUDA {machine.cuda} of the image runs"
            advice = "upgrade the node's driver, or take an image for an older CUDA (cuda-compat in the image may do)"
            return [Finding("DriverTooOld", text, advice)]
    return []


def _health(gpu: Gpu) -> list[Finding]:
    found = []
    who = f"GPU {gpu.index} ({gpu.name})"
    if gpu.remap_failed:
        text = f"{who} has damaged memory that could not be replaced by spare rows"
        found.append(Finding("GpuMemoryDamaged", text, "take the node out of service and have the GPU replaced"))
    elif gpu.uncorrected:
        text = f"{who} had {gpu.uncorrected} uncorrected memory errors since its driver was loaded"
        found.append(
            Finding("GpuMemoryErrors", text, "drain the node and reset the GPU; replace it when they come back")
        )
    if gpu.slowed:
        text = f"{who} is slowed down by {' and '.join(gpu.slowed)}"
        found.append(
            Finding("GpuThrottled", text, "look at the node's cooling and power; the whole group waits for it")
        )
    return found
