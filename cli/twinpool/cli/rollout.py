"""``twinpool rollout``: see, foresee and steer how a pool moves to a new revision."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path  # noqa: TC003 - cyclopts reads annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from twinpool.cli.kubectl import Kubectl
from twinpool.cli.options import Context, Format, Namespace  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.pools import RESOURCE, observe, with_manifest
from twinpool.cli.table import write_value
from twinpool.core import protocol
from twinpool.core.errors import TwinpoolError
from twinpool.core.units import parse_duration
from twinpool.operator.logic.decision import decide
from twinpool.operator.logic.forecast import Stage, forecast, ready
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import timestamp
from twinpool.operator.logic.revision import BLOCKS, Revision, stored, with_inputs
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from twinpool.operator.logic.observed import Observed
    from twinpool.operator.logic.rollout import State

app = App(name="rollout", help="See, foresee and steer how a pool moves to a new revision.")

Pool = Annotated[str, Parameter(help="Name of the pool.")]

#: Blocks of the spec that an undo puts back: all that pods are made of.
_UNDONE = (*BLOCKS, *protocol.ROLES)


@app.command
def status(
    pool: Pool, *, namespace: Namespace = "", context: Context = "", watch: bool = True, timeout: str = "30m"
) -> int:
    """Say how far a rollout is, line by line until it is done.

    Exit code 1: it stands still for too long, it is refused, or the time-out is over.

    Parameters
    ----------
    watch
        Go on until it is done; with --no-watch say it once.
    timeout
        How long to watch.
    """
    kubectl = Kubectl(namespace, context)
    end = time.monotonic() + parse_duration(timeout)
    said = ""
    while True:
        line, done = progress(kubectl.get(RESOURCE, pool))
        if line != said:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            said = line
        if done is not None or not watch:
            return 0 if done is not False else 1
        if time.monotonic() > end:
            raise TwinpoolError(f"pool {pool} was not done within {timeout}", "read its conditions: kubectl describe")
        time.sleep(1.0)


def progress(body: dict[str, Any]) -> tuple[str, bool | None]:
    """Return one line about a pool's rollout, and True when it is done, False when it failed, None before."""
    found = body.get("status") or {}
    name = body["metadata"]["name"]
    if found.get("observedGeneration", 0) < body["metadata"].get("generation", 0):
        return f"{name}: waiting for the operator to see the newest spec", None
    conditions = {item["type"]: item for item in found.get("conditions", ())}
    said = conditions.get("Progressing", {"reason": "", "message": "", "status": "Unknown"})
    counts = ", ".join(
        f"{found[role].get('updated', 0)} of {found[role]['desired']} {role} updated, {found[role]['ready']} ready"
        for role in protocol.ROLES
        if role in found
    )
    line = f"{name}: revision {found.get('revision', '?')}: {counts}: {said['message']}"
    if said["reason"] == "Complete":
        return line, True
    return line, False if said["status"] == "False" else None


@app.command
def history(pool: Pool, *, namespace: Namespace = "", context: Context = "", output: Format = "text") -> int:
    """List the revisions of a pool, the newest last, with the groups that run each and what it changed."""
    observed, _ = observe(Kubectl(namespace, context), pool)
    rows = _history(observed)
    if output != "text":
        write_value(rows, output)
        return 0
    lines = [("NUMBER", "REVISION", "GROUPS", "CHANGED")]
    lines += [(str(row["number"]), row["revision"], str(row["groups"]), ", ".join(row["changed"])) for row in rows]
    _table(lines)
    return 0


def _history(observed: Observed) -> list[dict[str, Any]]:
    live = [group for group in groups(observed) if not group.retired]
    rows: list[dict[str, Any]] = []
    before: Revision | None = None
    for revision in stored(observed):
        changed = sorted(_differences(before.inputs, revision.inputs)) if before else []
        count = sum(group.revision == revision.name for group in live)
        rows.append({"number": revision.number, "revision": revision.name, "groups": count, "changed": changed})
        before = revision
    return rows


