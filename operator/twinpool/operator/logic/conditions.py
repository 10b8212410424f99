"""The statements about a pool. Each names the cause and, where there is one, the next step.

``HandoffWorking`` and ``WithinObjectives`` are Unknown until something measures them: a guess would be worse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.topology import AUTO, Topology, preset
from twinpool.operator.logic import names
from twinpool.operator.logic.admission import argument, refused
from twinpool.operator.logic.disruption import exposed
from twinpool.operator.logic.failures import MAX_MESSAGE, Failure, first_failure, unplaced
from twinpool.operator.logic.gate import pending
from twinpool.operator.logic.loading import loading, words
from twinpool.operator.logic.observed import Observed, PodView, timestamp
from twinpool.operator.logic.pinning import shortages
from twinpool.operator.logic.restarts import restarting
from twinpool.operator.logic.slow_links import verified

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.operator.logic.groups import Group


@dataclass(frozen=True, slots=True)
class Statement:
    """One condition without times."""

    type: str
    status: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Situation:
    """What the statements are about."""

    observed: Observed
    revision: str
    wanted: Mapping[str, int]
    groups: Sequence[Group]
    #: Whether the plan changes anything besides the status.
    acting: bool
    #: What to say of a rollout that stands still for too long, empty while none does.
    standstill: str = ""
    #: How the nodes of new groups are chosen; None leaves it to kube-scheduler.
    placement: str | None = None
    #: Whether new groups get a ComputeDomain each, or why not; None where none could use one.
    compute_domain: str | None = None
    #: What the operator was told of the network.
    topology: Topology = field(default_factory=lambda: preset(AUTO))

    @property
    def live(self) -> list[Group]:
        """Return the groups that are not on their way out."""
        return [group for group in self.groups if not group.retired]

    @property
    def routers(self) -> list[PodView]:
        """Return the router's pods that are not on their way out."""
        return [pod for pod in self.observed.pods if pod.role == names.ROUTER and pod.deadline is None]

    @property
    def newest(self) -> list[PodView]:
        """Return the pods that should serve: the routers and the workers of the newest revision."""
        workers = [pod for group in self.live if group.revision == self.revision for pod in group.pods]
        return self.routers + workers


def statements(situation: Situation) -> list[Statement]:
    """Return every statement that can be made about the pool."""
    failure = first_failure(situation.newest)
    denial = argument(situation.observed.pool) or refused(situation.observed)
    routable = _routable(situation, failure or denial)
    result = [
        _ready(routable, failure, denial),
        _progressing(situation, failure or denial),
        _placed(situation),
        routable,
    ]
    if links := verified(situation.live):
        result.append(Statement("InterconnectVerified", *links))
    spec = situation.observed.pool.spec
    if spec.prefill is not None:
        result.append(_not_measured("HandoffWorking", "no handoff has been measured yet"))
    if spec.objectives.ttft or spec.objectives.itl:
        result.append(_not_measured("WithinObjectives", "latency is not compared with the objectives yet"))
    if situation.observed.scaling is not None:
        outcome = situation.observed.scaling.outcome
        result.append(
            Statement("ScalingActive", "True" if outcome.active else "False", outcome.reason, outcome.message)
        )
    return result


def _not_measured(kind: str, message: str) -> Statement:
    return Statement(kind, "Unknown", "NotMeasured", message)


def _ready(routable: Statement, failure: Failure | None, denial: Failure | None) -> Statement:
    """A pod that crashes makes a pool unready; one that may not be made does so only where it is missed."""
    if failure:
        return Statement("Ready", "False", failure.reason, failure.message)
    if routable.status != "True":
        return Statement("Ready", "False", denial.reason if denial else routable.reason, routable.message)
    return Statement("Ready", "True", "Serving", "the pool answers")


def _routable(situation: Situation, failure: Failure | None) -> Statement:
    spec = situation.observed.pool.spec
    why = failure.message if failure else restarting(situation.live)
    because = f"; {why}" if why else ""

    def no(reason: str, message: str) -> Statement:
        return Statement("Routable", "False", reason, message)

    if spec.routing.replicas == 0 or situation.wanted["decode"] == 0:
        if spec.scaling is not None and spec.routing.replicas:
            return no("ScaledToZero", "nobody asked for a while; the next request brings groups back")
        field = "decode.replicas" if situation.wanted["decode"] == 0 else "routing.replicas"
        return no("ScaledToZero", f"{field} is 0; set it to 1 or more to serve")
    if not any(pod.ready for pod in situation.routers):
        return no("RouterNotReady", f"no router pod is ready{because}")
    ready = [group for group in situation.live if group.ready]
    for role in needed_roles(situation.wanted):
        if not any(group.role == role for group in ready):
            return no(f"No{role.capitalize()}Ready", f"no {role} group is ready{because}")
    if not _pairs(ready, needed_roles(situation.wanted)):
        return no("NoPair", "no revision has a ready group of every role, and a handoff works only within one")
    alone = exposed(situation.wanted, scales=spec.scaling is not None)
    message = "the router and at least one group of every role are ready"
    return Statement("Routable", "True", "Routable", f"{message}; {alone}" if alone else message)


