"""What two looks at a running pool say about its stages and workers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from twinpool.cli.live.frame import between, duration, leads
from twinpool.cli.scrape import Scrape, added, quantile, since
from twinpool.core.bottleneck import Observation, Stage, Worker
from twinpool.core.kv_cache import TierKind
from twinpool.core.tier_use import compute_seconds, uses
from twinpool.operator.logic import names
from twinpool.operator.logic.pods import gpus

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.cli.live.frame import Snapshot
    from twinpool.core.protocol import Role
    from twinpool.core.spec import WorkerRole
    from twinpool.operator.logic.observed import PodView

_ROUTER, _WORKER = "twinpool_router_", "twinpool_worker_"


def observation(before: Snapshot, now: Snapshot) -> Observation:
    """Return what was counted between two snapshots of a pool."""
    pool = now.observed.pool
    counted, workers = between(before.routers, now.routers), [pod for pod in now.observed.pods if leads(pod)]
    engines = {pod.name: _since(before, now, pod) for pod in workers if pod.name in now.engines}
    roles: dict[Role, None] = dict.fromkeys(pod.role for pod in workers)  # type: ignore[misc]
    moved: Mapping[str, Scrape] = {role: added(_of(engines, workers, role)) for role in roles}
    reader: Role = "decode" if pool.spec.prefill is None else "prefill"
    reading = pool.spec.prefill or pool.spec.decode
    reads, decode = moved.get(reader, Scrape()), moved.get("decode", Scrape())
    ever = added([now.engines[pod.name] for pod in workers if pod.role == reader and pod.name in now.engines])
    status: dict[Role, tuple[int, int]] = {}
    for role, counts in (("prefill", pool.status.prefill), ("decode", pool.status.decode)):
        if counts is not None:
            status[role] = (counts.desired, counts.routable)  # type: ignore[index]
    return Observation(
        now.at - before.at,
        counted.total(f"{_ROUTER}time_to_first_token_seconds_count"),
        stages(counted, reads, decode, split=pool.spec.prefill is not None),
        quantile(counted, f"{_ROUTER}time_to_first_token_seconds", 0.99),
        quantile(counted, f"{_ROUTER}inter_token_seconds", 0.99),
        duration(pool.spec.objectives.ttft),
        duration(pool.spec.objectives.itl),
        tuple(_worker(before, now, pod, engines.get(pod.name, Scrape())) for pod in workers),
        {role: desired for role, (desired, _) in status.items()},
        {role: routable for role, (_, routable) in status.items()},
        {role: gpus(pool, spec) for role, spec in names.roles(pool).items()},  # type: ignore[misc]
        _hit_share(reads),
        _hit_share(ever),
        decode.total("vllm:nixl_bytes_transferred_sum"),
        decode.total("vllm:nixl_xfer_time_seconds_sum"),
        tiers=uses(reads.total, _kinds(reading)),
        compute_seconds=compute_seconds(reads.total) if _kinds(reading) else None,
        expert_balance=_expert_balance([now.engines[pod.name] for pod in workers if pod.name in now.engines]),
        simulated=pool.spec.engine.kind == "simulated",
    )


def _expert_balance(pages: list[Scrape]) -> float | None:
    """Return the mean over the largest load of experts, of the worker where it is worst; None when it is chance."""
    told = [
        1 / page.total(f"{_WORKER}expert_load_ratio")
        for page in pages
        if page.total(f"{_WORKER}expert_load_significant") and page.total(f"{_WORKER}expert_load_ratio")
    ]
    return min(told, default=None)


def _kinds(role: WorkerRole) -> list[str]:
    """Return the KV tiers of a role in the engine's order."""
    return [kind for kind in get_args(TierKind) if role.kv_cache and role.kv_cache.tier(kind)]


def stages(counted: Scrape, reads: Scrape, decode: Scrape, *, split: bool) -> dict[Stage, float]:
    """Return the seconds of each stage, summed over requests; ``reads`` is what the engines counted that read prompts.

    Routers time whole legs: what engines say of it is taken out of them, and never more than there is.
    """
    waited = reads.total("vllm:request_queue_time_seconds_sum")
    first = counted.total(f"{_ROUTER}first_event_seconds_sum")
    leg = counted.total(f"{_ROUTER}prefill_leg_seconds_sum") if split else first
    pulled = min(decode.total("vllm:nixl_xfer_time_seconds_sum"), first) if split else 0.0
    return {
        "router queue": counted.total(f"{_ROUTER}queue_seconds_sum"),
        "prefill queue": min(waited, leg),
        "prefill": max(leg - waited, 0.0),
        "pull": pulled,
        "decode start": first - pulled if split else 0.0,
    }


def _worker(before: Snapshot, now: Snapshot, pod: PodView, moved: Scrape) -> Worker:
    """Return one worker; of what it is busy with the mean of both looks."""
    flights = [
        scrape.total(f"{_ROUTER}requests_in_flight", worker=pod.name)
        for scrape in (added(list(before.routers.values())), added(list(now.routers.values())))
    ]
    tokens = moved.total("vllm:inter_token_latency_seconds_count")
    engine = now.engines.get(pod.name, Scrape())
    return Worker(
        pod.name,
        "prefill" if pod.role == "prefill" else "decode",
        sum(flights) / 2,
        engine.total("vllm:num_requests_waiting"),
        moved.total("vllm:inter_token_latency_seconds_sum") / tokens if tokens else None,
        engine.total("vllm:kv_cache_usage_perc"),
        moved.total("vllm:num_preemptions_total"),
    )


def _since(before: Snapshot, now: Snapshot, pod: PodView) -> Scrape:
    return since(before.engines.get(pod.name, Scrape()), now.engines[pod.name])


def _of(engines: Mapping[str, Scrape], workers: list[PodView], role: str) -> list[Scrape]:
    return [engines[pod.name] for pod in workers if pod.role == role and pod.name in engines]


def _hit_share(scrape: Scrape) -> float:
    asked = scrape.total("vllm:prefix_cache_queries_total")
    return scrape.total("vllm:prefix_cache_hits_total") / asked if asked else 0.0
