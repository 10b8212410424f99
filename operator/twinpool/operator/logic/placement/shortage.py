"""Why a group has no place, in words: what is short, where it is closest to being enough, and what would help."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from twinpool.operator.logic.placement.eligible import selected, untolerated, usable
from twinpool.operator.logic.placement.model import Shortfall

if TYPE_CHECKING:
    from twinpool.operator.logic.placement.board import Board
    from twinpool.operator.logic.placement.model import Amounts, Gang, Node, Taint

#: How levels are called in sentences.
_WORDS = {"cluster": "cluster", "nvlink": "NVLink domain", "host": "node"}


def shortfall(board: Board, gang: Gang) -> Shortfall:
    """Return why a group that fits nowhere has no place."""
    nodes = board.tree.nodes
    chosen = [node for node in nodes if selected(node, gang)]
    if not chosen:
        return _no_such_node(board, gang)
    able = [node for node in chosen if _holds(node.allocatable, gang)]
    if not able:
        return _too_small(chosen, gang)
    open_nodes = [node for node in able if usable(node) and untolerated(node, gang) is None]
    if len(open_nodes) == 0:
        return _closed(able, gang)
    return _not_enough(board, gang, open_nodes)


def _holds(amounts: Amounts, gang: Gang) -> bool:
    return all(amounts.get(resource, 0) >= amount for resource, amount in gang.amounts.items())


def _no_such_node(board: Board, gang: Gang) -> Shortfall:
    wanted = ", ".join(f"{key}={value}" for key, value in sorted(gang.selector.items())) or "its node affinity"
    text = f"none of {len(board.tree.nodes)} nodes matches {wanted}"
    return Shortfall(
        gang.name, "NoSuchNode", text, "label nodes so, add such nodes, or change the selector", in_vain=True
    )


def _too_small(chosen: list[Node], gang: Gang) -> Shortfall:
    """No node is large enough, even when it is empty."""
    lacking = [
        (resource, amount, max(node.allocatable.get(resource, 0) for node in chosen))
        for resource, amount in sorted(gang.amounts.items())
    ]
    short = [entry for entry in lacking if entry[1] > entry[2]] or lacking
    resource, amount, most = short[0]
    text = (
        f"no node has {_amount(resource, amount)} for one pod; the largest of {len(chosen)} that match has "
        f"{_amount(resource, most)}"
    )
    return Shortfall(gang.name, "NoSuchNode", text, "add larger nodes, or ask for less per pod", in_vain=True)


def _closed(able: list[Node], gang: Gang) -> Shortfall:
    reasons: Counter[str] = Counter()
    for node in able:
        reasons[_closure(node, untolerated(node, gang))] += 1
    text = ", ".join(f"{count} {what}" for what, count in reasons.most_common())
    return Shortfall(
        gang.name,
        "NodesUnusable",
        f"no node that is large enough takes new pods: {text}",
        "mend or uncordon nodes, or let the role tolerate the taint (scheduling.tolerations)",
    )


def _closure(node: Node, taint: Taint | None) -> str:
    if node.ready and taint and not node.cordoned:
        return f"tainted {taint.key}{'=' if taint.value else ''}{taint.value}:{taint.effect}"
    return "cordoned" if node.ready else "not ready"


def _not_enough(board: Board, gang: Gang, nodes: list[Node]) -> Shortfall:
    tree, shape = board.tree, board.shape(gang)
    resource = gang.accelerator or "cpu"
    level, size, whose = _binding(board, gang)
    domains = tree.cover(level)
    domain = max(domains, key=lambda domain: (shape.slots[domain], -domain))
    members = [tree.nodes[node] for node in tree.members(domain)]
    free = (
        sum(max(0, board.free[resource][tree.number[node.name]]) for node in members) if resource in board.free else 0
    )
    have = sum(node.allocatable.get(resource, 0) for node in members)
    outer = tree.parent[domain]
    where = f"{_name(board, outer)}: " if outer > 0 else ""
    best = "the cluster" if level == 0 else f"the best {_word(board, tree.level[domain])}, {tree.name[domain]},"
    text = (
        f"{where}{best} has room for {shape.slots[domain]} of {size} pods of {_each(gang)}{whose}; "
        f"{_number(resource, free)} of {_amount(resource, have)} free"
    )
    if held := _held(board, members, resource):
        text += f"; {held}"
    empty = sum(_pods(node, gang) for node in nodes)
    if empty < gang.pods:
        text = f"{len(nodes)} usable nodes hold {empty} of {gang.pods} pods of {_each(gang)}, even empty"
        return Shortfall(gang.name, "NotEnoughFree", text, "add nodes", in_vain=True)
    vain = not any(
        sum(_pods(tree.nodes[node], gang) for node in tree.members(at) if shape.eligible[node]) >= size
        for at in domains
    )
    if level and (vain or shape.slots[0] >= gang.pods):
        remedy = f"free or add nodes in one {_word(board, level)}, or loosen the pool's placement"
        return Shortfall(gang.name, "TopologyUnmet", text, remedy, in_vain=vain)
    total = sum(board.free[resource][tree.number[node.name]] for node in nodes) if resource in board.free else 0
    if gang.gpus and total >= gang.pods * gang.gpus:
        text = f"{_amount(resource, total)} are free, but in pieces: {text}"
        return Shortfall(gang.name, "Fragmented", text, "move small pods together, or add a node")
    return Shortfall(gang.name, "NotEnoughFree", text, "add nodes, or scale something down")


def _binding(board: Board, gang: Gang) -> tuple[int, int, str]:
    """Return the level that must hold something whole, how many pods that is, and what it is."""
    wants, topology = board.pools[gang.pool].wants, board.tree.topology
    found = [(0, gang.pods, "")]
    if wants.expert_required and gang.pods > 1:
        found.append((topology.index(wants.expert), gang.pods, " that must lie together"))
    if wants.tensor_required and gang.unit > 1:
        found.append((topology.index(wants.tensor), gang.unit, " that share every layer"))
    if gang.pods == 1:
        found.append((topology.host, 1, ""))
    return max(found)


def _held(board: Board, members: list[Node], resource: str) -> str:
    """Return who else holds most of a resource on these nodes."""
    held = [(holder.amounts.get(resource, 0), holder.pod) for node in members for holder in node.holders]
    names = {node.name for node in members}
    for name, at in board.places.items():
        gang = board.gangs[name]
        count = sum(board.tree.nodes[node].name in names for node in at)
        held.append((count * gang.amounts.get(resource, 0), name))
    most = sorted(((-amount, who) for amount, who in held if amount))[:3]
    return ", ".join(f"{_amount(resource, -amount)} held by {who}" for amount, who in most)


def _pods(node: Node, gang: Gang) -> int:
    return min((node.allocatable.get(name, 0) // amount for name, amount in gang.amounts.items() if amount), default=1)


def _each(gang: Gang) -> str:
    if gang.gpus:
        return _amount(gang.accelerator, gang.gpus)
    return (
        ", ".join(_amount(name, amount) for name, amount in sorted(gang.amounts.items()) if name != "pods")
        or "any size"
    )


def _amount(resource: str, amount: int) -> str:
    """Return an amount as people write it."""
    return f"{_number(resource, amount)}{_unit(resource, amount)}"


def _number(resource: str, amount: int) -> str:
    if resource == "cpu":
        return f"{amount / 1000:g}"
    return f"{amount / 2**30:.4g}Gi" if resource == "memory" else str(amount)


def _unit(resource: str, amount: int) -> str:
    if resource.endswith("/gpu"):
        return " GPU" if amount == 1 else " GPUs"
    return {"cpu": " CPU", "memory": " of memory"}.get(resource, f" {resource}")


def _word(board: Board, level: int) -> str:
    name = board.tree.topology.levels[level].name
    return _WORDS.get(name, name)


def _name(board: Board, domain: int) -> str:
    tree = board.tree
    return f"{_word(board, tree.level[domain])} {tree.name[domain]}"
