"""Faults of other operators that this one must not have, as far as no other file tests them; see docs/immunity.md."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.operator.logic.actions import Apply
from twinpool.operator.logic.observed import Observed
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.observe import read_pool
from twinpool.operator.shell.watch import Cache, watch_registry, watch_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

ROOT = Path(__file__).parents[2]


def templates(pool: InferencePool) -> dict[str, Any]:
    """Return the pod templates that a pool leads to, by the name of their object's role."""
    actions = plan(Observed(pool), Settings(), 0.0).actions
    bodies = [action.body for action in actions if isinstance(action, Apply)]
    sets = [body for body in bodies if body["kind"] in ("StatefulSet", "Deployment")]
    return {body["metadata"]["labels"]["serving.twinpool.dev/role"]: body["spec"]["template"] for body in sets}


def test_annotations_labels_and_generation_of_the_pool_do_not_reach_its_pods(make_pool: Callable[..., Any]) -> None:
    plain = make_pool()
    metadata = plain.metadata.model_copy(
        update={"annotations": {"somebody/state": "x"}, "labels": {"team": "x"}, "generation": 7}
    )
    assert templates(plain.model_copy(update={"metadata": metadata})) == templates(plain)


def test_replicas_do_not_reach_the_pods(make_pool: Callable[..., Any]) -> None:
    scaled = templates(make_pool({"decode": {"replicas": 1}, "prefill": {"replicas": 1}}))
    other = templates(make_pool({"decode": {"replicas": 3}, "prefill": {"replicas": 2}}))
    for role in ("prefill", "decode"):
        labels = [found[role]["metadata"]["labels"].pop("serving.twinpool.dev/group") for found in (scaled, other)]
        assert all(labels)
        assert scaled[role] == other[role]


def test_no_number_of_objects_can_block_the_start() -> None:
    assert watch_settings().queueing.worker_limit is None, "with a limit, more objects than workers wait for each other"
    assert watch_settings().watching.chunk_size, "a list of everything at once is in memory as a whole, several times"
    assert watch_settings().watching.inactivity_timeout, "a silent connection is given up"


def test_no_handler_keeps_state_on_objects_or_waits_for_peers() -> None:
    registry = watch_registry(Cache(), lambda *_: None)
    assert not registry._spawning.get_all_handlers(), "daemons and timers add finalizers"
    assert not registry._changing.get_all_handlers(), "handlers of changes write annotations"
    assert not registry._webhooks.get_all_handlers()
    assert watch_settings().peering.standalone


def test_a_pool_with_nothing_but_what_it_must_have_is_read() -> None:
    """A field that a later version adds is not in objects that were stored before."""
    body = {"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": {"model": {"name": "m"}}, "status": {}}
    body["spec"] = {"model": {"name": "m"}, "decode": {}}
    pool = read_pool(body)
    assert plan(Observed(pool), Settings(), 0.0).actions


def test_a_pool_of_a_later_version_is_read_without_what_is_unknown() -> None:
    metadata = {"name": "p", "namespace": "n", "uid": "u", "novelty": 1}
    status = {"conditions": [], "revision": "r"}
    pool = read_pool({"metadata": metadata, "spec": {"model": {"name": "m"}, "decode": {}}, "status": status})
    assert pool.status.revision == "r"


def test_nothing_in_the_operator_blocks_its_loop() -> None:
    """No ``time.sleep``, and the linter's rules for blocking calls in coroutines are on."""
    rules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["select"]
    assert "ASYNC" in rules
    for file in (ROOT / "operator").rglob("*.py"):
        called = [
            ast.unparse(node.func) for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
        ]
        assert not {"time.sleep", "requests.get", "subprocess.run"} & set(called), file


def test_every_test_that_the_table_names_exists() -> None:
    text = (ROOT / "docs" / "immunity.md").read_text()
    named = re.findall(r"`([a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`", text)
    assert len(named) > 50
    for path, name in named:
        for short, folder in (("op/", "tests/operator/"), ("router/", "tests/router/")):
            path = path.replace(short, folder) if path.startswith(short) else path
        assert re.search(rf"def {name}\(", (ROOT / path).read_text()), f"{path}::{name}"
