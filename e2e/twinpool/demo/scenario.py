"""The steps of the demonstration on a cluster that runs: install Twinpool, make a pool, ask it, prove the handoff."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from twinpool.core import protocol
from twinpool.core.errors import TwinpoolError
from twinpool.demo.client import get, stream
from twinpool.demo.proof import HandoffCounters
from twinpool.localcluster.waiting import WaitTimeout, wait_until

if TYPE_CHECKING:
    from twinpool.demo.phases import Phases
    from twinpool.localcluster.cluster import Cluster

ROOT = Path(__file__).resolve().parents[3]
OPERATOR_NAMESPACE = "twinpool-system"
QUESTION = "What is the capital of France?"


class DemoFailed(TwinpoolError):
    """A step of the demonstration did not come true; the message says which and what was seen."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One engine to show: the manifest, the pool's name in it, its model, and seconds until it must be ready.

    ``meaning`` says what the demonstration has shown when it went well.
    """

    manifest: Path
    pool: str
    model: str
    patience: float
    meaning: str


CHOICES = {
    "vllm": Choice(
        ROOT / "examples" / "smollm2.yaml",
        "smollm2",
        "smollm2-135m-instruct",
        600,
        "The prompt was read by the prefill worker, its KV cache was handed over, and decode computed none of it.",
    ),
    "simulated": Choice(
        ROOT / "examples" / "simulated.yaml",
        "simulated",
        "simulated-model",
        120,
        "Simulated engines: the words, times and bytes are invented; control plane, router and protocol are real.",
    ),
}


def install_twinpool(cluster: Cluster, phases: Phases) -> None:
    """Apply CRD and operator, and wait until the operator is available."""
    for folder in ("crds", "deploy"):
        done = cluster.kubectl("apply", "--server-side", "-f", str(ROOT / folder))
        phases.say(f"kubectl apply --server-side -f {folder}/\n{done.stdout.strip()}")
    cluster.kubectl("wait", "--for=condition=Established", f"crd/{protocol.PLURAL}.{protocol.GROUP}", "--timeout=30s")
    _available(cluster, OPERATOR_NAMESPACE, "twinpool-operator", 90)


def _available(cluster: Cluster, namespace: str, deployment: str, timeout: float) -> None:
    try:
        cluster.kubectl(
            "-n",
            namespace,
            "wait",
            "--for=condition=Available",
            f"deployment/{deployment}",
            f"--timeout={timeout:.0f}s",
            timeout=timeout + 10,
        )
    except TwinpoolError as error:
        pods = cluster.kubectl("-n", namespace, "describe", "pods", check=False).stdout
        raise DemoFailed(f"{deployment} is not available: {error}", f"look at its pods:\n{pods[-3000:]}") from None


def make_pool(cluster: Cluster, choice: Choice, namespace: str, phases: Phases) -> None:
    """Apply the pool and show its line of ``kubectl get`` whenever it changes, until it is ready."""
    cluster.kubectl("-n", namespace, "apply", "-f", str(choice.manifest))
    phases.say(choice.manifest.read_text().strip())
    phases.say(f"\nkubectl apply -f {choice.manifest.relative_to(ROOT)}\nkubectl get tpool -w")
    shown: list[str] = []

    def ready() -> bool:
        text = cluster.kubectl("-n", namespace, "get", protocol.SHORT_NAME, choice.pool, check=False).stdout
        header, _, line = text.strip().partition("\n")
        without_age = line.rsplit(maxsplit=1)[0] if line else ""
        if without_age and without_age not in shown:
            phases.say(line if shown else f"{header}\n{line}")
            shown.append(without_age)
        return condition(pool(cluster, namespace, choice.pool), "Ready").get("status") == "True"

    try:
        wait_until(ready, choice.patience, f"pool {choice.pool} is ready", interval=0.3)
    except WaitTimeout as error:
        told = cluster.kubectl("-n", namespace, "describe", protocol.SHORT_NAME, choice.pool, check=False).stdout
        raise DemoFailed(str(error), f"read its conditions:\n{told[-4000:]}") from None


def pool(cluster: Cluster, namespace: str, name: str) -> Any:
    """Return the pool as the API server holds it."""
    return cluster.json("-n", namespace, "get", f"{protocol.PLURAL}.{protocol.GROUP}", name)


def condition(pool: Any, kind: str) -> dict[str, Any]:
    """Return one condition of a pool, or an empty one when it is not there yet."""
    for entry in pool.get("status", {}).get("conditions", []):
        if entry["type"] == kind:
            found: dict[str, Any] = entry
            return found
    return {}


def pods(cluster: Cluster, namespace: str, pool_name: str, role: str) -> list[dict[str, Any]]:
    """Return the live pods of one role of a pool that have an address."""
    selector = f"{protocol.LABEL_POOL}={pool_name},{protocol.LABEL_ROLE}={role}"
    items: list[dict[str, Any]] = cluster.json("-n", namespace, "get", "pods", "-l", selector)["items"]
    return [item for item in items if item["status"].get("podIP") and not item["metadata"].get("deletionTimestamp")]


def is_ready(pod: Any) -> bool:
    """Return whether a Service would send requests to a pod."""
    conditions = {entry["type"]: entry["status"] for entry in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def router_url(cluster: Cluster, namespace: str, pool_name: str) -> str:
    """Return the address of one router pod, a ready one if there is one, which this machine reaches directly."""
    found = pods(cluster, namespace, pool_name, "router")
    chosen = next(filter(is_ready, found), found[0])
    return f"http://{chosen['status']['podIP']}:{protocol.ROUTER_PORT}"


def decode_metrics(cluster: Cluster, namespace: str, pool_name: str) -> str:
    """Return the Prometheus text of all decode engines of a pool."""
    addresses = [pod["status"]["podIP"] for pod in pods(cluster, namespace, pool_name, "decode")]
    return "\n".join(get(f"http://{address}:{protocol.ENGINE_PORT}/metrics") for address in addresses)


def ask(base: str, model: str, question: str, show: TextIO | None = None, max_tokens: int = 48) -> str:
    """Ask over the router, stream the answer to ``show``, and return its whole text."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
    }
    answer = ""
    for event in stream(f"{base}/v1/chat/completions", body):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or ""
            answer += piece
            if show is not None:
                show.write(piece)
                show.flush()
    return answer


