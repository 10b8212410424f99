"""``twinpool top``: one look in a pipe and for programs, many on a terminal; labels are those that routers give."""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.cli import top as command
from twinpool.cli.__main__ import main
from twinpool.cli.live import watcher as watching
from twinpool.cli.scrape import parse
from twinpool.core.errors import TwinpoolError
from twinpool.core.metrics.router import METRICS
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.observed import Observed, PodView

if TYPE_CHECKING:
    from collections.abc import Callable

POOL: dict[str, Any] = {
    "metadata": {"name": "llama", "namespace": "team"},
    "spec": {
        "model": {"name": "m"},
        "engine": {"kind": "simulated"},
        "prefill": {},
        "decode": {},
        "objectives": {"ttft": "800ms"},
    },
    "status": {
        "ratio": "1:1",
        "conditions": [
            {"type": "Ready", "status": "False", "reason": "NoPair", "message": "no pair", "lastTransitionTime": "x"}
        ],
    },
}
PODS = (
    PodView("r-0", "router", phase="Running", ready=True),
    PodView("d1-0", "decode", "d1", "r1", phase="Running", ready=True),
    PodView("p1-0", "prefill", "p1", "r1", phase="Running", ready=True),
)
ROUTER = """
twinpool_router_requests_total{{route="completions",code="200"}} {n}
twinpool_router_requests_waiting 3
twinpool_router_requests_in_flight{{worker="d1-0",role="decode"}} 2
twinpool_router_tokens_in_flight{{worker="d1-0",role="decode"}} 640
twinpool_router_handoffs_unpulled{{worker="p1-0",role="prefill"}} 1
twinpool_router_endpoint_suspect{{worker="p1-0",role="prefill"}} 1
twinpool_router_time_to_first_token_seconds_bucket{{route="completions",le="2.0"}} {n}
twinpool_router_time_to_first_token_seconds_bucket{{route="completions",le="+Inf"}} {n}
"""


class Pages:
    """Pods' pages without kubectl; each look finds ten requests more."""

    def __init__(self, _: object) -> None:
        self.looks = 0

    def __enter__(self) -> Pages:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keep(self, _: set[str]) -> None:
        pass

    def page(self, pod: str, _: int, __: str) -> str | None:
        if pod == "r-0":
            self.looks += 1
            return ROUTER.format(n=10 * self.looks)
        return "vllm:kv_cache_usage_perc 0.25\n" if pod == "d1-0" else None


class Clock:
    """Time that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.slept:
            self.slept.pop(0)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    pool = InferencePool.model_validate(POOL)
    monkeypatch.setattr(watching, "observe", lambda *_: (Observed(pool, (), PODS), {}))
    monkeypatch.setattr(command, "Forwards", Pages)
    monkeypatch.setattr(command, "time", found)
    return found


def test_one_look(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "llama"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "llama: m, not ready: no pair (simulated engines: tokens and times are invented)",
        "last 5 s: 2.0 requests/s, 0.0 failed/s, 3 queued, 0 tokens/s",
        "first token 1.00 s / 1.90 s (promised: 800 ms); between tokens - / -",
        "prefill to decode 1:1; handoffs: 0.0 remote/s, 0.0 local/s, 0.0 MB/s, 1 not pulled",
        "",
        "GROUP   ROLE      STATE              REQUESTS   TOKENS   KV CACHE   NOT PULLED",
        "d1      decode    serving            2          640      25%        0",
        "p1      prefill   serving, avoided   0          0        -          1",
    ]


def test_once_on_a_terminal(clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["top", "llama", "--once"]) == 0
    assert "3 queued" in capsys.readouterr().out


def test_for_programs(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "llama", "--seconds", "10", "-o", "json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["window"] == 10.0
    assert seen["numbers"]["requests"] == 1.0


def test_on_a_terminal_it_goes_on_until_ctrl_c_and_says_when_it_is_old(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        monkeypatch.setattr(watching, "OBJECTS_EVERY", 0.0)
        monkeypatch.setattr(watching, "observe", fails)

    def fails(*_: object) -> Any:
        raise TwinpoolError("the cluster is away", "wait")

    def interrupt() -> None:
        raise KeyboardInterrupt

    clock.slept = [lambda: None, away, interrupt]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["top", "llama"]) == 0
    out = capsys.readouterr().out
    assert "requests/s" in out
    assert "not up to date: the cluster is away" in out


def test_the_labels_are_those_that_routers_give() -> None:
    declared = {metric.name: set(metric.label_names) for metric in METRICS.values()}
    for name, found in parse(ROUTER.format(n=1)).samples.items():
        for labels in found:
            assert {key for key, _ in labels} - {"le"} == declared[re.sub("_bucket$", "", name)], name
