"""``twinpool live``: frames, the page's server, and what a browser makes of it."""

from __future__ import annotations

import dataclasses
import http.client
import http.server
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.cli.forward import Forwards
from twinpool.cli.kubectl import Kubectl
from twinpool.cli.live import watcher as watching
from twinpool.cli.live.frame import Snapshot, frame
from twinpool.cli.live.server import Server
from twinpool.cli.live.watcher import OBJECTS_EVERY, WINDOW, Watcher
from twinpool.cli.scrape import parse
from twinpool.core.errors import TwinpoolError
from twinpool.core.metrics.page import DECLARED
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.observed import Observed, PodView

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POOL: dict[str, Any] = {
    "metadata": {"name": "llama", "namespace": "team"},
    "spec": {"model": {"name": "m"}, "prefill": {}, "decode": {}, "objectives": {"ttft": "800ms"}},
    "status": {
        "ratio": "1:2",
        "conditions": [
            {"type": "Ready", "status": "True", "reason": "Serving", "message": "serves", "lastTransitionTime": "x"}
        ],
    },
}
ROUTER = """
twinpool_router_requests_total{{route="completions",code="200"}} {served}
twinpool_router_requests_total{{route="completions",code="503"}} 4
twinpool_router_handoffs_total{{outcome="remote",reason=""}} {served}
twinpool_router_requests_waiting 3
twinpool_router_requests_in_flight{{worker="d1-0",role="decode"}} 2
twinpool_router_endpoint_suspect{{worker="d2-0",role="decode"}} 1
twinpool_router_time_to_first_token_seconds_bucket{{route="completions",le="1.0"}} {served}
twinpool_router_time_to_first_token_seconds_bucket{{route="completions",le="+Inf"}} {served}
"""
ENGINE = """
vllm:generation_tokens_total {tokens}
vllm:kv_cache_usage_perc 0.25
"""


def pod(group: str, role: str, **changes: Any) -> PodView:
    made = PodView(f"{group}-0", role, "" if role == "router" else group, "r1", phase="Running", ready=True)
    return dataclasses.replace(made, **changes)


def observed(*pods: PodView, pool: dict[str, Any] = POOL) -> Observed:
    return Observed(InferencePool.model_validate(pool), (), pods)


PODS = (
    pod("r", "router"),
    pod("p1", "prefill"),
    pod("d1", "decode"),
    pod("d1", "decode", name="d1-1", rank=1, draining=True),
    pod("d2", "decode", ready=False),
)


def snapshot(at: float, served: int, tokens: int) -> Snapshot:
    engines = {"d1-0": parse(ENGINE.format(tokens=tokens)), "p1-0": parse(ENGINE.format(tokens=0))}
    return Snapshot(at, observed(*PODS), {"r-0": parse(ROUTER.format(served=served))}, engines)


def test_a_frame_says_what_happens_now() -> None:
    seen = frame(snapshot(100.0, 10, 500), snapshot(110.0, 60, 1500))
    numbers = seen["numbers"]
    assert (seen["ready"], seen["ratio"], seen["window"]) == (True, "1:2", 10.0)
    assert seen["objectives"] == {"ttft": 0.8, "itl": None}
    assert (numbers["requests"], numbers["failed"], numbers["remote"], numbers["waiting"]) == (5.0, 0.0, 5.0, 3.0)
    assert numbers["tokens"] == 100.0
    assert numbers["ttft"] == [0.5, 0.95]
    assert numbers["itl"] == [None, None]
    groups = {group["name"]: group for group in seen["groups"]}
    assert {name: group["state"] for name, group in groups.items()} == {
        "p1": "serving", "d1": "draining", "d2": "starting"
    }  # fmt: skip
    assert (groups["d1"]["requests"], groups["d1"]["kv"], groups["d2"]["kv"]) == (2.0, 0.25, None)
    assert groups["d2"]["suspect"]
    assert seen["routers"] == [{"name": "r-0", "ready": True, "answers": True}]
    assert seen["silent"] == []


@pytest.mark.parametrize("text", [ROUTER.format(served=1), ENGINE.format(tokens=1)])
def test_what_a_frame_reads_is_what_is_declared(text: str) -> None:
    for name, samples in parse(text).samples.items():
        metric = DECLARED.get(name) or DECLARED.get(name.removesuffix("_bucket"))
        if metric is None:
            assert name.startswith("vllm:")
            continue
        assert all({key for key, _ in labels} - {"le"} == set(metric.label_names) for labels in samples), name


def test_the_first_frame_has_no_rates() -> None:
    first = snapshot(100.0, 10, 500)
    assert frame(first, first)["numbers"]["requests"] == 0.0


def test_what_does_not_answer_is_named_and_a_new_router_counts_from_its_second_page() -> None:
    bare = {key: value for key, value in POOL.items() if key != "status"}
    before = Snapshot(0.0, observed(*PODS, pool=bare))
    seen = frame(before, Snapshot(5.0, observed(*PODS, pool=bare), {"r-0": parse(ROUTER.format(served=50))}))
    assert seen["silent"] == ["d1-0", "p1-0"]
    assert seen["numbers"]["requests"] == 0.0
    assert not seen["ready"]
    assert "operator" in seen["message"]


