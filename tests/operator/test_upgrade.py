"""What an earlier version stored is read, adopted and not restarted; what a later one stored is read too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from twinpool.core import protocol
from twinpool.core.crd import custom_resource_definition
from twinpool.core.protocol import WorkerConfig
from twinpool.operator.logic.actions import Apply
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.observed import Observed, PodView, read_child
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.rights import missing_fields
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.observe import read_pool

STORED = Path(__file__).with_name("fixtures") / "v0.1.0"


def objects() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((STORED / "objects.yaml").read_text()))


def observed() -> Observed:
    """Return what the operator sees of the stored pool, with its pods."""
    pool, *others = objects()
    children, pods = [], []
    for number, body in enumerate(others):
        body["metadata"] |= {"uid": f"uid-{number}", "resourceVersion": "1"}
        if body["kind"] == "StatefulSet":
            name, labels = body["metadata"]["name"], body["metadata"]["labels"]
            body["status"] = {"replicas": 1}
            role, revision = labels[protocol.LABEL_ROLE], labels[protocol.LABEL_REVISION]
            pods.append(PodView(f"{name}-0", role, name, revision, phase="Running", ready=True, scheduled=True))
        children.append(read_child(body["kind"], body))
    return Observed(read_pool(pool), tuple(children), tuple(pods))


def meant(spec: Any) -> Any:
    """Return a pod spec with the launcher's settings as they are understood: later versions spell more of them out."""
    result = copy.deepcopy(spec)
    for entry in result["containers"][0]["env"]:
        if entry["name"] == protocol.WORKER_CONFIG_ENV:
            entry["value"] = WorkerConfig.from_json(entry["value"])
    return result


def test_a_stored_pool_is_adopted_without_touching_its_workers() -> None:
    seen = observed()
    made = plan(seen, Settings(), 1_800_000_000.0)
    names = {group.name for group in groups(seen)}
    assert len(names) == 2
    touched = [action for action in made.actions if not isinstance(action, Apply)]
    assert not touched, "nothing goes"
    sets = [action for action in made.actions if isinstance(action, Apply) and action.kind == "StatefulSet"]
    assert {action.name for action in sets} <= names, "nothing is made anew"
    live = {child.name: child.content["spec"]["template"]["spec"] for child in seen.children if child.name in names}
    for action in sets:
        assert meant(action.body["spec"]["template"]["spec"]) == meant(live[action.name])
    assert made.status["revision"] == seen.pool.status.revision


def test_no_field_that_was_ever_stored_is_gone() -> None:
    def schema(definition: Any) -> Any:
        return definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

    before = yaml.safe_load((STORED / "crd.yaml").read_text())
    assert missing_fields(schema(before), schema(custom_resource_definition())) == []


def test_an_object_of_a_later_version_is_read_after_a_roll_back() -> None:
    pool, *_ = objects()
    later = copy.deepcopy(pool)
    later["spec"]["decode"]["somethingNew"] = {"a": 1}
    later["spec"]["alsoNew"] = True
    later["status"]["newCount"] = 3
    assert read_pool(later).spec == read_pool(pool).spec
