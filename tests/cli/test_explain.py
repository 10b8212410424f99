"""``twinpool explain``: what two looks at a pool say, and how it is told."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.cli import explain as explaining
from twinpool.cli import slowness
from twinpool.cli.__main__ import main
from twinpool.cli.live.frame import Snapshot
from twinpool.cli.scrape import parse
from twinpool.cli.slowness import observation, stages
from twinpool.core.bottleneck import find
from twinpool.core.metrics.engine import METRICS as ENGINE_METRICS
from twinpool.core.metrics.page import DECLARED
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.observed import Observed, PodView
from twinpool.worker.engines.simulated.logic.engine import Engine, Limits
from twinpool.worker.engines.simulated.logic.metrics import render
from twinpool.worker.engines.simulated.logic.pace import Pace
from twinpool.worker.engines.simulated.logic.sequence import Fetch, Order
from twinpool.worker.engines.simulated.logic.tiers import Tiers, TierSettings

if TYPE_CHECKING:
    from twinpool.core.bottleneck import Observation

ROLE = {"desired": 2, "created": 2, "ready": 2, "routable": 1, "updated": 2, "summary": "1/2"}
POOL: dict[str, Any] = {
    "metadata": {"name": "llama", "namespace": "team"},
    "spec": {
        "model": {"name": "m"},
        "engine": {"kind": "simulated"},
        "prefill": {"parallelism": {"tensor": 2}},
        "decode": {},
        "objectives": {"ttft": "800ms"},
    },
    "status": {"prefill": ROLE, "decode": ROLE},
}
ROUTER = """
twinpool_router_time_to_first_token_seconds_bucket{{route="/v1/completions",le="0.5"}} {n}
twinpool_router_time_to_first_token_seconds_bucket{{route="/v1/completions",le="+Inf"}} {n}
twinpool_router_time_to_first_token_seconds_count{{route="/v1/completions"}} {n}
twinpool_router_queue_seconds_sum {n}
twinpool_router_prefill_leg_seconds_sum {n}
twinpool_router_first_event_seconds_sum{{handoff="remote"}} {n}
twinpool_router_requests_in_flight{{worker="d-0",role="decode"}} {flight}
"""
ENGINE = """
vllm:request_queue_time_seconds_sum{{engine="0"}} {queued}
vllm:nixl_xfer_time_seconds_sum{{engine="0"}} {pulled}
vllm:nixl_bytes_transferred_sum{{engine="0"}} {pulled}
vllm:inter_token_latency_seconds_sum{{engine="0"}} {tokens}
vllm:inter_token_latency_seconds_count{{engine="0"}} {tokens}
vllm:prefix_cache_queries_total{{engine="0"}} 100
vllm:prefix_cache_hits_total{{engine="0"}} 25
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
"""


def snapshot(at: float, n: int, flight: int = 2, pool: dict[str, Any] = POOL) -> Snapshot:
    running = {"phase": "Running", "ready": True}
    pods = tuple(PodView(f"{role[0]}-0", role, role, "r1", **running) for role in ("prefill", "decode", "router"))  # type: ignore[arg-type]
    return Snapshot(
        at,
        Observed(InferencePool.model_validate(pool), (), pods),
        {"r-0": parse(ROUTER.format(n=n, flight=flight))},
        {
            "p-0": parse(ENGINE.format(queued=n / 4, pulled=0, tokens=0)),
            "d-0": parse(ENGINE.format(queued=0, pulled=n / 2, tokens=n)),
        },
    )


def test_two_looks_give_the_stages_and_the_workers() -> None:
    seen = observation(snapshot(0.0, 100), snapshot(10.0, 300, flight=6))
    assert (seen.window, seen.requests, seen.ttft_objective, seen.itl_objective) == (10.0, 200.0, 0.8, None)
    assert seen.stages == {
        "router queue": 200.0, "prefill queue": 50.0, "prefill": 150.0, "pull": 100.0, "decode start": 100.0
    }  # fmt: skip
    assert sum(seen.stages.values()) == 600.0, "queue, leg and first event, each second once"
    workers = {worker.name: worker for worker in seen.workers}
    assert (workers["d-0"].in_flight, workers["d-0"].seconds_per_token, workers["d-0"].kv_used) == (4.0, 1.0, 0.5)
    assert workers["p-0"].seconds_per_token is None
    assert (seen.wanted, seen.routable) == ({"prefill": 2, "decode": 2}, {"prefill": 1, "decode": 1})
    assert seen.gpus == {"prefill": 0, "decode": 0}, "simulated engines have none"
    assert (seen.hit_share, seen.hit_share_ever) == (0.0, 0.25)
    assert seen.simulated


def test_a_pool_without_prefill_reads_prompts_at_decode() -> None:
    spec = {key: value for key, value in POOL["spec"].items() if key != "prefill"}
    alone = {**POOL, "spec": spec, "status": {"decode": ROLE}}
    seen = observation(snapshot(0.0, 100, pool=alone), snapshot(10.0, 300, pool=alone))
    assert seen.stages["prefill"] == 200.0
    assert seen.stages["pull"] == seen.stages["decode start"] == 0.0


def test_engines_never_take_more_than_the_legs_have() -> None:
    counted = parse(ROUTER.format(n=10, flight=0))
    engine = parse(ENGINE.format(queued=99, pulled=99, tokens=1))
    found = stages(counted, engine, engine, split=True)
    assert (found["prefill queue"], found["prefill"], found["pull"], found["decode start"]) == (10.0, 0.0, 10.0, 0.0)


def engine_with(disk_bandwidth: float) -> Engine:
    """Return a simulated engine with a small host tier and a disk behind it."""
    limits = Limits(kv_blocks=512, max_num_batched_tokens=8192)
    pace = Pace(prefill_rate=20_000.0)
    block = pace.transfer_bytes(1, limits.block_size)
    settings = (TierSettings("host", 64, 0.0, 32e9), TierSettings("disk", 100_000, 0.0, disk_bandwidth))
    tiers = Tiers(settings, prices=pace.prices, block_size=limits.block_size, block_bytes=block)
    return Engine(limits, pace, tiers=tiers)


def asked(engine: Engine, now: float, rounds: int) -> float:
    """Ask for the same few long prompts in turn, so that only the disk still has them; return the time after."""
    for number in range(rounds * 4):
        prompt = tuple(range(number % 4 * 10_000, number % 4 * 10_000 + 4000))
        engine.submit(Order(f"{now}-{number}", prompt, 1), now)
        while engine.unfinished:
            step, events = engine.begin(now)
            for event in events:
                assert isinstance(event, Fetch)
                now += event.seconds
                engine.loaded(event.id)
            now += step.seconds if step else 0.0
            engine.end(now)
    return now


@pytest.mark.parametrize(("bandwidth", "cause"), [(4e9, "prefill compute"), (0.5e9, "losing tier")])
def test_a_tier_of_the_simulated_engine_that_loses_is_named(bandwidth: float, cause: str) -> None:
    role = {"kvCache": {"tiers": [{"kind": "host", "size": "128Mi"}, {"kind": "disk", "size": "100Gi"}]}}
    pool = {**POOL, "spec": {**POOL["spec"], "prefill": role}}
    engine = engine_with(bandwidth)
    pages, now = [], 0.0
    for looks in range(2):
        now = asked(engine, now, 2 if looks else 1)
        pages.append((now, parse(render([engine.metrics], "m"))))
    before, after = (
        dataclasses.replace(snapshot(at, 100 + 50 * number, pool=pool), engines={"p-0": page})
        for number, (at, page) in enumerate(pages)
    )
    waited = (pages[1][0] - pages[0][0]) * 1.2
    seen = observation(dataclasses.replace(before, at=0.0), dataclasses.replace(after, at=30.0))
    seen = dataclasses.replace(seen, routable=seen.wanted, stages={"prefill": waited})
    found = find(seen)
    assert found.cause == cause
    if cause == "losing tier":
        assert "remove the disk tier from `prefill.kvCache.tiers`" in found.technique
        assert any("anything about hardware" in line for line in found.caution)


@pytest.mark.parametrize(("significant", "found"), [(1, 0.25), (0, None)])
def test_experts_are_blamed_only_for_more_than_chance(significant: int, found: float | None) -> None:
    page = f"twinpool_worker_expert_load_ratio 4.0\ntwinpool_worker_expert_load_significant {significant}\n"
    now = dataclasses.replace(snapshot(10.0, 300), engines={"d-0": parse(page)})
    assert observation(snapshot(0.0, 100), now).expert_balance == found


def test_only_declared_metrics_are_read() -> None:
    text = Path(slowness.__file__).read_text().replace("{_ROUTER}", "twinpool_router_")
    text = text.replace("{_WORKER}", "twinpool_worker_")
    names = re.findall(r"\b(?:twinpool_(?:router|worker)_|vllm:)[a-z_]*[a-z]\b", text)
    assert len(names) > 10
    for name in names:
        assert re.sub(r"_(sum|count)$", "", name) in {**DECLARED, **ENGINE_METRICS}, name


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Observation]:
    """What the pool will be seen to do, instead of watching it."""
    seen = [observation(snapshot(0.0, 100), snapshot(10.0, 300))]
    monkeypatch.setattr(explaining, "watch", lambda *_: seen[0])
    return seen


def test_a_finding_is_told_in_words(watched: list[Observation], capsys: pytest.CaptureFixture[str]) -> None:
    watched[0] = dataclasses.replace(watched[0], routable=watched[0].wanted)
    assert main(["explain", "llama"]) == 0
    out = capsys.readouterr().out
    assert "llama: 200 requests in 10 s" in out
    assert "slowest:       waiting at the routers, 33% of the time to the first token (queue)" in out
    assert "objectives:    the pool keeps them; nothing needs to be done" in out
    assert "would help:    one more" in out
    watched[0] = dataclasses.replace(watched[0], ttft_p99=5.0)
    assert main(["explain", "llama"]) == 0
    said = capsys.readouterr().out
    assert "objectives:    the pool misses them" in said
    assert "what helps:    one more" in said
    assert "do not conclude:\n  that workers are slow" in out
    assert "their times invented" in out


def test_a_finding_for_machines(watched: list[Observation], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "llama", "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["finding"]["cause"] == "cold start"
    assert said["observation"]["requests"] == 200


def test_too_little_is_no_answer(watched: list[Observation], capsys: pytest.CaptureFixture[str]) -> None:
    watched[0] = dataclasses.replace(watched[0], requests=3)
    assert main(["explain", "llama"]) == 1
    out = capsys.readouterr().out
    assert "not enough data" in out
    assert "slowest" not in out


def test_a_moment_is_too_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "llama", "--seconds", "1"]) == 1
    assert "at least 5 seconds" in capsys.readouterr().err
