"""What can go wrong with the local engine, for people to read."""

from __future__ import annotations

from twinpool.core.errors import TwinpoolError


class EngineError(TwinpoolError):
    """The engine cannot be installed or used, or a model cannot be made."""
