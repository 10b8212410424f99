"""What must hold of a pool that was placed, beside what was foretold and what the exact solver says.

Pure functions of Kubernetes objects: nodes, all pods, the pool's StatefulSets and the answer of ``twinpool plan``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bench.placement.cases import Case
from bench.placement.check import violations
from bench.placement.exact import Program
from twinpool.core import protocol
from twinpool.core.spec import InferencePool
from twinpool.core.topology import AUTO, Weights, preset
from twinpool.operator.logic.placement import reading
from twinpool.operator.logic.placement.affinity import pinned
from twinpool.operator.logic.placement.ledger import with_holders
from twinpool.operator.logic.placement.model import Assignment, Gang, Shortfall

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Body = dict[str, Any]
#: The nodes of each placed group of each role, by rank.
Places = dict[str, list[list[str]]]


@dataclass(frozen=True)
class Scene:
    """The objects of a cluster at one moment."""

    nodes: Sequence[Body]
    pods: Sequence[Body]
    #: StatefulSets of the pool in question.
    sets: Sequence[Body]
    pool: Body

    @property
    def groups(self) -> dict[str, list[Body]]:
        """Return the pods of each group of the pool that are to stay, by rank."""
        found: dict[str, list[Body]] = {item["metadata"]["name"]: [] for item in self.sets}
        for pod in self.pods:
            group = pod["metadata"].get("labels", {}).get(protocol.LABEL_GROUP)
            same = pod["metadata"]["namespace"] == self.pool["metadata"]["namespace"]
            if same and group in found and not pod["metadata"].get("deletionTimestamp"):
                found[group].append(pod)
        return {name: sorted(pods, key=_rank) for name, pods in found.items()}

    @property
    def whole(self) -> dict[str, list[str]]:
        """Return the nodes of each group whose pods are all bound."""
        sizes = {item["metadata"]["name"]: item["spec"]["replicas"] for item in self.sets}
        return {
            name: [pod["spec"]["nodeName"] for pod in pods]
            for name, pods in self.groups.items()
            if len(pods) == sizes[name] and all(pod["spec"].get("nodeName") for pod in pods)
        }

    def role(self, group: str) -> str:
        """Return the role of a group."""
        labels = next(item["metadata"]["labels"] for item in self.sets if item["metadata"]["name"] == group)
        return str(labels[protocol.LABEL_ROLE])

    @property
    def short(self) -> Body | None:
        """Return what the pool says is short."""
        conditions = self.pool.get("status", {}).get("conditions", ())
        said = next((item for item in conditions if item["type"] == "Placed"), None)
        return said if said and said["status"] == "False" else None

    @property
    def places(self) -> Places:
        """Return where the whole groups are."""
        found: Places = defaultdict(list)
        for name, nodes in self.whole.items():
            found[self.role(name)].append(nodes)
        return {role: sorted(places) for role, places in found.items()}

    @property
    def stated(self) -> int:
        """Return how many groups the pool says have no place."""
        words = self.short["message"] if self.short else ""
        if " more groups wait)" in words:
            return 1 + int(words.rpartition(" (")[2].partition(" ")[0])
        return 1 if words else 0

    @property
    def shown(self) -> bool:
        """Return whether a pod was handed over without a node."""
        return any(shown(pod) for pods in self.groups.values() for pod in pods)

    @property
    def rests(self) -> bool:
        """Return whether every group is whole, or has no pod on a node and is said to be short."""
        torn = [
            name
            for name, pods in self.groups.items()
            if name not in self.whole and (not pods or any(pod["spec"].get("nodeName") for pod in pods))
        ]
        sent = any(
            pinned(pod["spec"]) and not pod["spec"].get("nodeName") for pods in self.groups.values() for pod in pods
        )
        lacking = len(self.groups) - len(self.whole)
        return bool(self.groups) and not torn and not sent and (not lacking or self.short is not None)


def shown(pod: Body) -> bool:
    """Return whether a pod was handed over without a node, for autoscalers to see."""
    return not pod["spec"].get("schedulingGates") and not pinned(pod["spec"])


def _rank(pod: Body) -> int:
    return int(pod["metadata"]["name"].rpartition("-")[2])


def foretold(said: Body) -> Places:
    """Return where ``twinpool plan -o json`` said that groups would go."""
    found: Places = defaultdict(list)
    for group in said["groups"]:
        if group["ranks"]:
            found[group["role"]].append([entry["node"] for entry in group["ranks"]])
    return {role: sorted(places) for role, places in found.items()}


def shortages(said: Body) -> list[Body]:
    """Return what ``twinpool plan -o json`` said is short."""
    return [group["short"] for group in said["groups"] if "short" in group]


def differences(said: Body, scene: Scene) -> list[str]:
    """Return in what the cluster is not as it was foretold."""
    found = []
    if foretold(said) != scene.places:
        found.append(f"foretold {foretold(said)}, applied {scene.places}")
    for name, nodes in scene.whole.items():
        sent = [pinned(pod["spec"]) for pod in scene.groups[name]]
        if sent != nodes:
            found.append(f"{name} was sent to {sent} and is on {nodes}")
    short, lacking = shortages(said), len(scene.groups) - len(scene.whole)
    if len(short) != lacking:
        found.append(f"{len(short)} groups should be short, {lacking} are")
    # A pod that no node could ever hold is kube-scheduler's to refuse, in its own words.
    elif not scene.shown and len(short) != scene.stated:
        found.append(f"{len(short)} groups are short, {scene.stated} are said to be: {scene.short}")
    elif short and scene.short and not scene.shown and short[0]["reason"] != scene.short["reason"]:
        found.append(f"foretold {short[0]}, stated {scene.short}")
    return found


def refused_wrongly(said: Body, before: Scene, gangs: Mapping[str, Gang]) -> list[str]:
    """Return the groups of which ``plan`` said that they are short and for which the exact solver finds room.

    ``before`` is the cluster that plan saw, ``gangs`` is what a group of each role asks for.
    """
    accepted: list[Gang] = []
    found = []
    for index, group in enumerate(said["groups"]):
        asked = replace(gangs[group["role"]], name=f"g{index}")
        if "short" not in group:
            accepted.append(asked)
        elif _fits(before, [*accepted, asked]):
            found.append(f"{group['name']} was refused although it fits: {group['short']['message']}")
    return found


def short_wrongly(scene: Scene) -> list[str]:
    """Return the groups that are short although the exact solver finds room for one beside all that is there."""
    waiting = [name for name in scene.groups if name not in scene.whole]
    return [f"{name} waits although it fits" for name in waiting if _fits(scene, [_asked(scene, name)])]


def broken(scene: Scene) -> list[str]:
    """Return what no placement may do and this one does: nodes over capacity, hard rules of the network broken."""
    gangs = tuple(_asked(scene, name) for name in scene.groups)
    ours = {pod["metadata"]["uid"] for name in scene.whole for pod in scene.groups[name]}
    lacking = {name: Shortfall(name, "NotEnoughFree", "", "") for name in scene.groups if name not in scene.whole}
    answer = Assignment({name: tuple(nodes) for name, nodes in scene.whole.items()}, lacking)
    return violations(_case(scene, gangs, ours), answer)


def asked_by_role(scene: Scene) -> dict[str, Gang]:
    """Return what a group of each role asks for."""
    return {scene.role(name): _asked(scene, name) for name in scene.groups}


def _asked(scene: Scene, name: str) -> Gang:
    body = next(item for item in scene.sets if item["metadata"]["name"] == name)
    return reading.gang(name, scene.pool["metadata"]["name"], scene.role(name), body["spec"]["template"])


def _fits(scene: Scene, gangs: Sequence[Gang]) -> bool:
    case = _case(scene, tuple(gangs), frozenset())
    return Program(case, gangs, Weights(), feasibility=True).solve() is not None


def _case(scene: Scene, gangs: tuple[Gang, ...], ours: frozenset[str] | set[str]) -> Case:
    held = [found for pod in scene.pods if (found := reading.held(pod)) is not None]
    nodes = with_holders([reading.node(node) for node in scene.nodes], held, ours)
    wants = reading.constraints(InferencePool.model_validate(scene.pool))
    return Case(gangs, tuple(nodes), {scene.pool["metadata"]["name"]: wants}, topology=preset(AUTO))
