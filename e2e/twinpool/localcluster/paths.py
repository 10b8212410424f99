"""Where the local cluster keeps its files: all of them in one cache folder, outside the repository."""

from __future__ import annotations

import os
import re
from pathlib import Path

from twinpool.localcluster.errors import ClusterError

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")


def cache_dir() -> Path:
    """Return the cache folder: ``TWINPOOL_CACHE``, else ``twinpool`` in the user's cache folder."""
    if explicit := os.environ.get("TWINPOOL_CACHE"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "twinpool"


def state_dir(name: str) -> Path:
    """Return the folder of the cluster ``name``, which need not exist.

    Raises
    ------
    ClusterError
        The name cannot be the name of a folder and of nodes.
    """
    if not _NAME.fullmatch(name):
        raise ClusterError(
            f"cluster name {name!r} is not usable",
            "use at most 40 lower-case letters, digits and '-', with a letter or digit at both ends",
        )
    return cache_dir() / "state" / name


def sources_dir() -> Path:
    """Return the folder that holds the Go modules ``node`` and ``etcd``."""
    return Path(__file__).resolve().parents[2]
