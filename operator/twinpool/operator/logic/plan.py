"""From what was observed to what must be done: pure and total, so that the same input gives the same plan.

A plan is level-triggered: it compares what is with what should be, never with what was done before. Carrying it out
twice, or half, or from two operators, leads to the same place; once everything is in place it has no actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic import compute_domain, distances, names, progress, renderer_objects, reprieve, restarts
from twinpool.operator.logic.account import with_account
from twinpool.operator.logic.actions import Action, Delete, Plan, Try, WriteScaling
from twinpool.operator.logic.autoscaler import TICK
from twinpool.operator.logic.conditions import Situation
from twinpool.operator.logic.contest import applies
from twinpool.operator.logic.decision import decide
from twinpool.operator.logic.disruption import disruption_budget
from twinpool.operator.logic.drain import deadline, drains, retire, strays
from twinpool.operator.logic.drift import stamped
from twinpool.operator.logic.gate import gates
from twinpool.operator.logic.groups import LOST_AFTER, Group, last_serial, new_names
from twinpool.operator.logic.interconnect import noting
from twinpool.operator.logic.leaders import naming
from twinpool.operator.logic.pinning import ends as pinning_ends
from twinpool.operator.logic.pinning import growing, handed_over, mode, noted, placing, remade, taken_back
from twinpool.operator.logic.ratio import wanted as wanted_groups
from twinpool.operator.logic.revision import KIND, Revision, object_name, revision_object
from twinpool.operator.logic.router_objects import router_objects
from twinpool.operator.logic.status import status
from twinpool.operator.logic.worker_objects import Body, group_set, headless_service

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.observed import Child, Observed
    from twinpool.operator.logic.rollout import Step
    from twinpool.operator.logic.settings import Settings


def plan(observed: Observed, settings: Settings, now: float) -> Plan:
    """Return what to do about a pool, its status, and when to look again; ``now`` is in seconds since 1970."""
    pool = observed.pool
    decision = decide(observed, settings, now)
    existing, newest, todo = decision.existing, decision.newest, decision.todo
    children = {(child.kind, child.name): child for child in observed.children}
    serial = max(observed.last_serial, last_serial(existing, _remembered(pool, children)))
    kept = _kept(observed, existing, todo, decision.revisions, settings)
    created = _created(pool, existing, todo.create, decision.revisions[todo.revision], serial, settings)
    wanted_objects = [
        *_router(pool, children, settings, serial),
        *renderer_objects.renderer_objects(pool, settings, newest.name),
        *(headless_service(pool, name) for name in names.roles(pool)),
        *(disruption_budget(pool, name) for name in names.roles(pool)),
        *(revision_object(pool, item) for item in decision.revisions.values() if item.name not in decision.beyond),
        *compute_domain.domains(pool, [*kept, *created], settings),
        *kept,
        *created,
    ]
    bodies = [stamped(body) for body in wanted_objects]
    actions: list[Action] = [*_scaling(observed), *applies(bodies, children, observed.contests)]
    tried = _created(pool, existing, dict.fromkeys(decision.trials, 1), newest, serial, settings)
    actions += [Try(stamped(body), newest.name, role) for body, role in zip(tried, decision.trials, strict=True)]
    actions += [*reprieve.put_back(existing), *_removals(existing, todo, children, pool, newest.name, now)]
    actions += [
        _delete(child)
        for name in sorted(decision.beyond)
        if (child := children.get((KIND, object_name(pool.metadata.name, name))))
    ]
    sets = [*(group.name for group in existing), *(body["metadata"]["name"] for body in created)]
    actions += [_delete(child) for child in compute_domain.left_over(observed, sets)]
    actions += [_delete(child) for child in renderer_objects.left_over(pool, children)]
    actions += [*handed_over(observed, existing, settings), *taken_back(observed, existing, now)]
    actions += remade(observed, existing, settings)
    actions += [*naming(existing), *restarts.counting(observed, existing)]
    actions += noting(observed, existing, settings.topology, now, sees_nodes=settings.sees_nodes)
    actions += distances.telling(observed, existing, settings.topology) if settings.sees_nodes else []
    actions += [*gates(observed, existing), *strays(existing)]
    actions += drains(observed, existing, now, reprieve.kept(pool, existing, newest.name, now))
    wanted = wanted_groups(pool)
    ends = progress.deadline(observed, existing, newest.name, wanted)
    situation = Situation(
        observed,
        newest.name,
        wanted,
        existing,
        acting=bool(actions),
        standstill="" if todo else progress.standstill(observed, ends, now),
        placement=mode(pool, newest.templates.values(), settings),
        topology=settings.topology,
        compute_domain=compute_domain.state(pool, newest.templates.values(), settings),
    )
    again = [*pinning_ends(observed, existing), *([] if ends is None else [ends])]
    again += [now + TICK] if observed.scaling else []
    return Plan(tuple(actions), status(situation, now), _requeue_after(existing, again, now))


def _scaling(observed: Observed) -> list[Action]:
    """Return the write of new numbers; this plan still acts on the old ones."""
    pool, scaled = observed.pool, observed.scaling
    who = pool.metadata.name, pool.metadata.uid, pool.metadata.resource_version
    if scaled is not None and scaled.write is not None:
        return [WriteScaling(*who, scaled.write, changes=scaled.changes)]
    if pool.spec.scaling is None and pool.status.scaling is not None:
        return [WriteScaling(*who, None)]
    return []


def _router(
    pool: InferencePool, children: Mapping[tuple[str, str], Child], settings: Settings, serial: int
) -> list[Body]:
    bodies = router_objects(pool, settings, serial)
    return [with_account(body, children) if body["kind"] == "Deployment" else body for body in bodies]


def _remembered(pool: InferencePool, children: Mapping[tuple[str, str], Child]) -> str | None:
    service = children.get(("Service", names.child_name(pool, names.ROUTER)))
    return None if service is None else service.annotation(names.LAST_SERIAL_ANNOTATION)


def _kept(
    observed: Observed,
    existing: tuple[Group, ...],
    todo: Step,
    revisions: Mapping[str, Revision],
    settings: Settings,
) -> list[Body]:
    """Return the groups that stay as they should be, each by the stored template of its own revision."""
    pool, result = observed.pool, []
    for group in existing:
        revision = revisions.get(group.revision)
        template = revision.templates.get(group.role) if revision else None
        if template is not None and not group.retired and group.name not in todo.retire:
            grows = growing(group, observed.verdicts.get(group.name), settings)
            domain = compute_domain.noted(group)
            added = placing(pool, group.role, template, group.name, noted(group), settings, grows, domain=domain)
            result.append(group_set(pool, group.role, template, group.revision, group.serial, group.name, added))
    return result


def _created(
    pool: InferencePool,
    existing: tuple[Group, ...],
    create: Mapping[str, int],
    revision: Revision,
    serial: int,
    settings: Settings,
) -> list[Body]:
    taken = {group.name for group in existing}
    result = []
    for role, template in revision.templates.items():
        named = new_names(pool.metadata.uid, pool.metadata.name, role, serial, create.get(role, 0), taken)
        for number, name in named:
            domain = compute_domain.chosen(pool, template, settings)
            added = placing(pool, role, template, name, mode(pool, [template], settings), settings, domain=domain)
            result.append(group_set(pool, role, template, revision.name, number, name, added))
            serial = number
    return result


def _removals(
    existing: tuple[Group, ...],
    todo: Step,
    children: Mapping[tuple[str, str], Child],
    pool: InferencePool,
    newest: str,
    now: float,
) -> list[Action]:
    by_name = {group.name: group for group in existing}
    leaving = [by_name[name] for name in todo.retire]
    result: list[Action] = [retire(group, now, reprieve.until(pool, group, newest, now)) for group in leaving]
    result += [_delete(group.child) for group in existing if group.retired and group.gone and not group.child.deleting]
    present = {group.role for group in existing}
    for role in protocol.ROLES:
        for kind in ("Service", "PodDisruptionBudget"):
            left = children.get((kind, names.child_name(pool, role)))
            if left and not left.deleting and role not in names.roles(pool) and role not in present:
                result.append(_delete(left))
    return result


def _delete(child: Child) -> Delete:
    return Delete(child.kind, child.name, child.uid, child.resource_version)


def _requeue_after(existing: tuple[Group, ...], others: Iterable[float], now: float) -> float | None:
    """Return the seconds until a pod is overdue, a drain's time is over or another time comes: no event tells."""
    ends = [pod.deadline + LOST_AFTER for group in existing for pod in group.pods if pod.deadline is not None]
    drained = [time for group in existing for time in (deadline(group), reprieve.stays_until(group))]
    ends += [*others, *(end for end in drained if end is not None)]
    coming = [end - now for end in ends if end >= now]
    return min(coming) + 1.0 if coming else None
