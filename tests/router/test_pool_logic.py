"""Endpoints, choices, books, suspicion, health, headers, errors and numbers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue
from twinpool.router.logic import metrics
from twinpool.router.logic.breaker import LONGEST_SECONDS, SLOW_START_SECONDS, TRIAL_SECONDS, Breaker
from twinpool.router.logic.endpoints import Endpoint, directory, endpoints_of_file, endpoints_of_workers, worker_of_pod
from twinpool.router.logic.errors import Refusal, Refused, error_body, error_event
from twinpool.router.logic.headers import forward
from twinpool.router.logic.health import Health, Probe, judge
from twinpool.router.logic.ledger import Ledger


def endpoint(name: str, role: str = "decode", revision: str = "r", admitted: bool = True) -> Endpoint:
    return Endpoint(name, role, "h", 1, revision, pod=name, admitted=admitted)  # type: ignore[arg-type]


def pod(**changes: Any) -> dict[str, Any]:
    labels = {protocol.LABEL_ROLE: "prefill", protocol.LABEL_REVISION: "r1", protocol.LABEL_GROUP: "g"}
    result: dict[str, Any] = {
        "metadata": {"name": "p-0", "uid": "u", "labels": {**labels, **changes.pop("labels", {})}},
        "spec": {
            "containers": [
                {"name": "side"},
                {
                    "name": "engine",
                    "ports": [{"name": "x", "containerPort": 1}, {"name": "engine", "containerPort": 8000}],
                },
            ]
        },
        "status": {
            "podIP": "10.0.0.7",
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}],
            "containerStatuses": [{"name": "side", "restartCount": 9}, {"name": "engine", "restartCount": 2}],
        },
    }
    for key, value in changes.items():
        part, _, name = key.partition("__")
        result[part] = {**result[part], name: value}
    return result


def endpoint_of_pod(pod: dict[str, Any]) -> Endpoint | None:
    """Return the endpoint of a pod that is alone in its group."""
    worker = worker_of_pod(pod)
    found = endpoints_of_workers([] if worker is None else [worker])
    return found[0] if found else None


def test_a_pod_is_wanted_when_its_containers_are_ready_for_its_ready_waits_for_the_routers() -> None:
    expected = Endpoint("u/2", "prefill", "10.0.0.7", 8000, "r1", "g", "p-0", wanted=True, uid="u")
    assert endpoint_of_pod(pod()) == expected


def test_without_the_gate_there_is_a_time_when_a_pod_is_ready_and_no_router_uses_it() -> None:
    # The gate exists for this time: a rollout that took the last old group away now would leave nobody to ask.
    found = endpoint_of_pod(pod(status__conditions=[{"type": kind, "status": "True"} for kind in READY]))
    assert found is not None
    assert found.wanted
    assert not directory([found]).prefill, "its own probe has not answered yet"
    assert not directory([found]).decode


READY = ("Ready", "ContainersReady")
MARK = {protocol.ANNOTATION_DRAINING: "2026-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata__deletionTimestamp": "2026-01-01T00:00:00Z"},
        {"metadata__annotations": MARK},
        {"status__phase": "Failed"},
    ],
)
def test_a_rank_that_leaves_takes_its_group_with_it(changes: dict[str, Any]) -> None:
    follower = pod(labels={protocol.LABEL_POD_INDEX: "1"}, **changes)
    other = pod(labels={protocol.LABEL_GROUP: "h"}, metadata__uid="v")
    other["metadata"]["labels"][protocol.LABEL_GROUP] = "h"
    workers = [worker_of_pod(item) for item in (pod(), follower, other)]
    found = endpoints_of_workers(worker for worker in workers if worker is not None)
    assert [(e.group, e.wanted, e.draining) for e in found] == [("g", False, True), ("h", True, False)]


def test_a_restarted_engine_is_another_endpoint() -> None:
    changed = endpoint_of_pod(pod(status__containerStatuses=[{"name": "engine", "restartCount": 3}]))
    assert changed is not None
    assert changed.id == "u/3"
    unknown = endpoint_of_pod(pod(status__containerStatuses=None))
    assert unknown is not None
    assert unknown.id == "u/0"


def ranked(index: int, data: int = 4, nodes: int = 2, **changes: Any) -> dict[str, Any]:
    """Return a pod of a group of ``data`` ranks over ``nodes`` pods."""
    config = protocol.WorkerConfig("p", "n", "prefill", "r", "vllm", "m", "m", data=data, nodes=nodes)
    found = pod(labels={protocol.LABEL_POD_INDEX: str(index)}, metadata__uid=f"u{index}", **changes)
    found["metadata"]["labels"][protocol.LABEL_POD_INDEX] = str(index)
    found["spec"]["containers"][1]["env"] = [
        {"name": "OTHER", "value": "x"},
        {"name": protocol.WORKER_CONFIG_ENV, "value": config.to_json()},
    ]
    return found


def group(*pods: dict[str, Any]) -> Endpoint:
    """Return the only endpoint of these pods."""
    workers = (worker_of_pod(each) for each in pods)
    (found,) = endpoints_of_workers(worker for worker in workers if worker is not None)
    return found


def test_ranks_are_where_their_pods_are() -> None:
    spread = group(ranked(0), ranked(1, status__podIP="10.0.0.8"))
    assert (spread.ranks, spread.rank_hosts) == (4, ("10.0.0.7", "10.0.0.7", "10.0.0.8", "10.0.0.8"))
    assert group(ranked(0)).rank_hosts == ("10.0.0.7", "10.0.0.7", "", ""), "the other pod is not there"
    assert group(ranked(0), ranked(1, status__podIP=None)).rank_hosts[2:] == ("", "")
    together = group(ranked(0, data=2, nodes=1))
    assert (together.ranks, together.rank_hosts) == (2, ())
    tensor = group(ranked(0, data=1), ranked(1, data=1))
    assert (tensor.ranks, tensor.rank_hosts) == (1, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"status__podIP": None},
        {"status__phase": "Failed"},
        {"spec__containers": []},
        {"labels": {protocol.LABEL_ROLE: "router"}},
        {"labels": {protocol.LABEL_POD_INDEX: "1"}},
        {"metadata__labels": None},
    ],
)
def test_pods_that_are_no_endpoints(changes: dict[str, Any]) -> None:
    assert endpoint_of_pod(pod(**changes)) is None
    assert endpoint_of_pod({}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"status__conditions": [{"type": "ContainersReady", "status": "False"}]},
        {"metadata__annotations": MARK},
        {"status__conditions": None},
        {"metadata__deletionTimestamp": "2026-01-01T00:00:00Z"},
    ],
)
def test_pods_that_exist_but_are_not_wanted(changes: dict[str, Any]) -> None:
    found = endpoint_of_pod(pod(**changes))
    assert found is not None
    assert not found.wanted


def test_prefill_without_decode_of_its_revision_is_not_used() -> None:
    found = directory(
        [
            endpoint("p1", "prefill"),
            endpoint("p2", "prefill", "x"),
            endpoint("d1"),
            endpoint("d2", revision="y"),
            endpoint("d3", revision="x", admitted=False),
        ]
    )
    assert [e.id for e in found.prefill] == ["p1"]
    assert [e.id for e in found.decode] == ["d1", "d2"]
    assert {r: [e.id for e in es] for r, es in found.decode_by_revision.items()} == {"r": ["d1"], "y": ["d2"]}
    assert set(found.known) == {"p1", "p2", "d1", "d2", "d3"}


def test_a_static_list() -> None:
    found = endpoints_of_file([{"role": "decode", "host": "a", "port": 7}, {"role": "prefill", "host": "b"}], "f")
    assert [(e.id, e.port, e.wanted) for e in found] == [("a:7", 7, True), ("b:8000", 8000, True)]
    (told,) = endpoints_of_file([{"role": "decode", "host": "a", "kvEvents": 5557, "kvReplay": 5577}], "f")
    assert (told.events, told.replay, told.ranks) == (5557, 5577, 1)
    (spread,) = endpoints_of_file([{"role": "decode", "host": "a", "ranks": 2, "rankHosts": ["a", "b"]}], "f")
    assert (spread.ranks, spread.rank_hosts) == (2, ("a", "b"))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "JSON list"),
        ([1], "entry 0 is not an object"),
        ([{"role": "router", "host": "a"}], "role is 'router'"),
        ([{"role": "decode"}], "must be strings"),
        ([{"role": "decode", "host": "a", "revision": 1}], "must be strings"),
        ([{"role": "decode", "host": "a", "port": 0}], "port is 0"),
        ([{"role": "decode", "host": "a", "port": True}], "port is True"),
        ([{"role": "decode", "host": "a", "port": "1"}], "port is '1'"),
        ([{"role": "decode", "host": "a", "kvEvents": -1}], "kvEvents is -1"),
        ([{"role": "decode", "host": "a", "kvReplay": "2"}], "kvReplay is '2'"),
        ([{"role": "decode", "host": "a", "ranks": 0}], "ranks is 0"),
        ([{"role": "decode", "host": "a", "ranks": True}], "ranks is True"),
        ([{"role": "decode", "host": "a", "ranks": "2"}], "ranks is '2'"),
        ([{"role": "decode", "host": "a", "ranks": 2, "rankHosts": ["b"]}], "one address for each"),
        ([{"role": "decode", "host": "a", "rankHosts": "b"}], "rankHosts is 'b'"),
        ([{"role": "decode", "host": "a", "rankHosts": [1]}], "rankHosts is"),
    ],
)
def test_a_static_list_with_a_mistake(document: Any, words: str) -> None:
    with pytest.raises(InvalidValue, match=words):
        endpoints_of_file(document, "f")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100), st.booleans())), st.randoms())
def test_the_books_balance_in_any_order(entries: list[tuple[int, int, bool]], order: Any) -> None:
    ledger = Ledger()
    tickets = []
    for number, tokens, hold in entries:
        name = f"e{number}"
        if hold:
            tickets.append((ledger.pulled, ledger.hold(name)))
        else:
            ticket = ledger.admit(name, tokens, tokens / 7)
            tickets.append((ledger.close, ticket))
            if tokens % 2:
                ledger.prefilled(ticket)
                ledger.prefilled(ticket)
    for number in range(4):
        mine = [e for e in entries if e[0] == number]
        load = ledger[f"e{number}"]
        assert load.tokens == sum(t for _, t, hold in mine if not hold)
        assert load.requests == sum(not hold for _, _, hold in mine)
        assert load.backlog == pytest.approx(sum(t / 7 for _, t, hold in mine if not hold and not t % 2), abs=1e-4)
        assert load.unpulled == sum(hold for _, _, hold in mine)
    order.shuffle(tickets)
    for close, ticket in tickets:
        close(ticket)
        close(ticket)
    assert ledger.items() == []


def test_suspicion_grows_ends_and_is_forgiven() -> None:
    breaker = Breaker()
    breaker.succeeded("a", 0.0)
    assert "a" not in breaker.suspects(0.0)
    breaker.failed("a", 0.0)
    assert "a" in breaker.suspects(0.4)
    assert "a" not in breaker.suspects(0.6)
    for _ in range(10):
        breaker.failed("a", 1.0)
    assert "a" in breaker.suspects(1.0 + LONGEST_SECONDS - 0.1)
    assert "a" not in breaker.suspects(1.0 + LONGEST_SECONDS + 0.1)
    breaker.succeeded("a", 1.0)
    assert "a" not in breaker.suspects(1.1)
    breaker.failed("b", 1.0)
    breaker.keep({"a"}, (), 1.0)
    assert not breaker.suspects(1.0)


def avoided_times(breaker: Breaker, endpoint: str, now: float, tries: int = 1000) -> int:
    rng = random.Random(1)
    return sum(endpoint in breaker.avoided(now, rng) for _ in range(tries))


def test_one_request_at_a_time_tries_a_suspect() -> None:
    breaker, rng = Breaker(), random.Random(1)
    breaker.failed("a", 0.0)
    breaker.chosen("a", 0.1)
    assert "a" in breaker.avoided(0.4, rng), "a choice in need is no trial"
    assert "a" not in breaker.avoided(0.6, rng)
    breaker.chosen("a", 0.6)
    assert "a" in breaker.avoided(0.7, rng), "others wait for what comes of the trial"
    assert "a" not in breaker.avoided(0.6 + TRIAL_SECONDS, rng), "but not for ever"
    breaker.chosen("other", 0.7)
    breaker.failed("a", 0.8)
    assert "a" in breaker.avoided(0.8 + 0.9, rng), "twice as long as before"


def test_shares_grow_after_a_failure_and_for_newcomers() -> None:
    breaker = Breaker()
    breaker.failed("a", 0.0)
    breaker.succeeded("a", 1.0)
    assert 850 < avoided_times(breaker, "a", 1.0) < 950
    assert 350 < avoided_times(breaker, "a", 2.0) < 550
    assert avoided_times(breaker, "a", 3.1) == 0
    breaker.keep({"a", "b"}, ("a",), 10.0)
    assert avoided_times(breaker, "a", 10.0) == 0, "those that are there at the start do not start slowly"
    breaker.keep({"a", "b"}, ("a", "b"), 20.0)
    assert avoided_times(breaker, "a", 20.0) == 0
    assert 850 < avoided_times(breaker, "b", 20.0) < 950
    assert avoided_times(breaker, "b", 20.0 + SLOW_START_SECONDS) == 0
    breaker.keep({"a", "b"}, ("a",), 31.0)
    breaker.keep({"a", "b"}, ("a", "b"), 32.0)
    breaker.failed("b", 32.0)
    assert avoided_times(breaker, "b", 40.0) == 0, "a failure is not paid for twice"
    breaker.keep({"a"}, ("a",), 41.0)


def test_health() -> None:
    health = judge(Health(), Probe.OK)
    assert health.admitted
    assert health.interval() == health.interval(100) == 2.0
    assert 512 / health.interval(512) == 50.0, "many endpoints are not probed more often together"
    assert judge(health, Probe.LATE) == health
    doubtful = judge(health, Probe.FAILED)
    assert doubtful.admitted
    assert doubtful.interval(512) == 0.25
    out = judge(doubtful, Probe.FAILED)
    assert not out.admitted
    assert not judge(out, Probe.FAILED).admitted
    assert judge(out, Probe.OK) == Health(admitted=True, losses=1)
    assert judge(doubtful, Probe.OK) == health
    assert judge(judge(out, Probe.FAILED), Probe.FAILED).losses == 1
    assert not judge(Health(), Probe.LATE).admitted


def test_headers_that_reach_workers() -> None:
    headers = [
        (b"authorization", b"Bearer x"),
        (b"connection", b"close, X-Hop, Content-Type"),
        (b"x-hop", b"1"),
        (b"content-type", b"application/json"),
        (b"x-data-parallel-rank", b"3"),
        (b"accept-encoding", b"gzip"),
        (b"te", b"trailers"),
        (b"x-request-id", b"good-1"),
    ]
    forwarded = forward(headers, b"new")
    assert forwarded.request_id == b"good-1"
    common = b"X-Request-Id: good-1\r\nauthorization: Bearer x\r\ncontent-type: application/json\r\n"
    assert forwarded.prefill == common
    assert forwarded.decode == common + b"accept-encoding: gzip\r\n"


@pytest.mark.parametrize("bad", [b"", b" ", b"a b", b"-a", b"a" * 129, b"a\xff", b"{}"])
def test_a_request_id_that_is_not_sane_is_replaced(bad: bytes) -> None:
    assert forward([(b"x-request-id", bad)], b"new").request_id == b"new"


def test_errors_have_the_openai_shape() -> None:
    body = json.loads(error_body(Refusal(404, "c", "m", param="model")))
    assert body == {"error": {"message": "m", "type": "invalid_request_error", "param": "model", "code": "c"}}
    assert json.loads(error_body(Refusal(502, "c", "m")))["error"]["type"] == "server_error"
    assert error_event(Refusal(502, "c", "m")).startswith(b'data: {"error":')
    assert str(Refused(Refusal(400, "c", "what"))) == "what"


def test_numbers_add_up_and_are_written_in_prometheus_format() -> None:
    first, second = metrics.Numbers(), metrics.Numbers()
    for numbers in (first, second):
        numbers.add("twinpool_router_requests_total", ("/v1/models", "200"), 2)
        numbers.add("twinpool_router_clients", (), 3)
        numbers.observe("twinpool_router_prefill_leg_seconds", 0.003, ("p",))
        numbers.observe("twinpool_router_prefill_leg_seconds", 1000.0, ("p",))
    first.add("twinpool_router_endpoint_admitted", ('a"\\\n', "decode"), 1)
    text = metrics.render(metrics.total([first, metrics.counters_only(second)]))
    found = {f.name: {(s.name, tuple(s.labels.values())): s.value for s in f.samples} for f in
             text_string_to_metric_families(text)}  # fmt: skip
    name = "twinpool_router_requests"
    assert found[name][name + "_total", ("/v1/models", "200")] == 4
    assert found["twinpool_router_clients"]["twinpool_router_clients", ()] == 3
    admitted = "twinpool_router_endpoint_admitted"
    assert found[admitted][admitted, ('a"\\\n', "decode")] == 1
    leg = "twinpool_router_prefill_leg_seconds"
    assert found[leg][leg + "_bucket", ("p", "0.004")] == 2
    assert found[leg][leg + "_bucket", ("p", "0.002")] == 0
    assert found[leg][leg + "_bucket", ("p", "+Inf")] == 4
    assert found[leg][leg + "_count", ("p",)] == 4
    assert found[leg][leg + "_sum", ("p",)] == pytest.approx(2000.006)


def test_numbers_of_workers_that_are_gone_go_too() -> None:
    numbers = metrics.Numbers()
    for worker in ("a", "b"):
        numbers.add("twinpool_router_endpoint_suspect", (worker, "decode"))
        numbers.observe("twinpool_router_first_event_seconds", 0.1, ("remote", worker))
    numbers.add("twinpool_router_broken_streams_total")
    metrics.keep_workers(numbers, {"b"})
    assert numbers.values["twinpool_router_endpoint_suspect"] == {("b", "decode"): 1.0}
    assert list(numbers.histograms["twinpool_router_first_event_seconds"]) == [("remote", "b")]
    assert numbers.values["twinpool_router_broken_streams_total"] == {(): 1.0}
