"""The version of this package, installed or inside the zipapp (which carries the same metadata)."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """Return the version, or ``unknown`` when the sources are run without being installed."""
    try:
        return importlib.metadata.version("twinpool")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