def needed_roles(wanted: Mapping[str, int]) -> list[str]:
    """Return the roles that must have a group for the pool to serve."""
    return [role for role in protocol.ROLES if wanted.get(role)]


def _pairs(ready: Iterable[Group], roles: Iterable[str]) -> bool:
    by_role = {role: {group.revision for group in ready if group.role == role} for role in roles}
    return bool(set.intersection(*by_role.values()))


def _placed(situation: Situation) -> Statement:
    pods = situation.routers + [pod for group in situation.live for pod in group.pods if pod.deadline is None]
    failure = unplaced(pods) or refused(situation.observed)
    if failure:
        return Statement("Placed", "False", failure.reason, failure.message)
    if short := shortages(situation.observed, situation.live):
        more = f" ({len(short) - 1} more groups wait)" if len(short) > 1 else ""
        name = short[0].gang.partition("/")[2]
        return Statement("Placed", "False", short[0].reason, f"group {name}: {short[0]}{more}"[:MAX_MESSAGE])
    missing = sum(situation.wanted.values()) > len([g for g in situation.live if g.pods]) or any(
        pod.scheduled is None for pod in pods
    )
    if missing:
        return Statement("Placed", "Unknown", "Scheduling", "pods are being created or wait for the scheduler")
    return Statement("Placed", "True", "PodsPlaced", "every pod has a node")


def _progressing(situation: Situation, failure: Failure | None) -> Statement:
    refusals = situation.observed.refusals
    if refusals:
        first = refusals[0]
        return Statement(
            "Progressing", "False", "Refused", f"the API server refused {first.kind} {first.name}: {first.message}"
        )
    waiting = _waiting(situation)
    if waiting and situation.observed.pool.spec.rollout.paused and _mixed(situation):
        return Statement("Progressing", "Unknown", "RolloutPaused", f"rollout.paused is true; {waiting}")
    if waiting and situation.standstill:
        because = failure.message if failure else waiting
        return Statement("Progressing", "False", "ProgressDeadlineExceeded", f"{situation.standstill}: {because}")
    if failure:
        return Statement("Progressing", "False", failure.reason, failure.message)
    if situation.observed.contests:
        return Statement("Progressing", "False", "Contested", situation.observed.contests[0].words())
    if waiting:
        return Statement("Progressing", "True", "Waiting", waiting)
    if situation.acting:
        return Statement("Progressing", "True", "Changing", "objects of the pool are being created, changed or deleted")
    return Statement("Progressing", "False", "Complete", "everything is as the pool wants it")


def _mixed(situation: Situation) -> bool:
    return any(group.revision != situation.revision for group in situation.live)


def _waiting(situation: Situation) -> str:
    """Return what a change waits for, empty when it waits for nothing."""
    parts = []
    for role, count in situation.wanted.items():
        ready = sum(
            group.ready for group in situation.live if (group.role, group.revision) == (role, situation.revision)
        )
        if ready < count:
            parts.append(f"{ready} of {count} {role} groups of revision {situation.revision} are ready")
    routers = sum(pod.ready for pod in situation.routers)
    if routers < situation.observed.pool.spec.routing.replicas:
        parts.append(f"{routers} of {situation.observed.pool.spec.routing.replicas} router pods are ready")
    leaving = sum(group.retired for group in situation.groups)
    old = sum(group.revision != situation.revision for group in situation.live)
    loads = words(loading(situation.observed, situation.live))
    parts += [text for text in (pending(situation.observed, situation.live), restarting(situation.live), loads) if text]
    if leaving or old:
        parts.append(f"{leaving + old} groups are to go")
    return "; ".join(parts)


def with_times(
    found: Iterable[Statement], before: Iterable[Mapping[str, Any]], generation: int, now: float
) -> list[dict[str, Any]]:
    """Return the conditions; the time of one whose status did not change stays."""
    earlier = {item["type"]: item for item in before}
    result = []
    for item in found:
        known = earlier.get(item.type)
        kept = known["lastTransitionTime"] if known and known["status"] == item.status else timestamp(now)
        result.append(
            {
                "type": item.type,
                "status": item.status,
                "reason": item.reason,
                "message": item.message,
                "lastTransitionTime": kept,
                "observedGeneration": generation,
            }
        )
    return result
