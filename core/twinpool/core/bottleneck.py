"""Why a pool is slow, in words: one finding with its share, its evidence, and what must not be concluded from it. Pure.

Always true: a finding names figures that the observation holds; with too few requests there is none; causes that would
show up as another stage's slowness (groups that start, one bad worker, a cache too small) are looked at before stages.
Shares are of sums of seconds, since percentiles of stages do not add up to the percentile of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from twinpool.core.observation import STAGES as STAGES
from twinpool.core.observation import Observation as Observation
from twinpool.core.observation import Stage as Stage
from twinpool.core.observation import Worker as Worker
from twinpool.core.protocol import ROLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.protocol import Role

Cause = Literal[
    "not enough data",
    "cold start",
    "hot worker",
    "cache thrash",
    "losing tier",
    "expert skew",
    "queue",
    "prefill compute",
    "transfer link",
    "decode bandwidth",
]

#: Below these nothing is concluded: a share of few requests is chance.
MIN_REQUESTS, MIN_SECONDS = 20, 5.0
#: A worker is slow or crowded when it is this many times the median of the others of its role.
SLOW, CROWDED = 1.5, 3.0
#: In-flight requests below which a worker is not called crowded, whatever the others have.
CROWD = 6
#: Share of KV blocks in use above which a cache has no room.
FULL = 0.9
#: Preempted requests per request, and the loss of cache hits against the engine's whole life, that mean thrashing.
PREEMPTED, HITS_LOST = 0.05, 0.5
#: A KV tier loses when loading a token takes this many times as long as computing it, and what it loses is this share
#: of the time to the first token.
LOSES, LOST = 1.2, 0.05
#: Mean over maximum of the experts' load below which skew is named.
BALANCED = 0.6
#: Share of waiting from which groups that start are to blame for it.
WAITING = 0.3


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to blame. ``share`` is of the time to the first token, None where the cause is none of its stages."""

    cause: Cause
    stage: str
    resource: str
    technique: str
    cost: str
    evidence: tuple[str, ...]
    caution: tuple[str, ...]
    share: float | None = None
    within_objectives: bool | None = None


def find(seen: Observation) -> Finding:
    """Return what makes the pool slow."""
    spent = sum(seen.stages.values())
    if seen.requests < MIN_REQUESTS or seen.window < MIN_SECONDS or spent <= 0:
        return _not_enough(seen)
    for rule in _RULES:
        found = rule(seen)
        if found is not None:
            return found
    raise AssertionError("the last rule finds something in every observation with requests")


def share(seen: Observation, *stages: Stage) -> float:
    """Return the share of these stages in the time to the first token, 0 to 1."""
    return sum(seen.stages.get(stage, 0.0) for stage in stages) / sum(seen.stages.values())


def concern(seen: Observation) -> Literal["ttft", "itl"]:
    """Return which objective is missed by more; the time to the first token where there is none to compare with."""
    return "itl" if _times(seen.itl_p99, seen.itl_objective) > _times(seen.ttft_p99, seen.ttft_objective) else "ttft"


def _times(value: float | None, objective: float | None) -> float:
    return value / objective if value is not None and objective else 0.0


def _within(seen: Observation) -> bool | None:
    if not (seen.ttft_objective or seen.itl_objective):
        return None
    pairs = ((seen.ttft_p99, seen.ttft_objective), (seen.itl_p99, seen.itl_objective))
    return all(_times(*pair) <= 1 for pair in pairs)


def _not_enough(seen: Observation) -> Finding:
    return Finding(
        "not enough data",
        "",
        "",
        f"look again while at least {MIN_REQUESTS} requests are answered",
        "nothing",
        (f"{seen.requests:.0f} requests in {seen.window:.0f} s",),
        ("that the pool is fast: nobody asked it enough.",),
    )


def _cold_start(seen: Observation) -> Finding | None:
    short = {role: wanted - seen.routable.get(role, 0) for role, wanted in seen.wanted.items()}
    missing = {role: count for role, count in short.items() if count > 0}
    waiting = share(seen, "router queue", "prefill queue", "decode start")
    if not missing or waiting < WAITING:
        return None
    words = ", ".join(f"{count} of {seen.wanted[role]} {role} groups" for role, count in missing.items())
    return Finding(
        "cold start",
        "waiting for groups that start",
        "groups that do not serve yet",
        "keep more groups running (`min` in `scaling`), or start them faster: a model cache on the node or a volume",
        "idle GPUs between bursts, or disk for the weights",
        (f"{words} do not serve yet", f"{waiting:.0%} of the time to the first token is waiting"),
        ("that the pool is too small: with all of its groups it may be large enough.", *_simulated(seen)),
        waiting,
        _within(seen),
    )


