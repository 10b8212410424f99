"""The real vLLM's renderer in a pool: chats follow KV events, and are handed off by the ids that it made."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import get, post, total
from twinpool.demo.proof import HandoffCounters
from twinpool.demo.scenario import condition, decode_metrics, pods, pool, router_url
from twinpool.localcluster.waiting import wait_until
from twinpool.localengine.image import IMAGE

if TYPE_CHECKING:
    from twinpool.localcluster.cluster import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.engine, pytest.mark.slow]
NAME, CHATS = "real", 12
SPEC: dict[str, Any] = {
    "model": {"name": "tiny", "source": "file:///models/tiny", "maxModelLen": 2048},
    "engine": {
        "image": IMAGE,
        "kvEvents": True,
        "args": ["--dtype=float32", "--enforce-eager", "--kv-cache-memory-bytes=134217728", "--seed=0"],
    },
    "prefill": {"replicas": 2, "resources": {"gpu": {"perNode": 0}}},
    "decode": {"resources": {"gpu": {"perNode": 0}}},
    "routing": {"policy": "price", "renderer": {"resources": {"cpu": "100m", "memory": "2Gi"}}},
}


def admin(cluster: LocalCluster, namespace: str, path: str) -> str:
    return get(f"{router_url(cluster, namespace, NAME).rsplit(':', 1)[0]}:{protocol.ROUTER_ADMIN_PORT}{path}")


def test_chats_are_rendered_compared_and_handed_off_by_their_ids(vllm: LocalCluster, namespace: str) -> None:
    cluster = vllm
    head = {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": NAME}}
    cluster.kubectl("-n", namespace, "apply", "-f", "-", input=yaml.safe_dump({**head, "spec": SPEC}))
    for kind in ("Ready", "Rendering"):
        wait_until(
            lambda kind=kind: condition(pool(cluster, namespace, NAME), kind).get("status") == "True",  # type: ignore[misc]
            400,
            f"the pool is {kind}",
            interval=0.5,
        )
    holder = pods(cluster, namespace, NAME, "prefill")[0]
    (decode,) = pods(cluster, namespace, NAME, "decode")
    name = holder["metadata"]["name"]

    def blocks() -> int:
        index = json.loads(admin(cluster, namespace, "/admin/index"))["endpoints"]
        return sum(one["blocks"] for one in index if one["name"] == name and one["relied"])

    def ask(base: str, chat: dict[str, Any]) -> Any:
        reply = post(f"{base}/v1/chat/completions", chat)
        assert reply.status == 200, reply.body
        return reply.json()

    for number in range(CHATS):
        text = f"{number} " + "def forward(self, hidden_states):\n    return self.layers(hidden_states)\n" * 40
        chat = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        before = blocks()
        held = ask(f"http://{holder['status']['podIP']}:{protocol.ENGINE_PORT}", chat)["usage"]["prompt_tokens"] // 128
        wait_until(lambda least=before + held: blocks() >= least, 30, "its events came")  # type: ignore[misc]
        counted = HandoffCounters.read(decode_metrics(cluster, namespace, NAME))
        answer = ask(router_url(cluster, namespace, NAME), chat)
        assert HandoffCounters.read(decode_metrics(cluster, namespace, NAME)).since(counted).handed_over()
        alone = ask(f"http://{decode['status']['podIP']}:{protocol.ENGINE_PORT}", chat)
        assert answer["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
        assert answer["usage"] | {"prompt_tokens_details": None} == alone["usage"] | {"prompt_tokens_details": None}
    text = admin(cluster, namespace, "/metrics")
    # On a busy machine some are late, and go by the estimate.
    rendered = total(text, "twinpool_router_renders_total", outcome="rendered")
    checked = total(text, "twinpool_router_render_checks_total", outcome="right")
    print(f"{rendered:.0f} of {CHATS} chats rendered in {total(text, 'twinpool_router_render_seconds_sum'):.3f} s")
    assert rendered > checked >= 3, "at least one went on as ids"
    assert total(text, "twinpool_router_render_checks_total", outcome="wrong") == 0
    # A question to the index that is late on a busy machine goes by the estimate too; by chance it would be half.
    assert total(text, "twinpool_router_prefill_leg_seconds_count", worker=name) >= 0.75 * rendered
