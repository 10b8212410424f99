"""Whether the links between the ranks of a group carry what the levels of the network promise.

The launcher of a group's leader has measured every pair of ranks before the engine started. It is asked until that is
noted on the group's StatefulSet, so that it outlasts operators. Always true: a link is judged by the level that the
labels of its nodes share, never by "the same node must be fast"; a note is about one start of one leader.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core.links import Measured as LevelMedian
from twinpool.core.links import combined
from twinpool.core.protocol import launcher_settings
from twinpool.core.topology import Path, Topology, paths, shared
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Annotate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.core.topology import Level
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed, PodView

#: Share of what its level promises below which a link is flagged.
SLOW_SHARE = 0.5
#: Flagged links that one note holds, the slowest for their level first.
MOST = 8
#: Longest problem that a note holds; the launcher's ``/preflight`` has all of it.
MAX_PROBLEM = 300


@dataclass(frozen=True, slots=True)
class Measured:
    """One pair of ranks, by their pods. ``latency`` in seconds, ``bandwidth`` in bytes/s."""

    first: str
    second: str
    latency: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a leader's launcher says of its group's preflight."""

    outcome: str
    problem: str = ""
    links: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """A measured link beside the promise of its level. Bytes/s; without a view of the nodes nothing is promised."""

    nodes: tuple[str, str]
    measured: int
    level: str = ""
    promised: int = 0

    @property
    def share(self) -> float:
        """Return how much of the promise is kept."""
        return self.measured / self.promised if self.promised else 1.0

    @property
    def words(self) -> str:
        """Return both numbers and the pair of nodes."""
        one, other = self.nodes
        where = f"between the GPUs of node {one}" if one == other else f"between nodes {one} and {other}"
        promised = f" of the {_rate(self.promised)} that level {self.level} promises" if self.promised else ""
        return f"{_rate(self.measured)}{promised} {where}"


@dataclass(frozen=True, slots=True)
class Note:
    """What stands on a StatefulSet. ``at`` is in seconds since 1970, ``worst`` the link that keeps least."""

    leader: str
    at: float
    outcome: str
    problem: str = ""
    worst: Link | None = None
    slow: tuple[Link, ...] = ()
    #: Nodes of the group, between all of which links were measured, and whether links inside one were, too.
    nodes: tuple[str, ...] = ()
    inside: bool = False
    #: Medians of the links by level.
    levels: tuple[LevelMedian, ...] = ()

    def to_json(self) -> str:
        """Return the value of the annotation."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Note | None:
        """Read what :meth:`to_json` wrote; None for anything else."""
        try:
            value = json.loads(text)
            worst = value["worst"]
            return cls(
                leader=str(value["leader"]),
                at=float(value["at"]),
                outcome=str(value["outcome"]),
                problem=str(value["problem"]),
                worst=None if worst is None else _link(worst),
                slow=tuple(_link(entry) for entry in value["slow"]),
                nodes=tuple(map(str, value["nodes"])),
                inside=bool(value["inside"]),
                levels=tuple(_level(entry) for entry in value.get("levels", ())),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def _level(value: Mapping[str, Any]) -> LevelMedian:
    return LevelMedian(str(value["level"]), int(value["pairs"]), float(value["bandwidth"]), float(value["latency"]))


def _link(value: Mapping[str, Any]) -> Link:
    one, other = value["nodes"]
    return Link((str(one), str(other)), int(value["measured"]), str(value["level"]), int(value["promised"]))


def _rate(size: float) -> str:
    """Return bytes/s as people write them."""
    for unit, scale in (("GB/s", 1e9), ("MB/s", 1e6)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB/s"


def read_preflight(document: Any) -> Preflight | None:
    """Return the answer of a launcher's ``/preflight``, or None when it is no such answer."""
    try:
        links = tuple(
            Measured(_pod(entry["first"]), _pod(entry["second"]), float(entry["latency"]), float(entry["bandwidth"]))
            for entry in document["links"]
        )
        return Preflight(str(document["outcome"]), str(document["problem"])[:MAX_PROBLEM], links)
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _pod(name: str) -> str:
    """Return the pod of ``pod (rank 3)``."""
    return name.partition(" ")[0]


