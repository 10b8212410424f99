"""The whole path with simulated engines: one manifest, an answer, and kubectl as on any cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import get, post, stream, total
from twinpool.demo.proof import HandoffCounters
from twinpool.demo.scenario import condition, decode_metrics, pods, pool, router_url
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[1]
NAME, MODEL = "simulated", "simulated-model"


def manifest(name: str = NAME, **spec: Any) -> str:
    """Return the simulated example under another name, with blocks of its spec replaced."""
    document = yaml.safe_load((ROOT / "examples" / "simulated.yaml").read_text())
    document["metadata"]["name"] = name
    document["spec"] = {key: value for key, value in {**document["spec"], **spec}.items() if value is not None}
    text: str = yaml.safe_dump(document)
    return text


def until_ready(cluster: Cluster, namespace: str, name: str = NAME, timeout: float = 60) -> None:
    wait_until(
        lambda: condition(pool(cluster, namespace, name), "Ready").get("status") == "True",
        timeout,
        f"pool {name} is ready",
    )


@pytest.fixture(scope="module")
def serving(twinpool: Cluster) -> Iterator[tuple[Cluster, str]]:
    """A ready pool with one prefill and one decode worker, shared by the tests of this file."""
    with twinpool.fresh_namespace() as namespace:
        twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=manifest())
        until_ready(twinpool, namespace)
        yield twinpool, namespace


def test_a_chat_is_answered_and_the_kv_cache_handed_over(serving: tuple[Cluster, str]) -> None:
    cluster, namespace = serving
    before = HandoffCounters.read(decode_metrics(cluster, namespace, NAME))
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 8,
    }
    reply = post(f"{router_url(cluster, namespace, NAME)}/v1/chat/completions", body)
    assert reply.status == 200, reply.body
    assert "Paris" in reply.json()["choices"][0]["message"]["content"]
    assert reply.json().get("kv_transfer_params") is None
    counted = HandoffCounters.read(decode_metrics(cluster, namespace, NAME)).since(before)
    assert counted.handed_over(), counted


def test_a_stream_says_what_the_whole_answer_says(serving: tuple[Cluster, str]) -> None:
    cluster, namespace = serving
    url = f"{router_url(cluster, namespace, NAME)}/v1/completions"
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    whole = post(url, body).json()["choices"][0]["text"]
    streamed = "".join(event["choices"][0]["text"] for event in stream(url, body) if event["choices"])
    assert streamed == whole


def test_a_list_of_prompts_is_answered_whole(serving: tuple[Cluster, str]) -> None:
    # Handed off as one request the engine would answer the second prompt wrongly with HTTP 200.
    cluster, namespace = serving
    url = f"{router_url(cluster, namespace, NAME)}/v1/completions"
    alone = [post(url, {"model": MODEL, "prompt": text, "max_tokens": 6}).json() for text in ("red fox", "blue whale")]
    both = post(url, {"model": MODEL, "prompt": ["red fox", "blue whale"], "max_tokens": 6}).json()
    assert [choice["text"] for choice in both["choices"]] == [answer["choices"][0]["text"] for answer in alone]


def test_models_and_errors_look_like_openai(serving: tuple[Cluster, str]) -> None:
    cluster, namespace = serving
    base = router_url(cluster, namespace, NAME)
    assert f'"{MODEL}"' in get(f"{base}/v1/models")
    reply = post(f"{base}/v1/completions", {"model": "another", "prompt": "x"})
    assert reply.status == 404
    assert "another" in reply.json()["error"]["message"]


def test_the_router_counts_handoffs(serving: tuple[Cluster, str]) -> None:
    cluster, namespace = serving
    base = router_url(cluster, namespace, NAME)
    post(f"{base}/v1/completions", {"model": MODEL, "prompt": "count me", "max_tokens": 2})
    admin = f"{base.rsplit(':', 1)[0]}:{protocol.ROUTER_ADMIN_PORT}"
    assert total(get(f"{admin}/metrics"), "twinpool_router_handoffs_total", outcome="remote") >= 1


def test_the_line_of_kubectl_get(serving: tuple[Cluster, str]) -> None:
    cluster, namespace = serving
    header, line = cluster.kubectl("-n", namespace, "get", "tpool").stdout.splitlines()
    assert header.split() == ["NAME", "MODEL", "PREFILL", "DECODE", "RATIO", "REVISION", "ROUTER", "READY", "AGE"]
    name, model, prefill, decode, ratio, revision, router, ready, _ = line.split()
    assert (name, model, prefill, decode, ratio, router, ready) == (NAME, MODEL, "1/1", "1/1", "1:1", "1/1", "True")
    assert revision


def test_describe_shows_conditions(serving: tuple[Cluster, str]) -> None:
    cluster, namespace = serving
    text = cluster.kubectl("-n", namespace, "describe", "tpool", NAME).stdout
    for kind in ("Ready", "Progressing", "Placed", "Routable", "HandoffWorking", "WithinObjectives"):
        assert kind in text


def test_logs_and_exec_of_a_worker(serving: tuple[Cluster, str]) -> None:
    cluster, namespace = serving
    (worker,) = pods(cluster, namespace, NAME, "decode")
    name = worker["metadata"]["name"]
    assert cluster.kubectl("-n", namespace, "logs", name, "-c", "engine").stdout.strip()
    shown = cluster.kubectl("-n", namespace, "exec", name, "-c", "engine", "--", "sh", "-c", "echo $POD_IP; exit 0")
    assert shown.stdout.strip() == worker["status"]["podIP"]
    failed = cluster.kubectl("-n", namespace, "exec", name, "-c", "engine", "--", "sh", "-c", "exit 7", check=False)
    assert failed.returncode == 7


def test_a_pool_without_prefill_answers(twinpool: Cluster, namespace: str) -> None:
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=manifest("aggregated", prefill=None))
    until_ready(twinpool, namespace, "aggregated")
    reply = post(
        f"{router_url(twinpool, namespace, 'aggregated')}/v1/completions",
        {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4},
    )
    assert reply.status == 200, reply.body
    metrics = decode_metrics(twinpool, namespace, "aggregated")
    assert HandoffCounters.read(metrics).transferred == 0


def test_a_deleted_pool_leaves_nothing(twinpool: Cluster, namespace: str) -> None:
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=manifest("shortlived", prefill=None))
    until_ready(twinpool, namespace, "shortlived")
    twinpool.kubectl("-n", namespace, "delete", "tpool", "shortlived", "--wait=false")
    kinds = "statefulsets,deployments,services,serviceaccounts,roles,rolebindings,pods"
    selector = f"{protocol.LABEL_POOL}=shortlived"
    wait_until(
        lambda: not twinpool.kubectl("-n", namespace, "get", kinds, "-l", selector, "-o", "name").stdout,
        60,
        "the pool's objects are gone",
    )


def test_a_hundred_requests_at_once(serving: tuple[Cluster, str]) -> None:
    cluster, namespace = serving
    url = f"{router_url(cluster, namespace, NAME)}/v1/completions"

    def one(number: int) -> int:
        return post(url, {"model": MODEL, "prompt": f"number {number}", "max_tokens": 5}).status

    with ThreadPoolExecutor(20) as threads:
        assert set(threads.map(one, range(100))) == {200}
