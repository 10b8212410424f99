"""``twinpool status``: what a pool's groups do now, and what its conditions say that is not well."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from twinpool.cli.kubectl import Kubectl
from twinpool.cli.options import Context, Format, Namespace  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.pools import RESOURCE, observe
from twinpool.cli.table import write_table, write_value
from twinpool.core import protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.operator.logic.observed import Observed, PodView

_POOLS = ("NAMESPACE", "NAME", "PREFILL", "DECODE", "RATIO", "ROUTER", "READY", "WHY")
_GROUPS = ("GROUP", "ROLE", "REVISION", "PODS", "STATE", "RESTARTS", "NODES")
_STARTING = "starting"
#: Conditions that say something is wrong when they are False; Progressing is False when all is done.
_PROMISES = ("Ready", "Placed", "Routable", "HandoffWorking", "InterconnectVerified", "WithinObjectives")


def status(
    pool: Annotated[str, Parameter(help="Name of the pool; without one: a line for each pool.")] = "",
    *,
    namespace: Namespace = "",
    all_namespaces: Annotated[bool, Parameter(name=["--all-namespaces", "-A"], negative="")] = False,
    context: Context = "",
    output: Format = "text",
) -> int:
    """Show the groups of a pool, or all pools: how many serve, on which nodes, and what is not well.

    Exit code 1: a pool that was shown is not ready.

    Parameters
    ----------
    all_namespaces
        Pools of every namespace.
    """
    kubectl = Kubectl(namespace, context)
    if pool:
        observed, stored = observe(kubectl, pool)
        loads = {entry["group"]: entry for entry in (stored.get("status") or {}).get("loading") or ()}
        value = {**summary(stored), "groups": groups(observed, loads), "problems": problems(stored)}
        if output == "text":
            _write_pool(stored, value)
        else:
            write_value(value, output)
        return 0 if value["ready"] == "True" else 1
    found = kubectl.get(RESOURCE, *(["--all-namespaces"] if all_namespaces else []))["items"]
    values = [summary(body) for body in found]
    if output == "text":
        write_table(_POOLS, [[*(value[key.lower()] for key in _POOLS[:-1]), value["why"]] for value in values])
    else:
        write_value(values, output)
    return 0 if all(value["ready"] == "True" for value in values) else 1


def summary(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return one pool's line: counts of groups as serving/wanted, and why it is not ready."""
    found, metadata = stored.get("status") or {}, stored["metadata"]
    conditions = {item["type"]: item for item in found.get("conditions") or ()}
    ready = conditions.get("Ready") or {"status": "Unknown", "message": "the operator has not looked at it yet"}
    counts = {role: (found.get(role) or {}).get("summary", "-") for role in (*protocol.ROLES, "router")}
    return {
        "namespace": metadata.get("namespace", ""),
        "name": metadata["name"],
        **counts,
        "ratio": found.get("ratio") or "-",
        "ready": ready["status"],
        "why": "" if ready["status"] == "True" else ready["message"],
    }


def problems(stored: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the conditions that are not as they should be, with the operator's own words."""
    result = []
    for item in (stored.get("status") or {}).get("conditions") or ():
        kind, state, reason = item["type"], item["status"], item["reason"]
        stuck = kind == "Progressing" and state != "True" and reason != "Complete"
        if stuck or (kind in _PROMISES and state == "False"):
            result.append({"condition": kind, "status": state, "reason": reason, "message": item["message"]})
    return result


def groups(observed: Observed, loads: Mapping[str, Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
    """Return what each group does, in order of role and name; a group has one line, its pods are counted.

    ``loads`` is what the pool's status says of groups that load weights, by group.
    """
    members: dict[str, list[PodView]] = {}
    for pod in observed.pods:
        if pod.group:
            members.setdefault(pod.group, []).append(pod)
    found = [_group(name, pods, (loads or {}).get(name)) for name, pods in members.items()]
    return sorted(found, key=lambda group: (-len(group["role"]), group["group"]))  # prefill, then decode


def _group(name: str, pods: Sequence[PodView], load: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "group": name,
        "role": pods[0].role,
        "revision": pods[0].revision,
        "pods": f"{sum(pod.ready for pod in pods)}/{len(pods)}",
        "state": _loading(load) if load and state(pods) == _STARTING else state(pods),
        "restarts": sum(container.restarts for pod in pods for container in pod.containers),
        "nodes": sorted({pod.node for pod in pods if pod.node}),
    }


def state(pods: Sequence[PodView]) -> str:
    """Return in a few words what the pods of a group do together: what holds the slowest of them back."""
    if any(pod.deadline is not None for pod in pods):
        return "ending"
    if any(pod.draining for pod in pods):
        return "draining"
    if all(pod.ready for pod in pods):
        return "serving"
    if any(pod.scheduling_gates for pod in pods):
        return "waits for nodes"
    if any(pod.scheduled is False for pod in pods):
        return "no node fits"
    waiting = [container.waiting_reason for pod in pods for container in pod.containers if container.waiting_reason]
    if waiting:
        return waiting[0]
    return "waits for routers" if all(pod.containers_ready for pod in pods) else _STARTING


def _loading(load: Mapping[str, Any]) -> str:
    """Return how far the weights are, in percent where that is known."""
    share = f" {100 * load['bytes'] // load['total']} %" if load["total"] else ""
    return f"weights{share}, {load['stage']}"


def _write_pool(stored: Mapping[str, Any], value: Mapping[str, Any]) -> None:
    found = stored.get("status") or {}
    counts = ", ".join(f"{role} {value[role]}" for role in (*protocol.ROLES, "router") if value[role] != "-")
    sys.stdout.write(f"{value['name']}: {stored['spec']['model']['name']}, revision {found.get('revision') or '-'}\n")
    sys.stdout.write(f"{counts or 'nothing runs yet'}; ready: {value['ready']}\n")
    if found.get("endpoint"):
        sys.stdout.write(f"{found['endpoint']}\n")
    if value["groups"]:
        sys.stdout.write("\n")
        rows = [
            [*(str(group[key.lower()]) for key in _GROUPS[:-1]), ",".join(group["nodes"])] for group in value["groups"]
        ]
        write_table(_GROUPS, rows)
    for item in value["problems"]:
        sys.stdout.write(f"\n{item['condition']} is {item['status']} ({item['reason']}): {item['message']}\n")
    if not value["problems"] and value["ready"] != "True":
        sys.stdout.write(f"\n{value['why']}\n")
