"""One moment of a running pool, as the live page shows it: from what routers and engines count. Pure.

Rates and percentiles are of a window of some seconds, so that a page says what is happening and not what ever happened.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from twinpool.cli.scrape import Scrape, added, quantile, since
from twinpool.core.errors import InvalidValue
from twinpool.core.units import parse_duration
from twinpool.operator.logic import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.operator.logic.observed import Observed, PodView

_ROUTER = "twinpool_router_"
_TTFT, _ITL, _PREFILL = (f"{_ROUTER}{name}_seconds" for name in ("time_to_first_token", "inter_token", "prefill_leg"))
_STAGES = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was seen at one moment (``at`` in seconds): pages by pod; pods that did not answer are missing."""

    at: float
    observed: Observed
    routers: Mapping[str, Scrape] = field(default_factory=dict)
    engines: Mapping[str, Scrape] = field(default_factory=dict)


def frame(before: Snapshot, now: Snapshot) -> dict[str, Any]:
    """Return what the page shows of ``now``, with rates since ``before``."""
    pool, seconds = now.observed.pool, now.at - before.at
    counted = between(before.routers, now.routers)
    moved = between(before.engines, now.engines)
    gauges = added(list(now.routers.values()))
    pods = now.observed.pods
    conditions = [item for item in pool.status.conditions if item.type == "Ready"]
    return {
        "pool": pool.metadata.name,
        "namespace": pool.metadata.namespace,
        "model": pool.spec.model.name,
        "simulated": pool.spec.engine.kind == "simulated",
        "ready": conditions[0].status == "True" if conditions else False,
        "message": conditions[0].message if conditions else "the operator has not looked at the pool yet",
        "ratio": pool.status.ratio,
        "window": round(seconds, 1),
        "objectives": {key: duration(getattr(pool.spec.objectives, key)) for key in ("ttft", "itl")},
        "numbers": _numbers(counted, moved, gauges, seconds),
        "routers": [
            {"name": pod.name, "ready": pod.ready, "answers": pod.name in now.routers}
            for pod in _sorted(pods)
            if pod.role == names.ROUTER
        ],
        "groups": [_group(pod, pods, gauges, now.engines.get(pod.name)) for pod in _sorted(pods) if leads(pod)],
        "silent": sorted(pod.name for pod in pods if _silent(pod, now)),
    }


def _numbers(counted: Scrape, moved: Scrape, gauges: Scrape, seconds: float) -> dict[str, Any]:
    def rate(scrape: Scrape, name: str, **labels: str) -> float:
        return scrape.total(name, **labels) / seconds if seconds > 0 else 0.0

    requests = f"{_ROUTER}requests_total"
    failed = sum(value for labels, value in counted.of(requests) if labels["code"].startswith("5"))
    return {
        "requests": rate(counted, requests),
        "failed": failed / seconds if seconds > 0 else 0.0,
        "remote": rate(counted, f"{_ROUTER}handoffs_total", outcome="remote"),
        "local": rate(counted, f"{_ROUTER}handoffs_total", outcome="local"),
        "waiting": gauges.total(f"{_ROUTER}requests_waiting"),
        "clients": gauges.total(f"{_ROUTER}clients"),
        "unpulled": gauges.total(f"{_ROUTER}handoffs_unpulled"),
        "tokens": rate(moved, "vllm:generation_tokens_total"),
        "bytes": rate(moved, "vllm:nixl_bytes_transferred_sum"),
        "ttft": [quantile(counted, _TTFT, share) for share in (0.5, 0.95)],
        "itl": [quantile(counted, _ITL, share) for share in (0.5, 0.95)],
        "prefill": [quantile(counted, _PREFILL, share) for share in (0.5, 0.95)],
    }


def _group(leader: PodView, pods: Iterable[PodView], gauges: Scrape, engine: Scrape | None) -> dict[str, Any]:
    def gauge(name: str) -> float:
        return gauges.total(_ROUTER + name, worker=leader.name)

    return {
        "name": leader.group,
        "role": leader.role,
        "revision": leader.revision,
        "state": _state([pod for pod in pods if pod.group == leader.group]),
        "suspect": gauge("endpoint_suspect") > 0,
        "requests": gauge("requests_in_flight"),
        "tokens": gauge("tokens_in_flight"),
        "unpulled": gauge("handoffs_unpulled"),
        "kv": None if engine is None else engine.total("vllm:kv_cache_usage_perc"),
    }


def _state(ranks: list[PodView]) -> str:
    if any(pod.draining or pod.deadline is not None for pod in ranks):
        return "draining"
    return "serving" if all(pod.ready for pod in ranks) else "starting"


def between(before: Mapping[str, Scrape], after: Mapping[str, Scrape]) -> Scrape:
    """Return what all processes counted; one that was not there before has counted all since."""
    return added([since(before.get(name, Scrape()), scrape) for name, scrape in after.items() if name in before])


def _sorted(pods: Iterable[PodView]) -> list[PodView]:
    return sorted(pods, key=lambda pod: pod.name)


def leads(pod: PodView) -> bool:
    """Return whether it is the pod of a group that answers."""
    return pod.role in _STAGES and pod.rank == 0


def _silent(pod: PodView, now: Snapshot) -> bool:
    answers = now.routers if pod.role == names.ROUTER else now.engines
    return pod.ready and (pod.role == names.ROUTER or leads(pod)) and pod.name not in answers


def duration(text: str | None) -> float | None:
    """Return a time of the spec in seconds, None for one that is not set or cannot be read."""
    try:
        return parse_duration(text) if text else None
    except InvalidValue:
        return None