class Pages:
    """Pods' pages without kubectl."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self.served = 0

    def keep(self, pods: set[str]) -> None:
        self.kept = pods

    def page(self, pod: str, _: int, path: str) -> str | None:
        assert path == "/metrics"
        self.served += 10
        answers = {"r-0": ROUTER.format(served=self.served), "d1-0": "<html>"}
        return answers.get(pod)


def test_the_watcher_keeps_a_window_and_asks_for_objects_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def observe(_: object, name: str) -> tuple[Observed, dict[str, Any]]:
        asked.append(name)
        return observed(*PODS), {}

    monkeypatch.setattr(watching, "observe", observe)
    pages = Pages()
    seen = Watcher(Kubectl(), pages, "llama")  # type: ignore[arg-type]
    for second in range(31):
        seen.look(float(second))
    assert len(asked) == 1 + 30 // OBJECTS_EVERY
    assert pages.kept == {item.name for item in PODS}
    assert seen.frame["window"] == WINDOW
    assert seen.frame["silent"] == ["d1-0", "p1-0"], "what is no page of metrics is no answer"


def test_a_cluster_that_cannot_be_asked_leaves_the_last_frame_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Watcher(Kubectl(), Pages(), "llama")  # type: ignore[arg-type]

    def observe(*_: object) -> Any:
        seen.stop()
        raise TwinpoolError("the cluster is away", "wait")

    monkeypatch.setattr(watching, "observe", observe)
    seen.run()
    assert "the cluster is away" in seen.problem


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Kubectl]:
    """Make a kubectl of a shell script."""

    def make(script: str) -> Kubectl:
        path = tmp_path / "kubectl"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        return Kubectl("team")

    return make


def test_a_pods_page_comes_over_a_forwarded_port_which_is_kept(kubectl: Callable[[str], Kubectl]) -> None:
    with Server(0, Watcher(Kubectl(), Pages(), "x")) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        line = f"Forwarding from 127.0.0.1:{server.server_address[1]} -> 8081"
        with Forwards(kubectl(f'echo "{line}"; exec sleep 60')) as forwards:
            page = forwards.page("r-0", 8081, "/")
            assert page is not None
            assert "Twinpool" in page
            assert forwards.page("r-0", 8081, "/frame") is not None
            assert len(forwards._open) == 1
            assert forwards.page("r-0", 8081, "/nothing") is None, "an error is no page"
            assert not forwards._open
            forwards.page("r-0", 8081, "/")
            forwards.keep(set())
            assert not forwards._open
        server.shutdown()
        thread.join()


def test_a_pod_that_cannot_be_reached_has_no_page(kubectl: Callable[[str], Kubectl]) -> None:
    with Forwards(kubectl("echo 'error: unable to forward port' >&2; exit 1")) as forwards:
        assert forwards.page("r-0", 8081, "/") is None


class Still:
    """A watcher that shows one frame."""

    def __init__(self, shown: dict[str, Any], problem: str = "") -> None:
        self.frame, self.problem = shown, problem


@pytest.fixture
def served() -> Iterator[Callable[[Still], Server]]:
    started: list[tuple[Server, threading.Thread]] = []

    def serve(still: Still) -> Server:
        server = Server(0, still)  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        started.append((server, thread))
        return server

    yield serve
    for server, thread in started:
        server.shutdown()
        thread.join()
        server.server_close()


def ask(server: Server, path: str, host: str = "") -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_page_and_frame_are_served_to_this_machine_alone(served: Callable[[Still], Server]) -> None:
    server = served(Still({"pool": "llama"}, "away"))
    status, page, headers = ask(server, "/")
    assert (status, headers["Content-Security-Policy"].split(";")[0]) == (200, "default-src 'none'")
    assert "http:" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing is loaded from elsewhere"
    assert json.loads(ask(server, "/frame")[1]) == {"problem": "away", "frame": {"pool": "llama"}}
    assert ask(server, "/nothing")[0] == 404
    assert ask(server, "/frame", host="localhost:1")[0] == 200
    assert ask(server, "/frame", host="evil.example:1")[0] == 403
    with pytest.raises(TwinpoolError, match="--port"):
        Server(server.server_address[1], server.watcher)


def test_a_browser_shows_the_pool(
    served: Callable[[Still], Server], browse: Callable[..., str], tmp_path: Path
) -> None:
    server = served(Still(frame(snapshot(100.0, 10, 500), snapshot(110.0, 60, 1500))))
    page = browse(server.url, "--dump-dom")
    assert "llama: Twinpool" in page
    for words in ("Ready", "prefill to decode 1:2", "5.00", "500 ms", "objective 800 ms", "draining", "25.0 %"):
        assert words in page, words
    assert page.count("animateMotion") > 2, "requests move"
    browse(server.url, f"--screenshot={tmp_path / 'live.png'}")
    assert (tmp_path / "live.png").stat().st_size > 20_000


def test_a_browser_shows_what_is_wrong(served: Callable[[Still], Server], browse: Callable[..., str]) -> None:
    page = browse(served(Still({}, "the API server does not answer")).url, "--dump-dom")
    assert "the API server does not answer" in page


def test_a_question_over_a_forwarded_port_has_its_answer_whatever_its_status(
    kubectl: Callable[[str], Kubectl],
) -> None:
    class Echo(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200 if self.path == "/v1" else 503)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        line = f"Forwarding from 127.0.0.1:{server.server_address[1]} -> 8000"
        with Forwards(kubectl(f'echo "{line}"; exec sleep 60')) as forwards:
            assert forwards.post("r-0", 8000, "/v1", b"{}", 10.0) == (200, "{}")
            assert forwards.post("r-0", 8000, "/full", b"why", 10.0) == (503, "why")
            server.shutdown()
            server.server_close()
            thread.join()
            assert forwards.post("r-0", 8000, "/v1", b"{}", 10.0) is None
            assert not forwards._open
    with Forwards(kubectl("exit 1")) as forwards:
        assert forwards.post("r-0", 8000, "/v1", b"{}", 10.0) is None