def _differences(old: Any, new: Any, path: str = "") -> Iterable[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {*old, *new}:
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path


@app.command
def undo(
    pool: Pool,
    *,
    to: Annotated[str, Parameter(help="Name or number; default: the one before.")] = "",
    namespace: Namespace = "",
    context: Context = "",
) -> int:
    """Put the spec back to an earlier revision; numbers of groups, routing and all else stay as they are.

    Whatever applies the pool's manifest (GitOps) must be told as well, or it puts the newer spec back.
    """
    kubectl = Kubectl(namespace, context)
    observed, body = observe(kubectl, pool)
    chosen = _chosen(observed, to)
    kubectl.run("patch", RESOURCE, pool, "--type=json", f"--patch={json.dumps(_undoing(observed, body, chosen))}")
    sys.stdout.write(f"{pool}: spec put back to revision {chosen.name}{_paused(observed)}\n")
    return 0


def _settings() -> Settings:
    """Return what an operator of this version renders pods with; images that it was told besides are not known here."""
    return Settings(version=metadata.version("twinpool"))


def _chosen(observed: Observed, to: str) -> Revision:
    known, now = stored(observed), decide(observed, _settings(), time.time()).newest
    name = observed.pool.metadata.name
    if to:
        found = [item for item in known if to in (item.name, str(item.number))]
        if not found:
            raise TwinpoolError(f"pool {name} has no revision {to}", f"see `twinpool rollout history {name}`")
        return found[-1]
    earlier = [item for item in known if item.name != now.name]
    if not earlier:
        raise TwinpoolError(f"pool {name} has no earlier revision", "edit the pool instead")
    return earlier[-1]


def _undoing(observed: Observed, body: dict[str, Any], chosen: Revision) -> list[dict[str, Any]]:
    """Return the JSON patch; it is refused when somebody edits the spec meanwhile (the status may change)."""
    back = with_inputs(observed.pool, chosen.inputs)
    spec = back.to_manifest()["spec"]
    patch = [{"op": "test", "path": "/metadata/generation", "value": body["metadata"]["generation"]}]
    for block in _UNDONE:
        if block in spec:
            patch.append({"op": "add", "path": f"/spec/{block}", "value": spec[block]})
        elif block in body["spec"]:
            patch.append({"op": "remove", "path": f"/spec/{block}"})
    return patch + _restart_undone(back.metadata.annotations, body["metadata"].get("annotations"))


def _restart_undone(wanted: Mapping[str, str], now: Mapping[str, str] | None) -> list[dict[str, Any]]:
    key = protocol.ANNOTATION_RESTART
    path = f"/metadata/annotations/{key.replace('/', '~1')}"
    if key in wanted:
        new = [] if now is not None else [{"op": "add", "path": "/metadata/annotations", "value": {}}]
        return [*new, {"op": "add", "path": path, "value": wanted[key]}]
    return [{"op": "remove", "path": path}] if key in (now or {}) else []


@app.command
def plan(
    pool: Annotated[str, Parameter(help="Name of the pool; with --file it comes from there.")] = "",
    *,
    file: Annotated[Path | None, Parameter(name=["--file", "-f"], help="Manifest that is to be applied.")] = None,
    namespace: Namespace = "",
    context: Context = "",
    output: Format = "text",
) -> int:
    """Print the steps of a rollout before they happen, from what is there now.

    The operator's own planner makes them; real groups take their time, and it then takes other steps to the same end.
    """
    if bool(pool) == bool(file):
        raise TwinpoolError("give the name of a pool, or --file with its new manifest", "not both")
    kubectl = Kubectl(namespace, context)
    observed = with_manifest(kubectl, file) if file else observe(kubectl, pool)[0]
    begin = decide(observed, _settings(), time.time()).state
    stages = list(forecast(begin))
    if output != "text":
        write_value(_as_json(observed.pool.metadata.name, begin, stages), output)
    else:
        _write_plan(observed.pool.metadata.name, begin, stages)
    return 0


def _as_json(name: str, begin: State, stages: Sequence[Stage]) -> dict[str, Any]:
    return {
        "pool": name,
        "revision": begin.target,
        "steps": [
            {
                "create": {role: count for role, count in stage.step.create.items() if count},
                "retire": list(stage.step.retire),
                "gaveUp": stage.step.gave_up,
                "ready": [
                    {"role": role, "revision": revision, "groups": count}
                    for (role, revision), count in stage.ready.items()
                ],
            }
            for stage in stages
        ],
    }


def _write_plan(name: str, begin: State, stages: Sequence[Stage]) -> None:
    if not stages:
        sys.stdout.write(f"{name}: nothing to do; every group is of revision {begin.target}\n")
        return
    limits = ", ".join(
        f"{role} {bound.floor} to {bound.wanted + bound.surge}" for role, bound in begin.bounds.items() if bound.wanted
    )
    sys.stdout.write(f"{name}: to revision {begin.target}; groups that serve and that exist at most: {limits}\n")
    rows = [("STEP", "MAKE", "LET GO", "READY THEN (old+new)")]
    rows.append(("0", "", "", _ready_words(ready(list(begin.units)), begin)))
    for number, stage in enumerate(stages, 1):
        made = ", ".join(f"{count} {role}" for role, count in stage.step.create.items() if count)
        gone = ", ".join(stage.step.retire) + (f" (below the {stage.step.gave_up})" if stage.step.gave_up else "")
        rows.append((str(number), made, gone, _ready_words(stage.ready, begin)))
    _table(rows)


def _ready_words(found: Any, begin: State) -> str:
    words = []
    for role, limits in begin.bounds.items():
        counts = {key[1]: count for key, count in found.items() if key[0] == role}
        new = counts.pop(begin.target, 0)
        if limits.wanted or counts or new:
            words.append(f"{role} {sum(counts.values())}+{new}")
    return ", ".join(words)


@app.command
def pause(pool: Pool, *, namespace: Namespace = "", context: Context = "") -> int:
    """Stop moving groups to the newest revision; numbers of groups still follow the spec."""
    _patch(Kubectl(namespace, context), pool, {"spec": {"rollout": {"paused": True}}})
    sys.stdout.write(f"{pool}: paused\n")
    return 0


@app.command
def resume(pool: Pool, *, namespace: Namespace = "", context: Context = "") -> int:
    """Go on with a rollout that was paused."""
    _patch(Kubectl(namespace, context), pool, {"spec": {"rollout": {"paused": False}}})
    sys.stdout.write(f"{pool}: resumed\n")
    return 0


@app.command
def restart(pool: Pool, *, namespace: Namespace = "", context: Context = "") -> int:
    """Replace every group by a new one of the same spec, as a rollout; it also takes the operator's newest defaults."""
    kubectl = Kubectl(namespace, context)
    now = timestamp(datetime.now(UTC).timestamp())
    _patch(kubectl, pool, {"metadata": {"annotations": {protocol.ANNOTATION_RESTART: now}}})
    observed, _ = observe(kubectl, pool)
    sys.stdout.write(f"{pool}: restart asked for{_paused(observed)}\n")
    return 0


def _paused(observed: Observed) -> str:
    name = observed.pool.metadata.name
    return f"; it is paused: `twinpool rollout resume {name}` goes on" if observed.pool.spec.rollout.paused else ""


def _patch(kubectl: Kubectl, pool: str, body: dict[str, Any]) -> None:
    kubectl.run("patch", RESOURCE, pool, "--type=merge", f"--patch={json.dumps(body)}")


def _table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
