"""Labels of single nodes, read when what was measured between them is to be judged, and never kept."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from twinpool.operator.shell.cluster import ApiRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.operator.shell.cluster import Cluster

_log = logging.getLogger(__name__)


class NodeReader:
    """Reads nodes one by one: a group has few, a cluster many, and a right to list them is all that we have."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def labels(self, names: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        """Return the labels of those of these nodes that can be read; the others are asked for again another time."""
        found: dict[str, Mapping[str, str]] = {}
        for name in sorted(names):
            try:
                async for page in self._cluster.pages("Node", {"fieldSelector": f"metadata.name={name}"}):
                    found |= {body["metadata"]["name"]: body["metadata"].get("labels") or {} for body in page}
            except ApiRefused as error:
                _log.warning("node %s cannot be read to judge its links: %s", name, error)
        return found
