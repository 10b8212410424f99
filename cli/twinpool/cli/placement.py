"""``twinpool plan`` and ``twinpool explain --placement``: where groups go, before and after, and what that costs.

Both ask the operator's own decision, with nodes of a file or of a cluster. What they foresee is right as long as nobody
else takes a node in between.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - cyclopts reads annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from cyclopts import Parameter

from twinpool.cli.kubectl import Kubectl
from twinpool.cli.layout import as_json, write_layout
from twinpool.cli.options import Context, Format, Namespace  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.pools import RESOURCE, from_file, observe, with_manifest
from twinpool.cli.seconds import cost_lines, costs_json
from twinpool.cli.sizing import Asked, served, sizing
from twinpool.cli.table import write_value
from twinpool.core import protocol
from twinpool.core.errors import TwinpoolError
from twinpool.core.links import LINKS_HELP, LevelLink, Measured, level_links, with_links, with_measured
from twinpool.core.placement import Placement
from twinpool.core.topology import AUTO, Weights
from twinpool.core.topology import parse as parse_topology
from twinpool.operator.logic.actions import Apply
from twinpool.operator.logic.groups import Group, groups
from twinpool.operator.logic.observed import Observed, PodView, read_child
from twinpool.operator.logic.placement import reading
from twinpool.operator.logic.placement.ledger import Claim, decide, whole, with_holders
from twinpool.operator.logic.placement.model import Assignment, Constraints, Gang, Node, Shortfall
from twinpool.operator.logic.placement.place import place
from twinpool.operator.logic.placement.score import Score, score
from twinpool.operator.logic.placement.seconds import costs
from twinpool.operator.logic.placement.tree import Tree, tree
from twinpool.operator.logic.plan import plan as operator_plan
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.core.spec import InferencePool
    from twinpool.core.topology import Topology
    from twinpool.operator.logic.placement.model import SlowLinks
    from twinpool.operator.logic.placement.reading import Held

Links = Annotated[str, Parameter(help=f"As the operator's --links: {LINKS_HELP}.")]
TopologyName = Annotated[str, Parameter(help="Preset, or LEVEL=LABEL,..., as the operator's --topology.")]


@dataclass(frozen=True, slots=True)
class Seen:
    """The nodes of a cluster, what pods hold on them, and the links between them that were measured too slow."""

    nodes: list[Node]
    pods: list[Held]
    slow: SlowLinks = frozenset()
    #: What preflights measured of the network's levels.
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where groups lie, or why not, and what that is worth."""

    claims: Sequence[Claim]
    places: Mapping[str, tuple[str, ...]]
    short: Mapping[str, Shortfall]
    score: Score
    domains: Tree
    gangs: Sequence[Gang]
    wants: Constraints
    slow: SlowLinks = frozenset()
    links: Sequence[LevelLink] = ()


