"""From what was observed to what must be done: pure and total, so that the same input gives the same plan.

A plan is level-triggered: it compares what is with what should be, never with what was done before. Carrying it out
twice, or half, or from two operators, leads to the same place; once everything is in place it has no actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic import names
from twinpool.operator.logic.actions import Action, Delete, Plan, Retire
from twinpool.operator.logic.conditions import Situation
from twinpool.operator.logic.contest import applies
from twinpool.operator.logic.drift import stamped
from twinpool.operator.logic.groups import LOST_AFTER, Group, RoleChange, changes, groups, last_serial, new_names
from twinpool.operator.logic.leaders import naming
from twinpool.operator.logic.pods import Template, worker_template
from twinpool.operator.logic.ratio import wanted as wanted_groups
from twinpool.operator.logic.revision import revision as revision_of
from twinpool.operator.logic.router_objects import router_objects
from twinpool.operator.logic.status import status
from twinpool.operator.logic.worker_objects import Body, group_set, headless_service

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.observed import Child, Observed
    from twinpool.operator.logic.settings import Settings


def plan(observed: Observed, settings: Settings, now: float) -> Plan:
    """Return what to do about a pool, its status, and when to look again; ``now`` is in seconds since 1970."""
    pool = observed.pool
    templates = {name: worker_template(pool, name, role, settings) for name, role in names.roles(pool).items()}
    revision = revision_of(templates)
    wanted = wanted_groups(pool)
    existing = groups(observed)
    change = changes(existing, wanted, revision, now)
    children = {(child.kind, child.name): child for child in observed.children}
    serial = max(observed.last_serial, last_serial(existing, _remembered(pool, children)))
    wanted_objects = [
        *router_objects(pool, settings, serial),
        *(headless_service(pool, name) for name in templates),
        *_kept(pool, existing, change, templates, revision),
        *_created(pool, existing, change, templates, revision, serial),
    ]
    bodies = [stamped(body) for body in wanted_objects]
    actions: list[Action] = list(applies(bodies, children, observed.contests))
    actions += _removals(existing, change, children, pool)
    actions += naming(existing)
    situation = Situation(observed, revision, wanted, existing, acting=bool(actions))
    return Plan(tuple(actions), status(situation, now), _requeue_after(existing, now))


def _remembered(pool: InferencePool, children: Mapping[tuple[str, str], Child]) -> str | None:
    service = children.get(("Service", names.child_name(pool, names.ROUTER)))
    return None if service is None else service.annotation(names.LAST_SERIAL_ANNOTATION)


def _kept(
    pool: InferencePool,
    existing: tuple[Group, ...],
    change: Mapping[str, RoleChange],
    templates: Mapping[str, Template],
    revision: str,
) -> list[Body]:
    """Return the groups of the newest revision that stay, as they should be; older ones are left as they are."""
    leaving = {group.name for item in change.values() for group in item.retire}
    return [
        group_set(pool, role, templates[role], revision, group.serial, group.name)
        for role in templates
        for group in existing
        if (group.role, group.revision) == (role, revision) and not group.retired and group.name not in leaving
    ]


def _created(
    pool: InferencePool,
    existing: tuple[Group, ...],
    change: Mapping[str, RoleChange],
    templates: Mapping[str, Template],
    revision: str,
    serial: int,
) -> list[Body]:
    taken = {group.name for group in existing}
    result = []
    for role, template in templates.items():
        named = new_names(pool.metadata.uid, pool.metadata.name, role, serial, change[role].create, taken)
        for number, name in named:
            result.append(group_set(pool, role, template, revision, number, name))
            serial = number
    return result


def _removals(
    existing: tuple[Group, ...],
    change: Mapping[str, RoleChange],
    children: Mapping[tuple[str, str], Child],
    pool: InferencePool,
) -> list[Action]:
    result: list[Action] = [
        Retire(group.name, group.child.uid, group.child.resource_version)
        for item in change.values()
        for group in item.retire
    ]
    result += [_delete(group.child) for group in existing if group.retired and group.gone and not group.child.deleting]
    present = {group.role for group in existing}
    for role in protocol.ROLES:
        service = children.get(("Service", names.child_name(pool, role)))
        if service and not service.deleting and role not in names.roles(pool) and role not in present:
            result.append(_delete(service))
    return result


def _delete(child: Child) -> Delete:
    return Delete(child.kind, child.name, child.uid, child.resource_version)


def _requeue_after(existing: tuple[Group, ...], now: float) -> float | None:
    """Return the seconds until the next leaving pod would be overdue, since no event tells that it is."""
    ends = [pod.deadline + LOST_AFTER for group in existing for pod in group.pods if pod.deadline is not None]
    coming = [end - now for end in ends if end >= now]
    return min(coming) + 1.0 if coming else None
