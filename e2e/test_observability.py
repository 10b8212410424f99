"""What a pool under load can be seen to do: every series is declared, and every panel and alert has data.

A Prometheus built from its module scrapes the pool while it is asked. Engines are simulated: their times are invented.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import subprocess
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from monitoring.boards import DASHBOARDS
from monitoring.picture import DARK, LIGHT, Line, draw, named
from monitoring.rules import ALERTS, unit_tests
from twinpool.cli.__main__ import main
from twinpool.core import protocol
from twinpool.core.distance import Place
from twinpool.core.metrics.page import DECLARED
from twinpool.demo.client import get, post, stream
from twinpool.demo.scenario import OPERATOR_NAMESPACE, condition, pods, pool, router_url
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.prometheus import Prometheus, ensure_prometheus, running
from twinpool.localcluster.waiting import wait_until
from twinpool.router.logic.kv_room import KV_CACHE
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
    "twinpool_router_key_tokens_total": "the same",
    "twinpool_router_endpoint_suspect": "no worker failed",
    "twinpool_operator_pool_needed_groups": "the pool does not scale",
    "twinpool_worker_speculation_acceptance_ratio": "the pool does not speculate",
    "twinpool_worker_speculation_tokens_per_step": "the same",
    "twinpool_worker_weights_bytes": "the pool's model is not fetched from a hub",
    "twinpool_worker_weights_total_bytes": "the same",
    "twinpool_worker_kv_tier_size_bytes": "the pool has no KV tiers",
    "twinpool_worker_kv_tier_evicted_bytes_total": "the same",
    "twinpool_worker_kv_tier_token_load_seconds": "the same",
    "twinpool_worker_kv_token_compute_seconds": "the same",
    "twinpool_worker_expert_load_ratio": "the pool has no mixture of experts",
    "twinpool_worker_expert_load_noise_ratio": "the same",
    "twinpool_worker_expert_load_significant": "the same",
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

    def targets(self) -> dict[tuple[tuple[str, str], ...], list[str]]:
        """Return the addresses of all ``/metrics`` of each pod, by the labels that a scrape gives them."""
        found = {}
        for role in (*protocol.ROLES, "router"):
            ports = (
                (protocol.ROUTER_ADMIN_PORT,) if role == "router" else (protocol.LAUNCHER_PORT, protocol.ENGINE_PORT)
            )
            for pod in pods(self.cluster, self.namespace, NAME, role):
                labels = {"namespace": self.namespace, "pool": NAME, "component": role, "pod": pod["metadata"]["name"]}
                found[tuple(labels.items())] = [f"{pod['status']['podIP']}:{port}" for port in ports]
        arguments = ("-n", OPERATOR_NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=twinpool-operator")
        for pod in self.cluster.json(*arguments)["items"]:
            labels = {"namespace": OPERATOR_NAMESPACE, "component": "operator", "pod": pod["metadata"]["name"]}
            found[tuple(labels.items())] = [f"{pod['status']['podIP']}:8080"]
        return found


@pytest.fixture(scope="module")
def served(twinpool: Cluster) -> Iterator[Served]:
    document = yaml.safe_load((ROOT / "examples" / "simulated.yaml").read_text())
    document["metadata"]["name"] = NAME
    document["spec"]["decode"]["replicas"] = 2
    document["spec"]["prefill"] = {"parallelism": {"data": 2}}
    document["spec"].setdefault("engine", {})["kvEvents"] = True
    document["spec"].setdefault("routing", {})["policy"] = "price"
    with twinpool.fresh_namespace() as namespace:
        twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(document))
        wait_until(
            lambda: condition(pool(twinpool, namespace, NAME), "Ready").get("status") == "True", 120, "it serves"
        )
        traffic(router_url(twinpool, namespace, NAME))
        seen = Served(twinpool, namespace)
        wait_until(lambda: foretold(seen), 60, "cached tokens are foretold by KV events")
        yield seen


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


def foretold(served: Served) -> bool:
    """Ask with token ids; return whether the router has compared what it foretold with what the engine reports."""
    base = router_url(served.cluster, served.namespace, NAME)
    assert post(f"{base}/v1/completions", {"model": MODEL, "prompt": list(range(500)), "max_tokens": 4}).status == 200
    (router,) = pods(served.cluster, served.namespace, NAME, "router")
    page = get(f"http://{router['status']['podIP']}:{protocol.ROUTER_ADMIN_PORT}/metrics")
    return "twinpool_router_index_predictions_total{" in page


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
    engine = {KV_CACHE, *(f"vllm:{family.name}" for family in FAMILIES)}
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
    assert set(DECLARED) - seen == set(UNSEEN) & set(DECLARED), "a declared metric was not seen, or an excused one was"


def test_routers_follow_each_rank_of_a_worker_and_name_the_one_that_holds_a_prompt(served: Served) -> None:
    (router,) = pods(served.cluster, served.namespace, NAME, "router")
    address = f"http://{router['status']['podIP']}:{protocol.ROUTER_ADMIN_PORT}"
    found = {entry["role"]: entry for entry in json.loads(get(f"{address}/admin/index"))["endpoints"]}
    host = pods(served.cluster, served.namespace, NAME, "prefill")[0]["status"]["podIP"]
    ports = [f"{host}:{protocol.KV_EVENTS_PORT + rank}" for rank in range(2)]
    assert [(rank["relied"], rank["address"]) for rank in found["prefill"]["ranks"]] == [(True, port) for port in ports]
    assert "ranks" not in found["decode"]
    assert 'twinpool_router_rank_choices_total{role="prefill",by="router"}' in get(f"{address}/metrics")


def test_explain_says_what_takes_the_time_and_nothing_while_nobody_asks(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(served.cluster.kubeconfig))
    monkeypatch.setenv("PATH", f"{Path(served.cluster.kubectl_path).parent}:{os.environ['PATH']}")
    ask = ["explain", NAME, "-n", served.namespace, "-o", "json", "--seconds"]
    assert main([*ask, "5"]) == 1
    assert json.loads(capsys.readouterr().out)["finding"]["cause"] == "not enough data"

    stop, base = threading.Event(), router_url(served.cluster, served.namespace, NAME)

    def load() -> None:
        while not stop.is_set():
            traffic(base)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        assert main([*ask, "12"]) == 0
    finally:
        stop.set()
        loading.join(120)
    said = json.loads(capsys.readouterr().out)
    seen, found = said["observation"], said["finding"]
    assert found["cause"] != "not enough data"
    assert all(found[key] for key in ("stage", "resource", "technique", "cost", "evidence", "caution"))
    assert seen["simulated"]
    assert all(seen["stages"][stage] > 0 for stage in ("prefill", "pull", "decode start"))
    assert seen["pulled_bytes"] > 0
    assert len(seen["workers"]) == 3
    assert all(worker["seconds_per_token"] for worker in seen["workers"] if worker["role"] == "decode")


# What Prometheus makes of it.


@pytest.fixture(scope="session")
def prometheus_binaries(request: pytest.FixtureRequest) -> Path:
    """Prometheus and promtool; building them shows its progress even where output is captured."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return ensure_prometheus(Progress())


