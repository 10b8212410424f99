"""``twinpool defragment``: which groups of a running pool would lie better elsewhere, and what each move wins.

It proposes, and moves only when told to. A move is foretold as the operator would decide it when the group is opened
anew.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from twinpool.cli.kubectl import Kubectl
from twinpool.cli.layout import TERMS
from twinpool.cli.moving import Moved, Mover
from twinpool.cli.options import Context, Format, Namespace  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.placement import (
    Links,
    Seen,
    TopologyName,
    from_cluster,
    located,
)
from twinpool.cli.pools import observe
from twinpool.cli.table import write_value
from twinpool.core.errors import InvalidValue
from twinpool.core.links import with_links, with_measured
from twinpool.core.topology import AUTO, Topology
from twinpool.core.topology import parse as parse_topology
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.placement import reading
from twinpool.operator.logic.placement.defragment import LEAST, Move, Question
from twinpool.operator.logic.placement.defragment import defragment as proposed
from twinpool.operator.logic.placement.ledger import Claim, whole, with_holders

if TYPE_CHECKING:
    from twinpool.operator.logic.observed import Observed


def defragment(
    pool: Annotated[str, Parameter(help="Name of the pool.")],
    *,
    least: Annotated[
        float, Parameter(help="What a move must win at least for each GPU of its group, in GPUs worth nothing.")
    ] = LEAST,
    namespace: Namespace = "",
    kube_context: Context = "",
    topology: TopologyName = AUTO,
    links: Links = "",
    apply: Annotated[
        bool, Parameter(help="Make the moves, one after another, as far as they go as told.", negative="")
    ] = False,
    yes: Annotated[bool, Parameter(help="With --apply: do not ask.", negative="")] = False,
    output: Format = "text",
) -> int:
    """Propose moves of a running pool's groups that pay, one after another; nothing is moved without --apply.

    With it each group is taken out of service and its successor awaited where it was foretold before the next one goes.
    Exit code 1: a move was not made, or went otherwise than foretold; the rest is not tried then.

    Raises
    ------
    InvalidValue
        When nobody can be asked whether to move anything, and --yes is not given.
    """
    kubectl, network = Kubectl(namespace, kube_context), with_links(parse_topology(topology), links)

    def now(observed: Observed) -> list[Move]:
        return moves_of(observed, from_cluster(kubectl), network, least)

    moves = now(observe(kubectl, pool)[0])
    if output == "text":
        sys.stdout.writelines(f"{line}\n" for line in _lines(moves, applied=apply))
    moved: list[Moved] = []
    if apply and moves and _agreed(len(moves), yes=yes):
        told = sys.stdout if output == "text" else sys.stderr
        moved = Mover(kubectl, pool, lambda line: print(line, file=told, flush=True), now).carry_out(moves)
    stopped = next((f"{item.group}: {item.reason}" for item in moved if item.reason), "")
    if output != "text":
        more = {"moved": [asdict(item) for item in moved], "stopped": stopped} if apply else {}
        write_value({"pool": pool, "moves": list(map(_json, moves)), **more}, output)
    elif apply and moves:
        done = sum(not item.reason for item in moved)
        sys.stdout.write(f"{done} of {len(moves)} moves made{f'; stopped: {stopped}' if stopped else ''}\n")
    return 1 if apply and sum(not item.reason for item in moved) < len(moves) else 0


def _agreed(count: int, *, yes: bool) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise InvalidValue("--apply asks before it moves anything, and nobody can be asked here", "add --yes")
    groups_ = "group" if count == 1 else "groups"
    sys.stderr.write(f"move {count} {groups_}, each of which loads its weights anew? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def moves_of(observed: Observed, seen: Seen, topology: Topology, least: float = LEAST) -> list[Move]:
    """Return the moves that pay, of groups all of whose pods have a node."""
    claims = [Claim(observed.pool, group) for group in groups(observed) if not group.retired]
    there = {claim.name: where for claim in claims if (where := located(claim))}
    own = {pod.uid for claim in claims for pod in claim.pods}
    gangs = [whole(claim) for claim in claims if claim.name in there]
    wants = {gang.pool: reading.constraints(observed.pool) for gang in gangs}
    nodes = with_holders(seen.nodes, seen.pods, own)
    network = with_measured(topology, seen.measured)
    return proposed(Question(gangs, nodes, network, wants, seen.slow), there, least)


def _json(move: Move) -> dict[str, Any]:
    return {
        "group": move.gang.partition("/")[2],
        "role": move.role,
        "from": list(move.here),
        "to": list(move.there),
        "wins": move.wins,
        "before": {**asdict(move.before), "total": move.before.total},
        "after": {**asdict(move.after), "total": move.after.total},
    }


def _lines(moves: list[Move], *, applied: bool) -> list[str]:
    if not moves:
        return ["no move pays"]
    found = []
    for move in moves:
        group = move.gang.partition("/")[2]
        parts = {words: getattr(move.before, term) - getattr(move.after, term) for term, words in TERMS.items()}
        why = ", ".join(f"{won:+.2f} {words}" for words, won in parts.items() if abs(won) >= 0.005)
        found.append(f"{move.role} {group}: {', '.join(move.here)} -> {', '.join(move.there)}: wins {move.wins:.2f}")
        found.append(f"  {why}")
    found.append(f"in all: {moves[0].before.total:.2f} -> {moves[-1].after.total:.2f}, in GPUs worth nothing")
    return found if applied else [*found, "nothing was moved; --apply makes these moves, one after another"]
