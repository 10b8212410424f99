"""The real vLLM behind the real router: greedy answers as of a single instance, and counters that prove the handoff."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import get, post, stream
from twinpool.demo.proof import HandoffCounters
from twinpool.demo.scenario import condition, decode_metrics, pool, router_url
from twinpool.localcluster.waiting import wait_until
from twinpool.localengine.image import IMAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.engine]
ARGS = ["--dtype=float32", "--enforce-eager", "--kv-cache-memory-bytes=134217728", "--seed=0"]
CPU = {"resources": {"gpu": {"perNode": 0}}}
# From less than one KV block (128 tokens on a CPU) to several, and one that shares its beginning with another.
PROMPTS = [
    "class Block",
    "def schedule(self, requests):\n    for request in requests:\n",
    "import torch\n" * 60,
    "import torch\n" * 60 + "def forward(self, hidden_states):",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


def manifest(name: str, prefill: bool, source: str = "file:///models/tiny") -> str:
    spec: dict[str, Any] = {
        "model": {"name": "tiny", "source": source, "maxModelLen": 2048},
        "engine": {"image": IMAGE, "args": ARGS},
        "decode": CPU,
    }
    if prefill:
        spec["prefill"] = CPU
    text: str = yaml.safe_dump(
        {
            "apiVersion": "serving.twinpool.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": spec,
        }
    )
    return text


@pytest.fixture(scope="module")
def engines(vllm: LocalCluster) -> Iterator[tuple[LocalCluster, str]]:
    """A prefill/decode pair and a single instance of the same model, both ready."""
    with vllm.fresh_namespace() as namespace:
        vllm.kubectl("-n", namespace, "apply", "-f", "-", input=manifest("pair", prefill=True))
        vllm.kubectl("-n", namespace, "apply", "-f", "-", input=manifest("single", prefill=False))
        for name in ("pair", "single"):
            wait_until(
                lambda name=name: condition(pool(vllm, namespace, name), "Ready").get("status") == "True",  # type: ignore[misc]
                300,
                f"pool {name} is ready",
                interval=0.5,
            )
        yield vllm, namespace


def complete(cluster: LocalCluster, namespace: str, name: str, prompt: str) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    reply = post(f"{router_url(cluster, namespace, name)}/v1/completions", body)
    assert reply.status == 200, reply.body
    text: str = reply.json()["choices"][0]["text"]
    return text


def test_the_pair_answers_as_one_instance_and_decode_computes_no_prompt(engines: tuple[LocalCluster, str]) -> None:
    cluster, namespace = engines
    for prompt in PROMPTS:
        before = HandoffCounters.read(decode_metrics(cluster, namespace, "pair"))
        answer = complete(cluster, namespace, "pair", prompt)
        counted = HandoffCounters.read(decode_metrics(cluster, namespace, "pair")).since(before)
        assert answer == complete(cluster, namespace, "single", prompt)
        assert counted.handed_over(), (prompt[:40], counted)
        assert counted.bytes_moved > 0


def test_the_router_knows_how_much_kv_each_engine_can_hold(engines: tuple[LocalCluster, str]) -> None:
    cluster, namespace = engines
    admin = f"{router_url(cluster, namespace, 'pair').rsplit(':', 1)[0]}:{protocol.ROUTER_ADMIN_PORT}"
    told = {one["role"]: one["kvTokens"] for one in json.loads(get(f"{admin}/admin/endpoints"))["endpoints"]}
    # Blocks have 128 tokens on a CPU.
    assert f'num_gpu_blocks="{told["decode"] // 128}"' in decode_metrics(cluster, namespace, "pair")
    assert told["decode"] == told["prefill"] > 2048
    assert json.loads(get(f"{admin}/admin/work"))["kvTokens"] == told["decode"]


def test_a_chat_streams_through_both_hops(engines: tuple[LocalCluster, str]) -> None:
    cluster, namespace = engines
    body = {"model": "tiny", "messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 12, "temperature": 0}
    texts = {
        name: "".join(
            event["choices"][0]["delta"].get("content") or ""
            for event in stream(f"{router_url(cluster, namespace, name)}/v1/chat/completions", body)
            if event["choices"]
        )
        for name in ("pair", "single")
    }
    assert texts["pair"]
    assert texts["pair"] == texts["single"]


def test_the_counters_tell_a_prompt_that_was_computed_here(engines: tuple[LocalCluster, str]) -> None:
    # The proof must be able to fail: a single instance computes its prompts, and the counters say so.
    cluster, namespace = engines
    before = HandoffCounters.read(decode_metrics(cluster, namespace, "single"))
    complete(cluster, namespace, "single", "nobody handed this over to you")
    counted = HandoffCounters.read(decode_metrics(cluster, namespace, "single")).since(before)
    assert not counted.handed_over()
    assert counted.computed > 1


def test_a_model_that_is_not_there_is_named(vllm: LocalCluster, namespace: str) -> None:
    text = manifest("absent", prefill=False, source="file:///models/nowhere")
    vllm.kubectl("-n", namespace, "apply", "-f", "-", input=text)

    def named() -> str:
        found = condition(pool(vllm, namespace, "absent"), "Ready")
        return found["message"] if "nowhere" in found.get("message", "") else ""

    message = wait_until(named, 120, "the condition names the path", interval=0.5)
    assert "model.source" in message
