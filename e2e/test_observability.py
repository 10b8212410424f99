"""What a pool under load can be seen to do: every series is declared, and every declared one is seen."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from twinpool.core import protocol
from twinpool.core.metrics.page import DECLARED
from twinpool.demo.client import get, post, stream
from twinpool.demo.scenario import OPERATOR_NAMESPACE, condition, pods, pool, router_url
from twinpool.localcluster.waiting import wait_until
from twinpool.worker.engines.simulated.logic.metrics import FAMILIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric as Family

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[1]
NAME, MODEL = "seen", "simulated-model"

#: Metrics that this pool cannot show, and why.
UNSEEN = {
    "twinpool_router_key_requests_total": "the pool has no API keys",
    "twinpool_router_endpoint_suspect": "no worker failed",
    "twinpool_worker_preflight_outcome": "a group of one pod with one rank has no preflight",
    "twinpool_worker_preflight_bus_bandwidth_bytes_per_second": "the same",
    "twinpool_worker_preflight_collective_seconds": "the same",
    "twinpool_worker_preflight_slowest_link_bytes_per_second": "the same",
}


@dataclass(frozen=True)
class Served:
    """A pool that has answered all kinds of requests."""

    cluster: Cluster
    namespace: str

    def targets(self) -> dict[str, list[str]]:
        """Return the addresses of all ``/metrics`` by component."""
        found = defaultdict(list)
        for role in (*protocol.ROLES, "router"):
            ports = (
                (protocol.ROUTER_ADMIN_PORT,) if role == "router" else (protocol.LAUNCHER_PORT, protocol.ENGINE_PORT)
            )
            for pod in pods(self.cluster, self.namespace, NAME, role):
                found[role] += [f"{pod['status']['podIP']}:{port}" for port in ports]
        arguments = ("-n", OPERATOR_NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=twinpool-operator")
        found["operator"] = [f"{pod['status']['podIP']}:8080" for pod in self.cluster.json(*arguments)["items"]]
        return dict(found)


@pytest.fixture(scope="module")
def served(twinpool: Cluster) -> Iterator[Served]:
    document = yaml.safe_load((ROOT / "examples" / "simulated.yaml").read_text())
    document["metadata"]["name"] = NAME
    document["spec"]["decode"]["replicas"] = 2
    with twinpool.fresh_namespace() as namespace:
        twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(document))
        wait_until(
            lambda: condition(pool(twinpool, namespace, NAME), "Ready").get("status") == "True", 120, "it serves"
        )
        traffic(router_url(twinpool, namespace, NAME))
        yield Served(twinpool, namespace)


def traffic(base: str) -> None:
    """Ask in every way that leaves a trace: streams, whole answers, refusals, and a client that leaves."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "tell me a long story"}], "max_tokens": 24}

    def one(number: int) -> None:
        list(stream(f"{base}/v1/chat/completions", chat))
        assert post(f"{base}/v1/completions", {"model": MODEL, "prompt": f"n {number}", "max_tokens": 4}).status == 200

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(one, range(24)))
    assert post(f"{base}/v1/completions", {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 2}).status == 200
    assert post(f"{base}/v1/completions", {"model": "another", "prompt": "x"}).status == 404
    for number in range(40):  # what clients invent must not become series
        assert post(f"{base}/invented/{number}", {}).status == 404
    leave(base, {**chat, "max_tokens": 2000})


def leave(base: str, body: dict[str, object]) -> None:
    """Begin to read a stream, then hang up."""
    connection = http.client.HTTPConnection(urlsplit(base).netloc, timeout=60)
    with contextlib.closing(connection):
        payload = json.dumps({**body, "stream": True})
        connection.request("POST", "/v1/chat/completions", payload, {"content-type": "application/json"})
        assert connection.getresponse().read(10)


def families(served: Served) -> Iterator[tuple[str, Family]]:
    """Yield every family of every target, with the target."""
    for addresses in served.targets().values():
        for address in addresses:
            for family in text_string_to_metric_families(get(f"http://{address}/metrics")):
                yield address, family


def test_every_series_is_declared_and_every_declared_one_is_seen(served: Served) -> None:
    engine = {f"vllm:{family.name}" for family in FAMILIES}
    seen, values, series = set(), defaultdict(set), defaultdict(int)
    for address, family in families(served):
        if family.name in engine:
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert name in DECLARED, f"{address} exposes {name}, which core/twinpool/core/metrics does not declare"
        declared = DECLARED[name]
        assert (declared.kind, declared.text) == (family.type, family.documentation), name
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "le"}
            assert set(labels) == set(declared.label_names), f"{address}: {sample}"
            series[name, address] += sample.name == name or sample.name.endswith("_count")
            for key, value in labels.items():
                values[name, key].add(value)
            seen.add(name)
    counts = {"workers": 3, "pools": 50, "keys": 0}
    for (name, address), count in series.items():
        assert count <= DECLARED[name].most_series(counts), f"{address} has {count} series of {name}"
    for name, metric in DECLARED.items():
        for label in metric.labels if name not in UNSEEN else ():
            most = label.most * (counts[label.growth] if label.growth else 1)
            found = values[name, label.name]
            if not name.startswith("twinpool_operator_pool"):
                assert len(found) <= most, f"{name} has {len(found)} values of {label.name}: {sorted(found)}"
    assert set(DECLARED) - seen == set(UNSEEN), "a declared metric was not seen, or an excused one was"
