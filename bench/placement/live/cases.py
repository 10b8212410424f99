"""Random clusters and pools as Kubernetes objects, made from a seed.

At most 12 nodes with topograph's labels, some of them missing or contradicting, some nodes cordoned, tainted or not
ready, some GPUs held by others; one or two pools, about a third of which ask for more than there is. In a share of the
cases pods of somebody else ask kube-scheduler for GPUs while the pools are placed.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from bench.placement.cases import GPU, LABELS
from twinpool.core import protocol

Body = dict[str, Any]

#: A taint that some pools tolerate, and a label that some ask for.
TAINT = {"key": "dedicated", "value": "llm", "effect": "NoSchedule"}
SELECTED = {"twinpool-test/disk": "fast"}
#: Share of the cases in which others compete.
COMPETING = 0.25


@dataclass(frozen=True)
class Drawn:
    """One case: nodes, pods that hold something on them, pools one after another, and pods that come meanwhile."""

    seed: int
    nodes: tuple[Body, ...]
    others: tuple[Body, ...]
    pools: tuple[Body, ...]
    rivals: tuple[Body, ...]


def drawn(seed: int) -> Drawn:
    """Return the case of a seed."""
    random = Random(seed)
    size = random.choice((2, 4, 8))
    nodes = _nodes(random, seed, size)
    held = [(item, random.choice((0, 0, 0, 1, size // 2, size))) for item in nodes]
    others = [
        foreign(f"other-{index}", count, item["metadata"]["name"]) for index, (item, count) in enumerate(held) if count
    ]
    pools = [_pool(random, f"p{index}", size) for index in range(random.choice((1, 1, 2)))]
    count = random.randint(2, 8) if random.random() < COMPETING else 0
    rivals = [foreign(f"rival-{index}", random.choice((1, size // 2, size))) for index in range(count)]
    return Drawn(seed, tuple(nodes), tuple(others), tuple(pools), tuple(rivals))


def _nodes(random: Random, seed: int, size: int) -> list[Body]:
    found: list[Body] = []
    for block in range(random.randint(1, 2)):
        for rack in range(random.randint(1, 3)):
            cliques = random.random() < 0.6
            for _ in range(random.randint(1, 4)):
                clique = f"c{block}{rack}{random.randint(0, 1)}" if cliques else None
                labels = _labels(random, f"b{block}", f"r{block}{rack}", clique)
                if len(found) < 12:
                    found.append(_node(random, f"c{seed}-n{len(found)}", labels, size))
    return found


def _labels(random: Random, block: str, rack: str, clique: str | None) -> dict[str, str]:
    """Return a node's labels; one in twelve is missing and one in twelve names another domain."""
    named = {LABELS["block"]: block, LABELS["rack"]: rack}
    if clique is not None:
        named[LABELS["nvlink"]] = clique
    for key in list(named):
        wrong = random.random()
        if wrong < 1 / 12:
            del named[key]
        elif wrong < 1 / 6:
            named[key] = f"{named[key][0]}00"
    if random.random() < 0.7:
        named |= SELECTED
    return named


def _node(random: Random, name: str, labels: dict[str, str], gpus: int) -> Body:
    state = random.choice(("ready",) * 12 + ("tainted", "disliked", "cordoned", "dead"))
    taints = {"tainted": [TAINT], "disliked": [{**TAINT, "effect": "PreferNoSchedule"}]}.get(state, [])
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "110", GPU: str(gpus)}
    ready = {"type": "Ready", "status": "False" if state == "dead" else "True", "reason": "Drawn", "message": ""}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": {"taints": taints, "unschedulable": state == "cordoned"},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
    }


def foreign(name: str, gpus: int, node: str | None = None) -> Body:
    """Return a pod of somebody else, on a node or for kube-scheduler to place."""
    container = {"name": "other", "image": "none", "resources": {"limits": {GPU: str(gpus)}}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            # One that holds GPUs stays also on a node that is not ready.
            "tolerations": [{"operator": "Exists"}] if node else [],
            **({"nodeName": node} if node else {}),
        },
    }


def _pool(random: Random, name: str, size: int) -> Body:
    prefill, decode = random.choice(((0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 2), (2, 1)))
    gpus = random.choice([count for count in (1, 2, 4, 8) if count <= size])
    pods = random.choice((1, 1, 2, 3, 4)) if gpus == size else 1
    unit = random.choice([count for count in (1, 2, 3, 4) if pods % count == 0])
    spec: Body = {
        "model": {"name": "tiny"},
        "engine": {"kind": "simulated"},
        "decode": _role(random, decode, gpus * unit, pods // unit, size),
        "routing": {"replicas": 0},
        "placement": {
            "tensor": {"required": random.random() < 0.7},
            "expert": {"within": random.choice(("rack", "block")), "required": random.random() < 0.2},
            "pair": {"within": random.choice(("block", "rack"))},
            "spread": {"across": random.choice(("rack", "host", "block"))},
        },
    }
    if prefill:
        spec["prefill"] = _role(random, prefill, random.choice((gpus, max(1, gpus // 2))), 1, size)
    return {
        "apiVersion": protocol.API_VERSION,
        "kind": protocol.KIND,
        "metadata": {"name": name},
        "spec": spec,
    }


def _role(random: Random, replicas: int, tensor: int, pipeline: int, size: int) -> Body:
    """Return a role whose pods ask for GPUs although the simulated engine needs none."""
    limits = {GPU: str(min(tensor * pipeline, size))}
    scheduling: Body = {}
    if random.random() < 0.3:
        scheduling["tolerations"] = [{"key": TAINT["key"], "operator": "Exists"}]
    if random.random() < 0.25:
        scheduling["nodeSelector"] = SELECTED
    return {
        "replicas": replicas,
        "parallelism": {"tensor": tensor, "pipeline": pipeline},
        "resources": {"gpu": {"perNode": size}},
        "drainTimeout": "1s",
        "scheduling": scheduling,
        "podTemplate": {"spec": {"containers": [{"name": "engine", "resources": {"limits": limits}}]}},
    }
