"""Why an engine is lost, by name, and what helps: the same loss is not mended in the same way.

The names are values of a metric and of ``/readyz``, so they stay few and stable. Always true: every cause has a remedy,
and only a cause that a new process on the same devices and disk cannot mend ends the container.
"""

from __future__ import annotations

import re
from typing import Literal

Cause = Literal[
    "Crashed",
    "Killed",
    "OutOfMemory",
    "DeviceError",
    "DeviceLost",
    "DiskFull",
    "StartTimeout",
    "EngineDead",
    "Silent",
    "Stuck",
    "Wedged",
    "Failing",
    "Aborting",
    "RankLost",
]
#: Each cause, and what it means for whoever reads the metric.
CAUSES: dict[Cause, str] = {
    "Crashed": "the engine's process ended by itself",
    "Killed": "the engine's process was ended by a signal that the launcher did not send",
    "OutOfMemory": "the accelerator's or the host's memory did not suffice",
    "DeviceError": "the accelerator or its communication failed; a new process may use it again",
    "DeviceLost": "the accelerator is gone or its memory is damaged; no new process can use it",
    "DiskFull": "a file system of the container has no room left",
    "StartTimeout": "no token came within the startup timeout",
    "EngineDead": "the HTTP server lives and says itself that its engine does not",
    "Silent": "the HTTP server does not answer",
    "Stuck": "requests run and no counter of the engine moves",
    "Wedged": "nothing runs, and a request for one token moves nothing",
    "Failing": "requests for one token end in errors",
    "Aborting": "requests are answered with status 200 and finish_reason abort: something told the engine to stop",
    "RankLost": "another pod of the group lost its engine or was not heard from",
}

#: Lost for good as far as this pod can tell: the container ends with its reason, where the kubelet's back-off holds it
#: and the operator sees it. Everything else is restarted in place.
LASTING: frozenset[Cause] = frozenset({"DeviceLost", "DiskFull"})

#: In this order. DeviceLost: the texts of cudaErrorECCUncorrectable, cudaErrorNoDevice, cudaErrorDevicesUnavailable and
#: of NVML's NVML_ERROR_GPU_IS_LOST, and what Linux logs of a GPU that left the bus (Xid 79).
_PATTERNS: dict[Cause, str] = {
    "DiskFull": r"No space left on device|Errno 28\b|ENOSPC|Disk quota exceeded",
    "DeviceLost": r"uncorrectable ECC|no CUDA-capable device|CUDA-capable device\(s\) is/are busy or unavailable"
    r"|GPU is lost|fallen off the bus",
    "OutOfMemory": r"out of memory|OutOfMemory|for want of memory|Cannot allocate memory",
    "DeviceError": r"CUDA error|HIP error|NCCL error|RCCL error|cudaError|ncclInternalError|CUBLAS_STATUS",
    "Killed": r"the engine was ended by (SIG|signal)",
}
_COMPILED = {cause: re.compile(pattern, re.IGNORECASE) for cause, pattern in _PATTERNS.items()}


def cause_of(reason: str, *, disk_full: bool = False) -> Cause:
    """Return the cause that ``reason``, what an engine said last, speaks of.

    ``disk_full`` is whether a file system was full at that time: then an end without a better cause is put down to it.
    """
    found = next((cause for cause, pattern in _COMPILED.items() if pattern.search(reason)), None)
    if found is None:
        return "DiskFull" if disk_full else "Crashed"
    return found