def measures(group: Group) -> bool:
    """Return whether a group has links that its launcher measures."""
    config = launcher_settings(group.child.content.get("spec", {}).get("template", {}))
    return bool(config and config.preflight and config.engine == "vllm" and config.tensor * config.pipeline > 1)


def noted(group: Group) -> Note | None:
    """Return what was noted about the group's present leader."""
    found, leader = Note.from_json(group.child.annotation(names.INTERCONNECT_ANNOTATION) or ""), group.leader
    return found if found and leader and found.leader == _start(leader) else None


def _start(leader: PodView) -> str:
    """Return what one start of a leader's containers is known by."""
    return f"{leader.uid}/{sum(container.restarts for container in leader.containers)}"


def to_ask(groups: Iterable[Group]) -> list[PodView]:
    """Return the leaders whose launchers are asked: their groups measure links, and nothing is noted yet."""
    return [
        pod
        for group in groups
        if not group.retired and (pod := group.leader) is not None and _runs(pod) and measures(group)
        if noted(group) is None
    ]


def _runs(pod: PodView) -> bool:
    return pod.phase == "Running" and bool(pod.address) and pod.deadline is None


def to_read(observed: Observed, groups: Iterable[Group]) -> set[str]:
    """Return the nodes whose labels are needed to judge what was measured."""
    heard = {pod.uid for pod in to_ask(groups) if pod.uid in observed.preflights}
    return {
        pod.node
        for group in groups
        if group.leader is not None and group.leader.uid in heard
        for pod in group.pods
        if pod.node
    }


def noting(
    observed: Observed, groups: Iterable[Group], topology: Topology, now: float, *, sees_nodes: bool
) -> list[Annotate]:
    """Return the notes to write, each as soon as the labels of all the group's nodes are known or cannot be."""
    result = []
    by_leader = {group.leader.uid: group for group in groups if group.leader is not None}
    for leader in to_ask(groups):
        found, group = observed.preflights.get(leader.uid), by_leader[leader.uid]
        where = {pod.name: pod.node for pod in group.pods if pod.node}
        if found is None or (sees_nodes and not set(where.values()) <= observed.node_labels.keys()):
            continue
        domains = (
            paths(topology, {node: observed.node_labels[node] for node in where.values()})[0] if sees_nodes else {}
        )
        pairs = [(each, link) for each in found.links if (link := judged(each, where, domains, topology)) is not None]
        links = [link for _, link in pairs]
        worst = min(links, key=lambda link: (link.share, link.measured), default=None)
        slow = tuple(sorted((link for link in links if link.share < SLOW_SHARE), key=lambda link: link.share)[:MOST])
        nodes, inside = tuple(sorted(set(where.values()))), any(link.nodes[0] == link.nodes[1] for link in links)
        levels = _medians(pairs) if found.outcome == "passed" else ()
        value = Note(_start(leader), now, found.outcome, found.problem, worst, slow, nodes, inside, levels).to_json()
        result.append(Annotate("StatefulSet", group.name, group.child.uid, names.INTERCONNECT_ANNOTATION, value))
    return result


def _medians(pairs: Iterable[tuple[Measured, Link]]) -> tuple[LevelMedian, ...]:
    known = [LevelMedian(link.level, 1, each.bandwidth, each.latency) for each, link in pairs if link.level]
    return tuple(combined(known).values())


def judged(each: Measured, where: Mapping[str, str], domains: Mapping[str, Path], topology: Topology) -> Link | None:
    """Return a measured link beside what its level promises for a message of any size; None for strangers' pods."""
    if each.first not in where or each.second not in where:
        return None
    one, other = sorted((where[each.first], where[each.second]))
    if one not in domains or other not in domains:
        return Link((one, other), int(each.bandwidth))
    level = between(topology, domains[one], domains[other])
    return Link((one, other), int(each.bandwidth), level.name, int(level.bandwidth))


def between(topology: Topology, one: Path, other: Path) -> Level:
    """Return the narrowest level whose domain two nodes share."""
    return topology.levels[shared(one, other)]
