"""No group goes for a revision that the API server would refuse, and only then is it asked beforehand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.operator.logic.actions import Apply, Retire, Try
from twinpool.operator.logic.observed import Refusal
from twinpool.operator.logic.plan import plan
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.apply import Executor
from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.observe import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = ("team", "demo")
TIGHT = {"maxSurge": 0, "maxUnavailable": 1}
NEW = {"args": ["--seed=7"]}
ABBREVIATED = {"args": ["--tensor-par=2"]}


def updated(build: Callable[..., Any], model: Any, rollout: dict[str, Any]) -> Any:
    """Return a cluster whose pool, of two groups a role, has just been asked for another revision."""
    roles = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    cluster = model(build(rollout=rollout, **roles))
    cluster.settle()
    cluster.pool = build(rollout=rollout, engine=NEW, **roles)
    cluster.tried = frozenset()
    return cluster


def groups_of(actions: Any) -> list[str]:
    return [action.name for action in actions if isinstance(action, Apply) and action.kind == "StatefulSet"]


def test_before_a_group_goes_the_sets_of_the_new_revision_are_tried(make_pool: Any, model_cluster: Any) -> None:
    cluster = updated(make_pool, model_cluster, TIGHT)
    planned = cluster.planned()
    tried = [action for action in planned if isinstance(action, Try)]
    assert [action.role for action in tried] == ["prefill", "decode"]
    assert {action.kind for action in tried} == {"StatefulSet"}
    assert {action.body["metadata"]["labels"][protocol.LABEL_REVISION] for action in tried} == {tried[0].revision}
    assert not {action.name for action in tried} & cluster.sets().keys()
    assert not [action for action in planned if isinstance(action, Retire)]
    assert not groups_of(planned)


def test_as_long_as_one_of_them_was_not_taken_nothing_goes(make_pool: Any, model_cluster: Any) -> None:
    cluster = updated(make_pool, model_cluster, TIGHT)
    revision = next(action.revision for action in cluster.planned() if isinstance(action, Try))
    cluster.tried = frozenset({(revision, "prefill"), ("earlier", "decode")})
    assert [action.role for action in cluster.planned() if isinstance(action, Try)] == ["decode"]
    assert not [action for action in cluster.planned() if isinstance(action, Retire)]
    cluster.tried = frozenset({(revision, "prefill"), (revision, "decode")})
    assert len([action for action in cluster.planned() if isinstance(action, Retire)]) == 2
    cluster.settle()
    assert {child.label(protocol.LABEL_REVISION) for child in cluster.sets().values()} == {revision}


def test_an_operator_that_starts_again_tries_again_and_goes_on(make_pool: Any, model_cluster: Any) -> None:
    cluster = updated(make_pool, model_cluster, TIGHT)
    revision = next(action.revision for action in cluster.planned() if isinstance(action, Try))
    for turn in range(60):
        if turn % 2:
            cluster.tried = frozenset()
        cluster.reconcile()
        cluster.run_controllers()
        cluster.end_pods()
        cluster.set_ready()
        assert len(cluster.sets()) <= 4, "over the budget"
    cluster.settle()
    assert [child.label(protocol.LABEL_REVISION) for child in cluster.sets().values()] == [revision] * 4


def test_numbers_follow_the_spec_while_a_revision_is_refused(make_pool: Any, model_cluster: Any) -> None:
    cluster = updated(make_pool, model_cluster, TIGHT)
    more = {"prefill": {"replicas": 2}, "decode": {"replicas": 3}}
    cluster.pool = make_pool(rollout=TIGHT, engine=NEW, **more)
    (name,) = groups_of(cluster.planned())
    assert "-decode-" in name
    cluster.reconcile()
    revisions = {child.label(protocol.LABEL_REVISION) for child in cluster.sets().values()}
    assert len(revisions) == 1, "made of what is known to work"


def test_where_groups_are_made_before_others_go_that_is_the_trial(make_pool: Any, model_cluster: Any) -> None:
    cluster = updated(make_pool, model_cluster, {"maxSurge": 1, "maxUnavailable": 0})
    planned = cluster.planned()
    assert not [action for action in planned if isinstance(action, Try)]
    assert len(groups_of(planned)) == 2


@pytest.mark.parametrize("rollout", [TIGHT, {"maxSurge": 1, "maxUnavailable": 0}])
def test_arguments_that_launchers_would_refuse_start_no_rollout(
    make_pool: Any, model_cluster: Any, rollout: Any
) -> None:
    cluster = updated(make_pool, model_cluster, rollout)
    cluster.tried = None
    good = cluster.pool
    cluster.pool = make_pool(rollout=rollout, prefill={"replicas": 2}, decode={"replicas": 2, "engine": ABBREVIATED})
    before = cluster.sets().keys()
    cluster.settle()
    assert cluster.sets().keys() == before
    said = {item["type"]: item for item in plan(cluster.observed(), Settings(), cluster.now).status["conditions"]}
    assert (said["Progressing"]["status"], said["Progressing"]["reason"]) == ("False", "ArgumentRefused")
    assert "'--tensor-par=2' sets --tensor-parallel-size" in said["Progressing"]["message"]
    assert said["Ready"]["status"] == "True", "the old revision serves"
    cluster.pool = good
    cluster.settle()
    assert not cluster.sets().keys() & before


def test_the_first_groups_of_a_pool_need_no_trial(make_pool: Any, model_cluster: Any) -> None:
    cluster = model_cluster(make_pool(rollout=TIGHT))
    cluster.tried = frozenset()
    assert not [action for action in cluster.planned() if isinstance(action, Try)]


class Server:
    """Answers dry runs."""

    def __init__(self, error: ApiRefused | None = None) -> None:
        self.error = error
        self.asked: list[str] = []

    async def try_out(self, body: Any) -> None:
        self.asked.append(body["metadata"]["name"])
        if self.error:
            raise self.error


class Leader:
    valid = True


async def execute(server: Server, memory: Memory) -> tuple[Refusal, ...]:
    body = {"kind": "StatefulSet", "metadata": {"name": "g", "namespace": "team"}}
    made = Executor(server, Leader(), memory)  # type: ignore[arg-type]
    return await made.execute(KEY, (Try(body, "r1", "decode"),))


async def test_a_set_that_was_taken_is_remembered_for_its_revision() -> None:
    server, memory = Server(), Memory()
    memory.took(KEY, "r0", "prefill")
    assert await execute(server, memory) == ()
    assert server.asked == ["g"]
    assert memory.tried(KEY) == {("r1", "decode")}
    memory.took(KEY, "r1", "prefill")
    assert memory.tried(KEY) == {("r1", "decode"), ("r1", "prefill")}
    memory.forget(KEY)
    assert memory.tried(KEY) == frozenset()


@pytest.mark.parametrize("code", [400, 403, 422])
async def test_a_refusal_is_one_of_the_pools(code: int) -> None:
    memory = Memory()
    refused = await execute(Server(ApiRefused(code, "spec.template: bad")), memory)
    assert refused == (Refusal("StatefulSet", "g", "spec.template: bad"),)
    assert memory.tried(KEY) == frozenset()


@pytest.mark.parametrize(
    "error", [ApiRefused(400, 'admission webhook "w" does not support dry run'), ApiRefused(409, "conflict")]
)
async def test_what_says_nothing_about_the_set_holds_up_nothing(error: ApiRefused) -> None:
    memory = Memory()
    assert await execute(Server(error), memory) == ()
    assert memory.tried(KEY) == {("r1", "decode")}


async def test_a_server_that_is_away_is_tried_again() -> None:
    memory = Memory()
    with pytest.raises(ApiRefused):
        await execute(Server(ApiRefused(0, "away")), memory)
    assert memory.tried(KEY) == frozenset()