def plan(
    *,
    file: Annotated[Path, Parameter(name=["--file", "-f"], help="Manifest of the pool.")],
    nodes: Annotated[
        Path | None,
        Parameter(help="Nodes (and pods) from `kubectl get nodes,pods -A -o yaml`, instead of a cluster's."),
    ] = None,
    namespace: Namespace = "",
    kube_context: Context = "",
    topology: TopologyName = AUTO,
    links: Links = "",
    model_config: Annotated[
        Path | None,
        Parameter(help="config.json of the model: tells seconds, whether it fits, which split serves most."),
    ] = None,
    gpu: Annotated[
        str, Parameter(help="Kind of GPU for --model-config: a100, h100, h200, b200, gb200, l4, l40s, mi300x or cpu.")
    ] = "h100",
    tokens: Annotated[int | None, Parameter(help="Tokens of a request; default: model.maxModelLen.")] = None,
    answer: Annotated[int, Parameter(help="Tokens of a request that are written.")] = 256,
    concurrency: Annotated[int, Parameter(help="Requests at once on one replica.")] = 32,
    redundant_experts: Annotated[
        int | None, Parameter(help="Copies of experts in each layer; default: expertBalancing.redundantExperts.")
    ] = None,
    output: Format = "text",
) -> int:
    """Show which rank of which group of a pool would go to which node, what that costs, and what is short.

    Exit code 1: a group has no place, or the model does not fit.
    """
    kubectl = Kubectl(namespace, kube_context)
    observed = Observed(from_file(file)) if nodes else with_manifest(kubectl, file)
    seen = _from_file(nodes) if nodes else from_cluster(kubectl)
    chosen = observed.pool.spec.placement is not None
    layout = foreseen(observed, seen, with_links(parse_topology(topology), links))
    if redundant_experts is None:
        balanced = [role.expert_balancing for role in (observed.pool.spec.prefill, observed.pool.spec.decode) if role]
        redundant_experts = max((each.redundant_experts for each in balanced if each), default=0)
    asked = Asked(gpu, tokens, answer, concurrency, redundant_experts)
    what = served(observed.pool, model_config, asked) if model_config else None
    sized = sizing(observed.pool, what) if what else None
    cost = costs(layout.gangs, layout.places, layout.domains, layout.wants, what) if what else None
    if output != "text":
        more = {"sizing": sized.to_json(), "seconds": costs_json(cost)} if sized and cost else {}
        write_value({**as_json(observed, layout), **more}, output)
    else:
        if not chosen:
            sys.stdout.write("the pool leaves its nodes to kube-scheduler; with `placement: {}` they would be:\n")
        write_layout(layout)
        if what and cost and sized:
            sys.stdout.writelines(f"{line}\n" for line in (*cost_lines(cost, what), *sized.lines()))
        else:
            sys.stdout.write("what that is in seconds: give --model-config (config.json of the model)\n")
    return 1 if layout.short or (sized and not sized.fits) else 0


def explain_placement(kubectl: Kubectl, pool: str, topology: str, links: str, output: str) -> int:
    """Tell where the groups of a running pool are, why pending ones wait, and how good that is beside the best layout.

    The best layout is what would be chosen if the pool were placed anew among all others; nothing is moved.
    """
    observed = observe(kubectl, pool)[0]
    seen = from_cluster(kubectl)
    now, best = compared(observed, seen, with_links(parse_topology(topology), links))
    if output != "text":
        write_value({**as_json(observed, now), "best": best.score.total}, output)
    else:
        write_layout(now)
        saved = now.score.total - best.score.total
        words = f"placed anew it could be {best.score.total:.2f}" if saved > 1e-6 else "no better layout was found"
        sys.stdout.write(f"now {now.score.total:.2f}; {words}\n")
    return 0


def foreseen(observed: Observed, seen: Seen, topology: Topology) -> Layout:
    """Return where the groups lie that a pool has and is about to get, as the operator would decide it now."""
    pool = observed.pool
    if pool.spec.placement is None:
        pool = pool.model_copy(update={"spec": pool.spec.model_copy(update={"placement": Placement()})})
        observed = replace(observed, pool=pool)
    said, topology = topology, with_measured(topology, seen.measured)
    existing = [Claim(pool, group) for group in groups(observed) if not group.retired]
    claims = [*existing, *_coming(observed, {claim.group.name for claim in existing}, topology)]
    ledger = decide(claims, {}, seen.nodes, seen.pods, topology, seen.slow)
    places = {name: found.nodes for name, found in ledger.verdicts.items() if found.nodes}
    places |= {claim.name: where for claim in existing if (where := located(claim))}
    short = {name: found.short for name, found in ledger.verdicts.items() if found.short}
    return replace(_layout(pool, claims, Assignment(places, short), seen, topology), links=_links(said, seen))


def compared(observed: Observed, seen: Seen, topology: Topology) -> tuple[Layout, Layout]:
    """Return where a pool's groups lie, and where they would lie if they were placed anew."""
    said, topology = topology, with_measured(topology, seen.measured)
    claims = [Claim(observed.pool, group) for group in groups(observed) if not group.retired]
    there = {claim.name: where for claim in claims if (where := located(claim))}
    own = {pod.uid for claim in claims for pod in claim.pods}
    others = Seen(seen.nodes, [pod for pod in seen.pods if pod.uid not in own], seen.slow)
    gangs = [whole(claim) for claim in claims]
    wants = {gang.pool: reading.constraints(observed.pool) for gang in gangs}
    pending = place(gangs, _held(others), there, topology, wants, slow=seen.slow).short
    now = Assignment(there, pending)
    anew = place([gang for gang in gangs if gang.name in there], _held(others), {}, topology, wants, slow=seen.slow)
    pool = observed.pool
    layouts = (_layout(pool, claims, where, others, topology) for where in (now, anew))
    first, second = (replace(layout, links=_links(said, seen)) for layout in layouts)
    return first, second


