"""Patches for vLLM 0.32 with NIXL 1.5 on a machine with few cores. Tests and the demo only; never in a real pod.

Python imports this module at start when its folder is on PYTHONPATH. Nothing in site-packages is changed: a finder runs
a hook right after the named module was imported. Each hook says what goes wrong without it.

Environment: ``SHIM_FORK=1`` turns on the last hook; ``SHIM_OFF=1`` turns off all of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

#: Microseconds between two looks of the UCX progress thread.
PROGRESS_DELAY_US = 1000
#: Milliseconds between two looks for messages in shared memory.
RECHECK_MS = 20


class _Wrapped:
    """A module or namespace with some names replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        self._real = real
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def keep_affinity(module: ModuleType) -> None:
    """Ignore the NIXL worker's wish to pin itself: on the CPU every worker of a machine picks the same, last core."""
    vars(module)["os"] = _Wrapped(os, sched_setaffinity=lambda _pid, _mask: None)


def slow_progress_thread(module: ModuleType) -> None:
    """Let the UCX progress thread sleep: the Python interface of NIXL makes it spin and take a whole core."""
    real = module.nixlBind

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = PROGRESS_DELAY_US
        return real.nixlAgent(name, config)

    vars(module)["nixlBind"] = _Wrapped(real, nixlAgent=agent)


def recheck_soon(module: ModuleType) -> None:
    """Look again for lost wake-ups after 20 ms: under load they get lost, and vLLM looks again only after 5 s."""
    vars(module)["SHM_READER_RECHECK_INTERVAL_MS"] = RECHECK_MS


def fork_processes(module: ModuleType) -> None:
    """Fork the engine's processes instead of spawning them, if asked to: vLLM is imported once, pages shared."""
    if os.environ.get("SHIM_FORK") != "1":
        return
    import multiprocessing

    vars(module)["get_mp_context"] = lambda: multiprocessing.get_context("fork")


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker": keep_affinity,
    "nixl_cu12._api": slow_progress_thread,
    "nixl_cu13._api": slow_progress_thread,
    "vllm.distributed.device_communicators.shm_broadcast": recheck_soon,
    "vllm.utils.system_utils": fork_processes,
}


class _Loader(importlib.abc.Loader):
    """Loads as the real loader does, then runs the hook."""

    def __init__(self, real: Any, hook: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._hook = hook

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._real.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._hook(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = HOOKS.get(fullname)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, hook)
        return spec


if os.environ.get("SHIM_OFF") != "1":
    sys.meta_path.insert(0, _Finder())