def question_and_proof(cluster: Cluster, choice: Choice, namespace: str, phases: Phases) -> None:
    """Ask the question, print the answer as it streams, and print what the decode engine counted meanwhile.

    Raises
    ------
    DemoFailed
        When the answer does not hold "Paris", or the counters say that the KV cache was not handed over.
    """
    base = router_url(cluster, namespace, choice.pool)
    before = HandoffCounters.read(decode_metrics(cluster, namespace, choice.pool))
    phases.say(f"POST {base}/v1/chat/completions  (streamed)\n")
    phases.stream.write(f"             > {QUESTION}\n             < ")
    begin = time.monotonic()
    answer = ask(base, choice.model, QUESTION, show=phases.stream)
    phases.stream.write(f"\n\n           {time.monotonic() - begin:.1f} s\n")
    counted = HandoffCounters.read(decode_metrics(cluster, namespace, choice.pool)).since(before)
    phases.say(
        "\nWhat the decode engine counted for this request (its own /metrics):\n"
        f"  prompt tokens that came by KV transfer   {counted.transferred:8.0f}\n"
        f"  prompt tokens from its own cache         {counted.cached:8.0f}\n"
        f"  prompt tokens that it computed itself    {counted.computed:8.0f}\n"
        f"  bytes that NIXL moved                    {counted.bytes_moved:8.0f}\n"
        f"  failed transfers                         {counted.failed:8.0f}"
    )
    if "Paris" not in answer:
        raise DemoFailed(
            f"the answer does not hold Paris: {answer!r}", "this is a bug, please report it with the output"
        )
    if not counted.handed_over():
        raise DemoFailed(
            f"the KV cache was not handed over: {counted}",
            f"look at the engines: kubectl -n {namespace} logs -l {protocol.LABEL_POOL}={choice.pool}",
        )
    phases.say(f"\n{choice.meaning}")


def how_to_go_on(cluster: Cluster, choice: Choice, namespace: str) -> str:
    """Return what to type next: ask, watch, put load on it, see what it waits for, stop."""
    base = router_url(cluster, namespace, choice.pool)
    body = json.dumps(
        {"model": choice.model, "messages": [{"role": "user", "content": "Tell me a joke"}], "stream": True}
    )
    programs = f"{Path(cluster.kubectl_path).parent}:{Path(sys.executable).parent}"
    return (
        "It keeps serving.\n"
        f"  ask    curl -N {base}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
        f"  watch  export KUBECONFIG={cluster.kubeconfig} PATH={programs}:$PATH\n"
        f"         kubectl get tpool,pods    kubectl describe tpool {choice.pool}"
        f"    kubectl logs -l {protocol.LABEL_ROLE}=decode\n"
        f"         twinpool live {choice.pool} -n {namespace}   # a page; twinpool top {choice.pool} in the terminal\n"
        f"         curl {base.rsplit(':', 1)[0]}:{protocol.ROUTER_ADMIN_PORT}/metrics\n"
        f"  load   twinpool bench {base} --rate 2 --seconds 60 --prompt-tokens 128 --output-tokens 32\n"
        f"  slow?  twinpool explain {choice.pool} -n {namespace}   # while the load is on\n"
        "  stop   make down"
    )