def _hot_worker(seen: Observation) -> Finding | None:
    for worker in sorted(seen.workers, key=lambda worker: (-worker.in_flight, worker.name)):
        others = [other for other in seen.workers if other.role == worker.role and other.name != worker.name]
        said = _stands_out(worker, others)
        if said:
            return Finding(
                "hot worker",
                f"{worker.role} on {worker.name}",
                f"the worker {worker.name}",
                "look at its GPU (clocks, ECC, other processes) and link; delete the pod to have it placed elsewhere; "
                "if it is only crowded, use `routing.policy: price`",
                "the requests that run there are drained first",
                said,
                ("that the role needs more groups: its other workers have room.", *_simulated(seen)),
                None,
                _within(seen),
            )
    return None


def _stands_out(worker: Worker, others: list[Worker]) -> tuple[str, ...]:
    """Return in which figures a worker is far from the others of its role."""
    said = []
    speeds = [other.seconds_per_token for other in others if other.seconds_per_token]
    if worker.seconds_per_token and speeds and worker.seconds_per_token >= SLOW * median(speeds):
        said.append(
            f"{worker.name} takes {worker.seconds_per_token * 1e3:.1f} ms a token, "
            f"the others {median(speeds) * 1e3:.1f} ms"
        )
    loads = [other.in_flight for other in others]
    if loads and worker.in_flight >= max(CROWD, CROWDED * median(loads)):
        said.append(f"{worker.name} has {worker.in_flight:.0f} requests in flight, the others {median(loads):.0f}")
    return tuple(said)


def _cache_thrash(seen: Observation) -> Finding | None:
    full = [worker for worker in seen.workers if worker.kv_used >= FULL]
    preempted = sum(worker.preemptions for worker in full) / seen.requests
    lost = seen.hit_share < HITS_LOST * seen.hit_share_ever and seen.hit_share_ever >= 0.2
    if not full or not (preempted >= PREEMPTED or lost):
        return None
    said = [f"KV cache in use: {', '.join(f'{worker.name} {worker.kv_used:.0%}' for worker in full)}"]
    if preempted >= PREEMPTED:
        said.append(f"{preempted:.2f} preemptions for each request: their work is done twice")
    if lost:
        said.append(f"{seen.hit_share:.0%} of prompt tokens were cached, {seen.hit_share_ever:.0%} since the start")
    return Finding(
        "cache thrash",
        f"{full[0].role}, which computes again what it had",
        "KV blocks",
        "more memory for KV (`--gpu-memory-utilization`) or smaller KV (`--kv-cache-dtype`) by `engine.args`, or one "
        f"more {full[0].role} group",
        f"memory that activations need, a little accuracy, or {_gpus(seen, full[0].role)}",
        tuple(said),
        ("that prompts stopped repeating: they were evicted before they could be found.", *_simulated(seen)),
        None,
        _within(seen),
    )


def _losing_tier(seen: Observation) -> Finding | None:
    compute = seen.compute_seconds
    for use in seen.tiers if compute else ():
        one = use.seconds_per_token
        if compute is None or one is None or one < LOSES * compute:
            continue
        lost = use.tokens * (one - compute)
        part = lost / sum(seen.stages.values())
        if part < LOST:
            continue
        role = _reader(seen)
        return Finding(
            "losing tier",
            f"{role}, which waits for its {use.kind} tier",
            f"the link to the {use.kind} tier",
            f"remove the {use.kind} tier from `{role}.kvCache.tiers`, or put it on something faster",
            f"prompts whose beginning only it holds are computed, {compute * 1e6:.0f} us a token",
            (
                f"{use.tokens:.0f} tokens came from it at {one * 1e6:.0f} us each, computing takes {compute * 1e6:.0f}",
                f"that costs {lost:.1f} s, {part:.0%} of the time to the first token",
            ),
            ("that caching is useless: what the accelerator itself holds costs nothing to use.", *_simulated(seen)),
            part,
            _within(seen),
        )
    return None


def _expert_skew(seen: Observation) -> Finding | None:
    if seen.expert_balance is None or seen.expert_balance >= BALANCED or concern(seen) != "itl":
        return None
    return Finding(
        "expert skew",
        "decode, which waits for its busiest expert",
        "the GPUs of the busiest experts",
        "move experts more often (`decode.expertBalancing.interval`), or keep more of them twice "
        "(`decode.expertBalancing.redundantExperts`)",
        "memory for the copies, and short pauses while experts move",
        (f"experts' mean load is {seen.expert_balance:.0%} of the busiest one's", _against(seen)),
        ("that more decode groups would help: each would have the same busy experts.", *_simulated(seen)),
        None,
        _within(seen),
    )


def _slowest(seen: Observation) -> Finding:
    if concern(seen) == "itl":
        return _decode(seen)
    slowest = max(STAGES, key=lambda stage: seen.stages.get(stage, 0.0))
    if slowest == "prefill":
        return _prefill(seen)
    if slowest == "pull":
        return _pull(seen)
    return _queue(seen, slowest)


