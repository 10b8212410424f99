"""Helm for the chart's tests: the one that the user names, else built once from its Go module into the cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.localcluster.build import GIB, FirstBuild, Target
from twinpool.localcluster.errors import ToolchainError
from twinpool.localcluster.paths import cache_dir, sources_dir
from twinpool.localcluster.toolchain import build_into, cache_key, is_complete

if TYPE_CHECKING:
    from twinpool.localcluster.progress import Progress

HELM_VERSION = "4.3.1"
FIRST_BUILD = FirstBuild(
    "helm.sh/helm/v4@*", 2 * GIB, "building helm from source, once: about 2 minutes on two cores, 2 GB of disk"
)


def ensure_helm(progress: Progress) -> Path:
    """Return a helm that runs: that of ``TWINPOOL_HELM``, else ours, after building it when the cache lacks it.

    Raises
    ------
    ToolchainError
        The named one is no program, or ours cannot be built; the message says what to do.
    """
    if named := os.environ.get("TWINPOOL_HELM"):
        if not os.access(named, os.X_OK):
            raise ToolchainError(f"TWINPOOL_HELM={named} is no program", "name helm 4 itself, or unset TWINPOOL_HELM")
        return Path(named).absolute()
    sources = sources_dir()
    flags = f"-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM_VERSION}"
    targets = (Target("helm", sources / "helm", "helm.sh/helm/v4/cmd/helm", flags),)
    folder = cache_dir() / "helm" / cache_key(targets, sources, ("helm",))
    if not is_complete(folder):
        build_into(folder, targets, FIRST_BUILD, progress)
    return folder / "helm"
