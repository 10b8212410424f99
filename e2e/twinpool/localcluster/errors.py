"""What can go wrong with the local cluster, for people to read."""

from __future__ import annotations

from twinpool.core.errors import TwinpoolError


class ClusterError(TwinpoolError):
    """The cluster cannot be started, found or changed."""


class ToolchainError(TwinpoolError):
    """The binaries of the cluster cannot be built or used."""
