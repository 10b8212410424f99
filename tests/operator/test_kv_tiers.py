"""What KV tiers add to a pod: shared memory and memory for the host's, space or a volume for the disk's, a claim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core import protocol
from twinpool.core.protocol import launcher_settings
from twinpool.operator.logic import names
from twinpool.operator.logic.pods import worker_template
from twinpool.operator.logic.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

GI = 2**30
HOST = {"kind": "host", "size": "64Gi"}


@pytest.fixture
def prefill(make_pool: Make) -> Callable[..., dict[str, Any]]:
    """Return a maker of the pod template of a prefill role with these tiers."""

    def _prefill(*tiers: dict[str, str], **role: Any) -> dict[str, Any]:
        pool = make_pool({"prefill": {"kvCache": {"tiers": list(tiers)}, **role}})
        return worker_template(pool, "prefill", names.roles(pool)["prefill"], Settings())

    return _prefill


def volumes(template: dict[str, Any]) -> dict[str, Any]:
    return {volume.pop("name"): volume for volume in template["spec"]["volumes"]}


def engine(template: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = template["spec"]["containers"][0]
    return found


def test_the_host_tier_is_in_shared_memory(prefill: Callable[..., dict[str, Any]]) -> None:
    made = prefill(HOST)
    assert launcher_settings(made).host_kv_bytes == 64 * GI  # type: ignore[union-attr]
    assert volumes(made)["shm"]["emptyDir"]["sizeLimit"] == str((8 + 64) * GI)
    assert engine(made)["resources"]["requests"] == {"memory": str(64 * GI)}, "a tier alone limits no other memory"
    assert "memory" not in engine(made)["resources"]["limits"]


def test_it_comes_on_top_of_the_memory_that_was_asked_for(prefill: Callable[..., dict[str, Any]]) -> None:
    resources = engine(prefill(HOST, resources={"memory": "100Gi"}))["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] == str(164 * GI)
    assert engine(prefill(resources={"memory": "100Gi"}))["resources"]["requests"] == {"memory": "100Gi"}


def test_a_disk_tier_is_space_of_the_node_or_a_volume_of_the_pods_own(prefill: Callable[..., dict[str, Any]]) -> None:
    disk = {"kind": "disk", "size": "500Gi"}
    made = prefill(HOST, disk)
    assert launcher_settings(made).disk_kv_bytes == 500 * GI  # type: ignore[union-attr]
    assert engine(made)["resources"]["requests"]["ephemeral-storage"] == "500Gi"
    assert volumes(made)["kv-disk"] == {"emptyDir": {}}, "the launcher keeps its size; a limit would evict the pod"
    assert {"name": "kv-disk", "mountPath": protocol.KV_DISK_DIRECTORY} in engine(made)["volumeMounts"]
    own = prefill(HOST, {**disk, "storageClass": "nvme"})
    claim = volumes(own)["kv-disk"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (claim["storageClassName"], claim["resources"]["requests"]["storage"]) == ("nvme", "500Gi")
    assert "ephemeral-storage" not in engine(own)["resources"]["requests"]


def test_a_shared_tier_is_a_claim(prefill: Callable[..., dict[str, Any]]) -> None:
    made = prefill(HOST, {"kind": "shared", "size": "4Ti", "claim": "kv"})
    assert launcher_settings(made).shared_kv_bytes == 4096 * GI  # type: ignore[union-attr]
    assert volumes(made)["kv-shared"] == {"persistentVolumeClaim": {"claimName": "kv"}}
    assert {"name": "kv-shared", "mountPath": protocol.KV_SHARED_DIRECTORY} in engine(made)["volumeMounts"]


def test_without_tiers_nothing_changes(prefill: Callable[..., dict[str, Any]]) -> None:
    made = prefill()
    assert set(volumes(made)) == {"twinpool", "shm", "weights"}
    assert launcher_settings(made).host_kv_bytes == 0  # type: ignore[union-attr]


def test_a_store_adds_memory_of_the_pod_and_binds_both_roles(make_pool: Make) -> None:
    store = {"kind": "lmcache", "address": "lm://store:65432", "size": "64Gi"}
    pool = make_pool({"prefill": {"kvCache": {"store": store}, "resources": {"memory": "100Gi"}}})
    roles = names.roles(pool)
    made = {name: worker_template(pool, name, role, Settings()) for name, role in roles.items()}
    assert engine(made["prefill"])["resources"]["limits"]["memory"] == str(164 * GI)
    told = {name: launcher_settings(template) for name, template in made.items()}
    assert (told["prefill"].kv_store, told["prefill"].kv_store_address) == ("lmcache", "lm://store:65432")  # type: ignore[union-attr]
    assert told["prefill"].kv_store_bytes == 64 * GI  # type: ignore[union-attr]
    assert told["decode"].kv_store is None  # type: ignore[union-attr]
    assert [each.plain_kv for each in told.values()] == [True, True]  # type: ignore[union-attr]
    mooncake = make_pool({"prefill": {"kvCache": {"store": {**store, "kind": "mooncake", "address": "m:50051"}}}})
    template = worker_template(mooncake, "prefill", names.roles(mooncake)["prefill"], Settings())
    assert not launcher_settings(template).plain_kv  # type: ignore[union-attr]
