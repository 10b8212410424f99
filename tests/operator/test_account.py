"""Routers whose ServiceAccount was deleted hold void tokens: they are replaced, and nothing else is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.operator.logic import names
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

ROUTER = "demo-router"


def restart_mark(cluster: Any) -> str | None:
    metadata = cluster.objects["Deployment", ROUTER]["spec"]["template"]["metadata"]
    mark: str | None = metadata.get("annotations", {}).get(names.ACCOUNT_ANNOTATION)
    return mark


def test_a_new_pools_routers_are_started_once(
    make_pool: Callable[..., InferencePool], model_cluster: type[Any]
) -> None:
    cluster = model_cluster(make_pool())
    for _ in range(6):
        cluster.reconcile()
        assert restart_mark(cluster) is None
    noted = cluster.objects["Deployment", ROUTER]["metadata"]["annotations"][names.ACCOUNT_ANNOTATION]
    assert noted == cluster.objects["ServiceAccount", ROUTER]["metadata"]["uid"]
    assert not cluster.planned()


def test_an_account_that_is_made_again_replaces_the_routers_once(
    make_pool: Callable[..., InferencePool], model_cluster: type[Any]
) -> None:
    cluster = model_cluster(make_pool())
    for lost in range(2):
        for _ in range(6):
            cluster.reconcile()
        before = restart_mark(cluster)
        del cluster.objects["ServiceAccount", ROUTER]
        cluster.reconcile()
        assert restart_mark(cluster) == before, "nothing is restarted before there is an account"
        cluster.reconcile()
        account = cluster.objects["ServiceAccount", ROUTER]["metadata"]["uid"]
        assert restart_mark(cluster) == account, f"loss {lost}"
        assert not cluster.planned()


def test_a_deployment_that_was_made_before_the_loss_of_its_account_was_seen_is_restarted(
    make_pool: Callable[..., InferencePool], model_cluster: type[Any]
) -> None:
    cluster = model_cluster(make_pool())
    for _ in range(6):
        cluster.reconcile()
    del cluster.objects["Deployment", ROUTER]
    cluster.reconcile(Settings())
    assert restart_mark(cluster) is None
    del cluster.objects["ServiceAccount", ROUTER]
    for _ in range(3):
        cluster.reconcile()
    assert restart_mark(cluster) == cluster.objects["ServiceAccount", ROUTER]["metadata"]["uid"]