def _links(said: Topology, seen: Seen) -> list[LevelLink]:
    return [link for link in level_links(said, seen.measured) if seen.measured]


def _coming(observed: Observed, known: set[str], topology: Topology) -> list[Claim]:
    """Return the groups that the operator would make now, with the pods that they would have."""
    found = []
    for action in operator_plan(observed, Settings(topology=topology, sees_nodes=True), 0.0).actions:
        if isinstance(action, Apply) and action.kind == "StatefulSet" and action.name not in known:
            child = replace(read_child("StatefulSet", action.body), created=float("inf"))
            (made,) = groups(Observed(observed.pool, (child,)))
            found.append(Claim(observed.pool, replace(made, pods=_gated(made))))
    return found


def _gated(group: Group) -> tuple[PodView, ...]:
    gates = (protocol.PLACEMENT_GATE,)
    names = [f"{group.name}-{rank}" for rank in range(group.size)]
    return tuple(
        PodView(name, group.role, group.name, uid=name, rank=rank, scheduling_gates=gates)
        for rank, name in enumerate(names)
    )


def located(claim: Claim) -> tuple[str, ...]:
    """Return the nodes of a group by rank, empty as long as any is missing."""
    fixed = claim.fixed
    return tuple(fixed[rank] for rank in sorted(fixed)) if len(fixed) == claim.group.size else ()


def _layout(pool: InferencePool, claims: Sequence[Claim], found: Assignment, seen: Seen, topology: Topology) -> Layout:
    domains = tree(topology, _held(seen))
    places = {name: nodes for name, nodes in found.places.items() if all(node in domains.number for node in nodes)}
    gangs = [whole(claim) for claim in claims]
    wants = reading.constraints(pool)
    total = score(gangs, places, domains, {gang.pool: wants for gang in gangs}, Weights(), seen.slow)
    return Layout(claims, places, found.short, total, domains, gangs, wants, seen.slow)


def _held(seen: Seen) -> list[Node]:
    return with_holders(seen.nodes, seen.pods, frozenset())


def from_cluster(kubectl: Kubectl) -> Seen:
    """Return what there is now."""
    nodes, pods, pools = (kubectl.get(kinds, "--all-namespaces")["items"] for kinds in ("nodes", "pods", RESOURCE))
    return _seen([*nodes, *pods, *pools])


def _from_file(path: Path) -> Seen:
    try:
        documents = [item for item in yaml.safe_load_all(path.read_text()) if isinstance(item, dict)]
    except (OSError, yaml.YAMLError) as error:
        raise TwinpoolError(f"{path} cannot be read: {error}", "give what `kubectl get nodes -o yaml` prints") from None
    items = [item for document in documents for item in document.get("items") or [document]]
    seen = _seen(items)
    if not seen.nodes:
        raise TwinpoolError(f"{path} holds no nodes", "give what `kubectl get nodes -o yaml` prints")
    return seen


def _seen(items: Sequence[dict[str, Any]]) -> Seen:
    pods = [reading.held(item) for item in items if item.get("kind") == "Pod"]
    nodes = [reading.node(item) for item in items if item.get("kind") == "Node"]
    links = [link for item in items if item.get("kind") == protocol.KIND for link in _slow(item)]
    measured = [link for item in items if item.get("kind") == protocol.KIND for link in _measured(item)]
    return Seen(nodes, [pod for pod in pods if pod], frozenset(links), tuple(measured))


def _measured(pool: dict[str, Any]) -> list[Measured]:
    links = (pool.get("status") or {}).get("links") or ()
    return [Measured(link["level"], link["pairs"], float(link["bandwidth"]), link["latency"]) for link in links]


def _slow(pool: dict[str, Any]) -> list[frozenset[str]]:
    return [frozenset(link["nodes"]) for link in (pool.get("status") or {}).get("slowLinks") or ()]