@pytest.fixture(scope="module")
def prometheus(
    served: Served, prometheus_binaries: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A server that has scraped every target of the pool while it was asked."""
    with running(prometheus_binaries, tmp_path_factory.mktemp("prometheus"), served.targets()) as server:
        up = sum(len(addresses) for addresses in served.targets().values())
        wait_until(lambda: len(server.query("up == 1")) == up, 60, "every target is scraped")
        traffic(router_url(served.cluster, served.namespace, NAME))
        name = f"{protocol.PLURAL}.{protocol.GROUP}/{NAME}"
        served.cluster.kubectl("-n", served.namespace, "annotate", name, "example.com/look=again")
        for counter in ("twinpool_router_requests_total", "twinpool_operator_reaction_seconds_count"):
            wait_until(lambda: any(values(server, f"increase({counter}[1m]) > 0")), 60, f"{counter} grows")  # noqa: B023
        yield server


def filled(expression: str, namespace: str) -> str:
    """Return a query of a dashboard with its variables filled in."""
    values = {"$__rate_interval": "1m", "$namespace": namespace, "$pool": NAME}
    for variable, value in values.items():
        expression = expression.replace(variable, value)
    return expression


def values(server: Prometheus, expression: str) -> list[float]:
    """Return what a query gives now, without what is no number."""
    found = [series.points[-1][1] for series in server.query(expression)]
    return [value for value in found if math.isfinite(value)]


def test_every_panel_has_data(served: Served, prometheus: Prometheus) -> None:
    silent, talking = [], []
    for board in DASHBOARDS:
        for panel in board.panels:
            for query in panel.queries:
                found = values(prometheus, filled(query.expr, served.namespace))
                name = f"{board.title} / {panel.title} / {query.legend}: {query.expr}"
                (talking if found else silent).append((name, panel.empty))
    missing = [name for name, excuse in silent if not excuse]
    assert not missing, "no data in:\n" + "\n".join(missing)
    assert not [name for name, excuse in talking if excuse], "excused for having no data, and has some"


@pytest.mark.skipif("TWINPOOL_PICTURES" not in os.environ, reason="make pictures draws them")
def test_pictures(served: Served, prometheus: Prometheus) -> None:
    """Draw every dashboard, light and dark, from what Prometheus has seen of the pool under load."""
    folder = Path(os.environ["TWINPOOL_PICTURES"])
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    while time.time() < begin + 60:
        traffic(router_url(served.cluster, served.namespace, NAME))
    end = time.time()
    for board in DASHBOARDS:
        lines = {
            panel.title: [
                Line(named(query.legend, series.labels), series.points, query.wish)
                for query in panel.queries
                for series in prometheus.query_range(filled(query.expr, served.namespace), end - 60, end, 1)
            ]
            for panel in board.panels
        }
        assert any(lines.values())
        for theme, name in ((LIGHT, "light"), (DARK, "dark")):
            picture = draw(board, lines, theme, "simulated engines: times and bytes are invented")
            (folder / f"{board.uid}-{name}.svg").write_text(picture)


def test_every_alert_can_be_judged(prometheus: Prometheus) -> None:
    for alert in ALERTS:
        found = values(prometheus, alert.value)
        assert found or alert.empty, f"{alert.name} has no data: {alert.value}"
        prometheus.query(alert.expr)


def test_alerts_fire_when_they_must_and_only_then(prometheus_binaries: Path, tmp_path: Path) -> None:
    tests = tmp_path / "tests.yaml"
    tests.write_text(yaml.safe_dump(unit_tests(str(ROOT / "charts" / "twinpool" / "files" / "alerts.yaml"))))
    done = subprocess.run(
        [prometheus_binaries / "promtool", "test", "rules", tests], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_explain_shows_what_routers_are_at_and_how_far_workers_are(
    served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(served.cluster.kubeconfig))
    monkeypatch.setenv("PATH", f"{Path(served.cluster.kubectl_path).parent}:{os.environ['PATH']}")

    def places() -> list[Place | None]:
        workers = [pod for role in protocol.ROLES for pod in pods(served.cluster, served.namespace, NAME, role)]
        said = [(pod["metadata"].get("annotations") or {}).get(protocol.ANNOTATION_PLACE, "") for pod in workers]
        return [Place.from_json(text) for text in said]

    wait_until(lambda: all(places()), 60, "the operator has told where each leader is")
    base = router_url(served.cluster, served.namespace, NAME)
    ask = ["explain", NAME, "-n", served.namespace, "--routing", "--seconds", "0", "-o", "json"]
    assert main(ask) == 0  # choices are kept from here on
    capsys.readouterr()
    body = {"model": MODEL, "prompt": "which worker will it be?", "max_tokens": 2, "prompt_cache_key": "mine"}
    assert post(f"{base}/v1/completions", body).status == 200
    assert main(ask) == 0
    ((router, shown),) = json.loads(capsys.readouterr().out).items()
    assert shown["debug"]["policy"] == "price", router
    kept = [choice for process in shown["decisions"]["processes"] for choice in process["decisions"]]
    assert {choice["choice"] for choice in kept} == {"prefill", "decode"}
    assert main(ask[:-2]) == 0
    assert "last choices" in capsys.readouterr().out
