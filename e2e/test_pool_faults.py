"""What breaks is named in a condition, and mended: engines that do not start, workers that die under load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import get, post, stream
from twinpool.demo.scenario import condition, pods, pool, router_url
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from twinpool.localcluster.cluster import Cluster, LocalCluster

pytestmark = pytest.mark.cluster
MODEL = "simulated-model"
CPU = {"resources": {"gpu": {"perNode": 0}}}


def manifest(name: str, prefill: dict[str, Any] | None, decode: dict[str, Any], **spec: Any) -> str:
    roles = {"decode": {**CPU, **decode}} | ({} if prefill is None else {"prefill": {**CPU, **prefill}})
    text: str = yaml.safe_dump(
        {
            "apiVersion": "serving.twinpool.dev/v1alpha1",
            "kind": "InferencePool",
            "metadata": {"name": name},
            "spec": {"model": {"name": MODEL}, "engine": {"kind": "simulated"}, **roles, **spec},
        }
    )
    return text


def restarts(cluster: Cluster, namespace: str, name: str, role: str) -> int:
    return sum(
        status["restartCount"]
        for pod in pods(cluster, namespace, name, role)
        for status in pod["status"].get("containerStatuses", [])
    )


def terminated_at(cluster: Cluster, namespace: str, name: str) -> str:
    for pod in pods(cluster, namespace, name, "decode"):
        for status in pod["status"].get("containerStatuses", []):
            ended = status["state"].get("terminated") or status["lastState"].get("terminated")
            if ended:
                return str(ended["finishedAt"])
    return ""


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("model-missing", "model.source"),
        ("crash-at-start", "Error"),
        ("oom-at-load", "memory"),
    ],
)
def test_an_engine_that_cannot_start_is_named_with_its_last_lines(
    twinpool: Cluster, namespace: str, fault: str, words: str
) -> None:
    text = manifest("broken", None, {"engine": {"args": [f"--fault={fault}"]}})
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=text)
    wait_until(lambda: terminated_at(twinpool, namespace, "broken"), 60, "the engine ended")

    def named() -> dict[str, Any]:
        found = condition(pool(twinpool, namespace, "broken"), "Ready")
        return found if found.get("status") == "False" and words in found["message"] else {}

    found = wait_until(named, 10, f"the condition says {words}")
    assert "broken-decode" in found["message"]
    assert "engine" in found["message"]
    # The kubelet's back-off: 10 s after the first end, 20 s after the second. No storm.
    assert restarts(twinpool, namespace, "broken", "decode") <= 2
    assert condition(pool(twinpool, namespace, "broken"), "Routable")["status"] == "False"


def test_a_corrected_pool_recovers(twinpool: Cluster, namespace: str) -> None:
    text = manifest("mended", None, {"engine": {"args": ["--fault=crash-at-start"]}})
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=text)
    wait_until(lambda: terminated_at(twinpool, namespace, "mended"), 60, "the engine ended")
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=manifest("mended", None, {}))
    wait_until(
        lambda: condition(pool(twinpool, namespace, "mended"), "Ready").get("status") == "True",
        60,
        "the pool recovered",
    )


def test_prefill_killed_under_load_fails_nobody_silently(
    local_cluster: LocalCluster, twinpool: Cluster, namespace: str
) -> None:
    """Every client gets the right answer or a clear error, nobody waits for ever, and the pool heals."""
    slow = {"engine": {"args": ["--tokens-per-second=40"]}}
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=manifest("killed", {"replicas": 1}, slow))
    wait_until(lambda: condition(pool(twinpool, namespace, "killed"), "Ready").get("status") == "True", 60, "ready")
    url = f"{router_url(twinpool, namespace, 'killed')}/v1/completions"
    body = {"model": MODEL, "prompt": "the answer must not depend on who dies", "max_tokens": 12, "temperature": 0}
    expected = post(url, body).json()["choices"][0]["text"]
    outcomes: list[str] = []
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            reply = post(url, body, timeout=30)
            if reply.status == 200:
                text = reply.json()["choices"][0]["text"]
                outcomes.append("right" if text == expected else f"wrong: {text!r}")
            else:
                outcomes.append("error" if "message" in reply.json()["error"] else f"unclear: {reply.body!r}")

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    try:
        wait_until(lambda: len(outcomes) >= 8, 30, "clients are served")
        (victim,) = pods(twinpool, namespace, "killed", "prefill")
        name = victim["metadata"]["name"]
        find = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q simulate && kill -9 ${p#/proc/}; done"
        twinpool.kubectl("-n", namespace, "exec", name, "-c", "engine", "--", "sh", "-c", find, check=False)
        reached = len(outcomes)
        wait_until(lambda: len(outcomes) >= reached + 20, 40, "clients are served after the kill")
        wait_until(
            lambda: condition(pool(twinpool, namespace, "killed"), "Ready").get("status") == "True",
            60,
            "the pool healed",
        )
    finally:
        stop.set()
        for thread in clients:
            thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in clients), "a client hangs"
    assert set(outcomes) <= {"right", "error"}, outcomes
    assert outcomes.count("right") > len(outcomes) / 2


def test_streams_of_a_killed_decode_worker_go_on_at_the_other_one(twinpool: Cluster, namespace: str) -> None:
    """With ``routing.continuation``, greedy completions end as if nothing had happened; a chat gets an error event."""
    slow = {"replicas": 2, "engine": {"args": ["--tokens-per-second=20"]}}
    text = manifest("goes-on", {"replicas": 1}, slow, routing={"continuation": True, "policy": "round-robin"})
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=text)
    wait_until(lambda: condition(pool(twinpool, namespace, "goes-on"), "Ready").get("status") == "True", 60, "ready")
    base = router_url(twinpool, namespace, "goes-on")
    asked = {"model": MODEL, "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    options = {"stream_options": {"include_usage": True}}
    prompts = [f"this is told to the end, part {number}" for number in range(6)]
    begun = threading.Semaphore(0)

    def tell(prompt: str) -> tuple[str, int]:
        got, tokens = "", 0
        for event in stream(f"{base}/v1/completions", {**asked, **options, "prompt": prompt}):
            got += event["choices"][0]["text"] if event["choices"] else ""
            tokens = (event.get("usage") or {}).get("completion_tokens", 0)
            begun.release()
        return got, tokens

    with ThreadPoolExecutor(2 * len(prompts)) as threads:
        undisturbed = list(threads.map(tell, prompts))
        while begun.acquire(blocking=False):
            pass
        disturbed = [threads.submit(tell, prompt) for prompt in prompts]
        chats = [
            threads.submit(post, f"{base}/v1/chat/completions", {
                "model": MODEL, "max_tokens": 120, "stream": True, "messages": [{"role": "user", "content": prompt}],
            })
            for prompt in prompts
        ]  # fmt: skip
        for _ in range(20 * len(prompts)):
            assert begun.acquire(timeout=30), "the streams are under way"
        victim = pods(twinpool, namespace, "goes-on", "decode")[0]["metadata"]["name"]
        find = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q simulate && kill -9 ${p#/proc/}; done"
        twinpool.kubectl("-n", namespace, "exec", victim, "-c", "engine", "--", "sh", "-c", find, check=False)
        assert [future.result(60) for future in disturbed] == undisturbed
        assert all(tokens == 120 for _, tokens in undisturbed)
        lost = [b"worker_lost" in future.result(60).body for future in chats]
    assert any(lost), "a chat cannot go on, and says so"
    numbers = get(f"{base.rsplit(':', 1)[0]}:{protocol.ROUTER_ADMIN_PORT}/metrics")
    resumed = next(line for line in numbers.splitlines() if 'continuations_total{outcome="resumed"}' in line)
    assert float(resumed.split()[-1]) >= 1


def test_a_dead_worker_pod_is_replaced(twinpool: Cluster, namespace: str) -> None:
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=manifest("lost", {}, {}))
    wait_until(lambda: condition(pool(twinpool, namespace, "lost"), "Ready").get("status") == "True", 60, "ready")
    (before,) = pods(twinpool, namespace, "lost", "decode")
    twinpool.kubectl("-n", namespace, "delete", "pod", before["metadata"]["name"], "--force", "--grace-period=0")

    def replaced() -> bool:
        found = pods(twinpool, namespace, "lost", "decode")
        return bool(found) and found[0]["metadata"]["uid"] != before["metadata"]["uid"]

    wait_until(replaced, 30, "a new pod")
    wait_until(lambda: condition(pool(twinpool, namespace, "lost"), "Ready").get("status") == "True", 60, "ready again")
    url = f"{router_url(twinpool, namespace, 'lost')}/v1/completions"
    wait_until(lambda: post(url, {"model": MODEL, "prompt": "again", "max_tokens": 2}).status == 200, 30, "an answer")