def _decode(seen: Observation) -> Finding:
    speeds = [worker.seconds_per_token for worker in seen.workers if worker.role == "decode"]
    running = sum(worker.in_flight for worker in seen.workers if worker.role == "decode")
    return Finding(
        "decode bandwidth",
        "decode, between two tokens",
        "memory bandwidth of the decode GPUs: every token reads weights and KV",
        "one more decode group, so that batches are smaller; more tensor parallelism, smaller KV, speculation",
        f"{_gpus(seen, 'decode')}; speculation costs compute that prefill on the same GPUs would miss",
        (
            _against(seen),
            f"{running:.0f} requests in flight on {_workers(len(speeds))}",
        ),
        ("that prefill groups would help: they do not write tokens.", *_simulated(seen)),
        None,
        _within(seen),
    )


def _workers(count: int) -> str:
    return "the one decode worker" if count == 1 else f"{count} decode workers, none far from the others"


def _prefill(seen: Observation) -> Finding:
    part = share(seen, "prefill")
    mean = seen.stages["prefill"] / seen.requests
    return Finding(
        "prefill compute",
        "prefill",
        f"compute of the {_reader(seen)} GPUs",
        f"more tensor parallelism for {_reader(seen)} makes each prompt faster, prefix-aware routing (`routing.policy: "
        "price`) saves what is cached; more groups only help while prompts wait",
        f"{_gpus(seen, _reader(seen))} for another group; nothing for routing",
        (
            f"a prompt takes {mean:.3f} s on average, {part:.0%} of the time to the first token",
            f"{seen.hit_share:.0%} of prompt tokens were cached",
        ),
        ("that the pool is overloaded: prompts hardly wait, they are long or new.", *_simulated(seen)),
        part,
        _within(seen),
    )


def _pull(seen: Observation) -> Finding:
    part = share(seen, "pull")
    speed = seen.pulled_bytes / seen.pull_seconds if seen.pull_seconds > 0 else 0.0
    return Finding(
        "transfer link",
        "the pull of the KV cache",
        "the network between prefill and decode",
        "prefill near decode (`placement.pair`), smaller KV (`--kv-cache-dtype` in `engine.args`), or local prefill "
        "where it is cheaper (`handoff.conditional: auto`)",
        "a narrower choice of nodes, a little accuracy, or prompts read on decode workers",
        (
            f"pulls are {part:.0%} of the time to the first token",
            f"{seen.pulled_bytes / seen.requests / 1e6:.1f} MB a request at {speed / 1e9:.2f} GB/s while pulling",
        ),
        ("that the link is broken: compare the speed with what the hardware promises first.", *_simulated(seen)),
        part,
        _within(seen),
    )


def _queue(seen: Observation, slowest: Stage) -> Finding:
    role = _short_role(seen, slowest)
    part = share(seen, slowest)
    where = {"router queue": "the routers", "prefill queue": role, "decode start": "decode, before the first token"}
    waiting = sum(worker.waiting for worker in seen.workers if worker.role == role)
    return Finding(
        "queue",
        f"waiting at {where[slowest]}",
        f"places at the {role} workers",
        f"one more {role} group, or a longer `routing.queue` if only bursts wait",
        _gpus(seen, role),
        (
            f"waiting there is {part:.0%} of the time to the first token",
            f"{waiting:.0f} requests wait in {role} engines",
        ),
        ("that workers are slow: each does its work, there is too much of it.", *_simulated(seen)),
        part,
        _within(seen),
    )


def _short_role(seen: Observation, slowest: Stage) -> Role:
    """Return the role whose workers are busiest, for a queue that does not say it itself."""
    if slowest != "router queue":
        return _reader(seen) if slowest == "prefill queue" else "decode"

    def busy(role: Role) -> float:
        mine = [worker.waiting + worker.in_flight for worker in seen.workers if worker.role == role]
        return sum(mine) / max(len(mine), 1)

    return max(reversed(ROLES), key=busy)


def _against(seen: Observation) -> str:
    value, wish = seen.itl_p99 or 0.0, seen.itl_objective or 0.0
    return f"p99 between two tokens is {value * 1e3:.1f} ms, the objective {wish * 1e3:.1f} ms"


def _reader(seen: Observation) -> Role:
    """Return the role that reads prompts: decode in a pool without prefill."""
    return "prefill" if "prefill" in seen.wanted else "decode"


def _gpus(seen: Observation, role: Role) -> str:
    count = seen.gpus.get(role, 0)
    return f"{count} GPUs" if count else "pods without GPUs"


def _simulated(seen: Observation) -> tuple[str, ...]:
    return ("anything about hardware: the engines are simulated, their times invented.",) if seen.simulated else ()


#: In this order; the last one always finds something.
_RULES: tuple[Callable[[Observation], Finding | None], ...] = (
    _cold_start,
    _hot_worker,
    _cache_thrash,
    _losing_tier,
    _expert_skew,
    _slowest,
)
