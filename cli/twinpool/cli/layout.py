"""How a layout is shown: to people as a list, a tree and a sum; to machines as what both are made of."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from twinpool.cli.seconds import link_lines
from twinpool.core.topology import Weights
from twinpool.operator.logic.placement.compromise import Compromise, compromises
from twinpool.operator.logic.placement.compromise import Layout as AskedLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.cli.placement import Layout
    from twinpool.operator.logic.observed import Observed
    from twinpool.operator.logic.placement.ledger import Claim

#: What each term of the objective is about, in the order in which they are shown.
TERMS = {
    "handoff": "KV cache between prefill and decode",
    "pair": "KV cache that leaves the level of pair",
    "tensor": "tensor-parallel units over several nodes",
    "span": "groups over several nodes",
    "slow": "groups over links that were measured too slow",
    "spread": "groups of a role that would fail together",
    "stranded": "free GPUs that no large group can use",
}


def as_json(observed: Observed, layout: Layout) -> dict[str, Any]:
    """Return a layout for machines: nodes and their domains by rank, the objective term by term, what is short."""
    return {
        "pool": observed.pool.metadata.name,
        "groups": [_group_json(claim, layout) for claim in layout.claims],
        "objective": {**{term: getattr(layout.score, term) for term in TERMS}, "total": layout.score.total},
        "compromises": [asdict(item) for item in _compromises(layout)],
        "links": [asdict(link) for link in layout.links],
        "labels": [f"node {item.node} {item.problem}" for item in layout.domains.complaints],
    }


def _group_json(claim: Claim, layout: Layout) -> dict[str, Any]:
    found: dict[str, Any] = {"name": claim.group.name, "role": claim.group.role, "ranks": []}
    for rank, node in enumerate(layout.places.get(claim.name, ())):
        found["ranks"].append({"rank": rank, "node": node, "domains": _domains(node, layout)})
    if short := layout.short.get(claim.name):
        found["short"] = {"reason": short.reason, "message": short.message, "remedy": short.remedy}
    return found


def _domains(node: str, layout: Layout) -> dict[str, str]:
    levels = layout.domains.topology.levels
    chain = layout.domains.chain[layout.domains.number[node]][1:-1]
    return {levels[layout.domains.level[at]].name: layout.domains.name[at] for at in chain}


def write_layout(layout: Layout) -> None:
    """Write a layout for people: rank by rank, as a tree of domains, and what it costs."""
    for claim in layout.claims:
        nodes, short = layout.places.get(claim.name, ()), layout.short.get(claim.name)
        if short:
            sys.stdout.write(f"{claim.group.role} {claim.group.name}: no place: {short}\n")
        elif not nodes:
            sys.stdout.write(f"{claim.group.role} {claim.group.name}: not on nodes yet\n")
        for rank, node in enumerate(nodes):
            where = ", ".join(f"{level} {name}" for level, name in _domains(node, layout).items())
            inside = f"  ({where})" if where else ""
            sys.stdout.write(f"{claim.group.role} {claim.group.name} rank {rank}: {node}{inside}\n")
    sys.stdout.writelines(f"{line}\n" for line in _tree_lines(layout))
    sys.stdout.write("what it costs, in GPUs worth nothing (docs/placement.md):\n")
    for term, words in TERMS.items():
        sys.stdout.write(f"  {getattr(layout.score, term):8.2f}  {words}\n")
    for item in _compromises(layout):
        sys.stdout.write(f"  not kept: {item.words} (placement.{item.wish}), {item.cost:.2f} of it\n")
    sys.stdout.writelines(f"{line}\n" for line in link_lines(layout.links))
    for bad in layout.domains.complaints:
        sys.stdout.write(f"node {bad.node} {bad.problem}: not used at level {bad.level}\n")


def _compromises(layout: Layout) -> list[Compromise]:
    asked = AskedLayout(layout.gangs, layout.places, layout.domains, layout.wants, Weights(), layout.slow)
    return compromises(asked)


def _tree_lines(layout: Layout) -> Iterator[str]:
    """Yield the domains that hold something, from broad to narrow, with the ranks on each node."""
    domains, there = layout.domains, defaultdict[int, list[str]](list)
    for claim in layout.claims:
        for rank, node in enumerate(layout.places.get(claim.name, ())):
            there[domains.number[node]].append(f"{claim.group.name}/{rank}")
    used = {at for node in there for at in domains.chain[node]}

    def lines(domain: int, depth: int) -> Iterator[str]:
        for child in domains.children[domain]:
            if child in used:
                node = domains.node[child]
                ranks = f": {', '.join(there[node])}" if node >= 0 else ""
                level = domains.topology.levels[domains.level[child]].name
                yield f"{'  ' * depth}{level} {domains.name[child]}{ranks}"
                yield from lines(child, depth + 1)

    if used:
        yield "as a tree (GROUP/RANK):"
        yield from lines(0, 1)
