"""A pool with a renderer, of simulated engines: a chat goes to the worker whose KV events say that it has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import get, post, total
from twinpool.demo.scenario import condition, is_ready, pods, pool, router_url
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[1]
NAME, MODEL = "simulated", "simulated-model"


def apply(cluster: Cluster, namespace: str, renderer: dict[str, Any] | None) -> None:
    """Apply the simulated example with two prefill workers that publish KV events, and a renderer if there is one."""
    document = yaml.safe_load((ROOT / "examples" / "simulated.yaml").read_text())
    spec = document["spec"]
    spec["engine"]["kvEvents"] = True
    spec["prefill"]["replicas"] = 2
    spec["routing"] = {"policy": "price", **({} if renderer is None else {"renderer": renderer})}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=yaml.safe_dump(document))


def said(cluster: Cluster, namespace: str, kind: str) -> str:
    found: str = condition(pool(cluster, namespace, NAME), kind).get("status", "")
    return found


def admin(cluster: Cluster, namespace: str, path: str) -> str:
    return get(f"{router_url(cluster, namespace, NAME).rsplit(':', 1)[0]}:{protocol.ROUTER_ADMIN_PORT}{path}")


def follows(cluster: Cluster, namespace: str, holder: str) -> bool:
    """Whether a router that is ready relies on what the holder's events say, and may ask the renderer."""
    if not any(map(is_ready, pods(cluster, namespace, NAME, "router"))):
        return False
    index = json.loads(admin(cluster, namespace, "/admin/index"))["endpoints"]
    relied = any(one["name"] == holder and one["relied"] for one in index)
    return relied and total(admin(cluster, namespace, "/metrics"), "twinpool_router_renderers") == 1


def test_a_chat_follows_the_events_of_a_worker_over_a_restart_of_the_router(twinpool: Cluster, namespace: str) -> None:
    cluster = twinpool
    apply(cluster, namespace, {"replicas": 1, "resources": {"cpu": "100m", "memory": "512Mi"}})
    wait_until(lambda: said(cluster, namespace, "Ready") == "True", 90, "the pool is ready")
    wait_until(lambda: said(cluster, namespace, "Rendering") == "True", 60, "the renderer serves")
    (renderer,) = pods(cluster, namespace, NAME, "renderer")
    assert not any("serviceaccount" in str(volume) for volume in renderer["spec"].get("volumes", []))
    holder = max(pods(cluster, namespace, NAME, "prefill"), key=lambda pod: str(pod["metadata"]["name"]))
    name, address = holder["metadata"]["name"], holder["status"]["podIP"]
    chats = [
        {"model": MODEL, "messages": [{"role": "user", "content": f"{number} {' word' * 1200}"}], "max_tokens": 4}
        for number in range(3)
    ]
    # Past the router, which so knows nothing of them but by the engine's events.
    for chat in chats:
        assert post(f"http://{address}:{protocol.ENGINE_PORT}/v1/chat/completions", chat).status == 200
    (router,) = pods(cluster, namespace, NAME, "router")
    cluster.kubectl("-n", namespace, "delete", "pod", router["metadata"]["name"], "--wait=false")
    wait_until(lambda: follows(cluster, namespace, name), 90, "a new router follows the holder's events")
    for chat in chats:
        assert post(f"{router_url(cluster, namespace, NAME)}/v1/chat/completions", chat).status == 200
    text = admin(cluster, namespace, "/metrics")
    assert total(text, "twinpool_router_renders_total", outcome="rendered") == 3
    assert total(text, "twinpool_router_prefill_leg_seconds_count", worker=name) == 3
    assert total(text, "twinpool_router_prefill_by_cache_seconds_count", cache="warm") == 3
    assert total(text, "twinpool_router_render_checks_total", outcome="right") >= 2
    # It goes as it came, and the pool serves on.
    apply(cluster, namespace, None)
    kinds = ("-n", namespace, "get", "deployments,services,pods", "-l", f"{protocol.LABEL_ROLE}=renderer", "-o", "name")
    wait_until(lambda: not cluster.kubectl(*kinds).stdout, 60, "the renderer is gone")
    wait_until(lambda: not said(cluster, namespace, "Rendering"), 30, "nothing is said of rendering")
    wait_until(lambda: said(cluster, namespace, "Ready") == "True", 60, "the pool is ready")
    assert post(f"{router_url(cluster, namespace, NAME)}/v1/chat/completions", chats[0]).status == 200
