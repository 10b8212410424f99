"""What the launcher's HTTP endpoints say, from one snapshot."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from twinpool.core.metrics.exposition import family
from twinpool.core.metrics.worker import METRICS
from twinpool.worker.logic.causes import CAUSES
from twinpool.worker.logic.preflight import OUTCOMES
from twinpool.worker.logic.supervisor import PHASES, RESTART_BUDGET, RESTART_WINDOW

if TYPE_CHECKING:
    from twinpool.core.expert_load import Balance
    from twinpool.worker.logic.causes import Cause
    from twinpool.worker.logic.machine import Finding
    from twinpool.worker.logic.preflight import Result
    from twinpool.worker.logic.speculation import Kept
    from twinpool.worker.logic.supervisor import Phase
    from twinpool.worker.logic.tiers import TierState
    from twinpool.worker.logic.weights import Progress

#: Lines of the engine that ``/status`` shows.
LAST_LINES = 50


class Life(Protocol):
    """What the states of all ranks have in common."""

    @property
    def phase(self) -> Phase:
        """Return where the life stands."""
        ...

    @property
    def ready(self) -> bool:
        """Return whether the pod serves."""
        ...

    @property
    def epoch(self) -> int:
        """Return the number of the engine's current start."""
        ...

    @property
    def total_restarts(self) -> int:
        """Return how often the engine was started again."""
        ...

    @property
    def recent_restarts(self) -> int:
        """Return how many of those count against the budget."""
        ...

    @property
    def backoff(self) -> float:
        """Return the seconds that were waited before the last of them."""
        ...

    @property
    def reason(self) -> str:
        """Return why it stands there."""
        ...

    @property
    def cause(self) -> Cause | None:
        """Return why the engine was lost; None while it was not."""
        ...

    @property
    def losses(self) -> tuple[tuple[Cause, int], ...]:
        """Return how often the engine was lost for each cause."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what is wrong although the engine serves."""
        ...

    @property
    def start_seconds(self) -> float | None:
        """Return how long the last start took."""
        ...


@dataclass(frozen=True)
class Snapshot:
    """One moment of the launcher, published whole so that a reader on another thread never sees a mixture."""

    state: Life
    engine: str
    model: str
    role: str
    version: str
    pid: int | None = None
    last_lines: tuple[str, ...] = ()
    preflight: Result | None = None
    #: How the engine drafts tokens, in words, and what was kept of them.
    speculation: str = ""
    kept: Kept | None = None
    #: From where on KV tiers should pay, in words, and what they did.
    tiers: str = ""
    tier_state: TierState | None = None
    #: How even the load of experts was of late.
    experts: Balance | None = None
    #: What is wrong with the pod's machine, seen before the engine started.
    findings: tuple[Finding, ...] = ()
    #: How far the model's files are, where the launcher has them fetched or checked.
    weights: Progress | None = None

    @property
    def reason(self) -> str:
        """Return why the life stands where it does."""
        loading = self.weights is not None and self.state.phase == "new"
        return str(self.weights) if loading else self.state.reason


def readyz(snapshot: Snapshot) -> tuple[int, str]:
    """Return the status code and JSON body of ``/readyz``."""
    state = snapshot.state
    body = {"ready": state.ready, "phase": state.phase, "reason": snapshot.reason, "cause": state.cause or ""}
    return (200 if state.ready else 503), json.dumps(body)


def status(snapshot: Snapshot) -> str:
    """Return the JSON body of ``/status``."""
    state = snapshot.state
    return json.dumps(
        {
            "phase": state.phase,
            "ready": state.ready,
            "epoch": state.epoch,
            "restarts": state.total_restarts,
            "recent": state.recent_restarts,
            "budget": RESTART_BUDGET,
            "window": RESTART_WINDOW,
            "backoff": state.backoff,
            "reason": snapshot.reason,
            "cause": state.cause or "",
            "warnings": [*map(str, snapshot.findings), *state.warnings],
            "lastLines": list(snapshot.last_lines[-LAST_LINES:]),
            "engine": {"kind": snapshot.engine, "pid": snapshot.pid},
            "model": snapshot.model,
            "role": snapshot.role,
            **({"speculation": _speculation(snapshot)} if snapshot.speculation else {}),
            **({"kvTiers": _tiers(snapshot)} if snapshot.tiers else {}),
            **({"experts": asdict(snapshot.experts)} if snapshot.experts else {}),
            **({"weights": _weights(snapshot.weights)} if snapshot.weights else {}),
        }
    )


def _speculation(snapshot: Snapshot) -> dict[str, Any]:
    kept = snapshot.kept
    found: dict[str, Any] = {"chosen": snapshot.speculation}
    if kept is not None:
        found |= {"acceptance": list(kept.acceptance), "tokensPerStep": kept.tokens_per_step, "drafts": kept.drafts}
    return found


def _weights(found: Progress) -> dict[str, Any]:
    return {"stage": found.stage, "bytes": found.done, "total": found.total, "commit": found.commit}


def _tiers(snapshot: Snapshot) -> dict[str, Any]:
    state = snapshot.tier_state
    return {"expected": snapshot.tiers, **(state.to_json() if state else {})}


def preflight(snapshot: Snapshot) -> tuple[int, str]:
    """Return the status code and JSON body of ``/preflight``; 404 while there is no result."""
    if snapshot.preflight is None:
        return 404, json.dumps({"outcome": "", "problem": "no preflight has ended: one rank alone, or still running"})
    return 200, snapshot.preflight.to_json()


def metrics(snapshot: Snapshot) -> str:
    """Return the body of ``/metrics`` in Prometheus' text format."""
    state = snapshot.state
    info = (snapshot.engine, snapshot.model, snapshot.role, snapshot.version)
    lines = [
        *_family("info", [(info, 1)]),
        *_family("ready", [((), int(state.ready))]),
        *_family("phase", [((phase,), int(phase == state.phase)) for phase in PHASES]),
        *_family("engine_epoch", [((), state.epoch)]),
        *_family("engine_restarts_total", [((), state.total_restarts)]),
        *_family("engine_losses_total", [((cause,), dict(state.losses).get(cause, 0)) for cause in CAUSES]),
        *_family("engine_warnings", [((), len(state.warnings) + len(snapshot.findings))]),
    ]
    if state.start_seconds is not None:
        lines += _family("engine_start_seconds", [((), state.start_seconds)])
    if snapshot.weights is not None:
        lines += _family("weights_bytes", [((), snapshot.weights.done)])
        lines += _family("weights_total_bytes", [((), snapshot.weights.total)])
    if snapshot.kept is not None:
        lines += _speculation_metrics(snapshot.kept)
    if snapshot.tier_state is not None:
        lines += _tier_metrics(snapshot.tier_state)
    if snapshot.experts is not None:
        lines += _family("expert_load_ratio", [((), snapshot.experts.ratio)])
        lines += _family("expert_load_noise_ratio", [((), snapshot.experts.noise)])
        lines += _family("expert_load_significant", [((), int(snapshot.experts.significant))])
    if snapshot.preflight is not None:
        lines += _preflight_metrics(snapshot.preflight)
    return "\n".join(lines) + "\n"


def _speculation_metrics(kept: Kept) -> list[str]:
    shares: list[tuple[tuple[str, ...], float]] = [
        ((str(position),), share) for position, share in enumerate(kept.acceptance)
    ]
    return [
        *_family("speculation_acceptance_ratio", shares),
        *_family("speculation_tokens_per_step", [((), kept.tokens_per_step)]),
    ]


def _tier_metrics(state: TierState) -> list[str]:
    speeds: list[tuple[tuple[str, ...], float]] = [
        ((use.kind,), use.seconds_per_token) for use in state.used if use.seconds_per_token is not None
    ]
    lines = [
        *_family("kv_tier_size_bytes", [((kind,), size) for kind, size in state.sizes.items()]),
        *_family("kv_tier_evicted_bytes_total", [((kind,), size) for kind, size in state.evicted.items()]),
    ]
    if speeds:
        lines += _family("kv_tier_token_load_seconds", speeds)
    if state.compute is not None:
        lines += _family("kv_token_compute_seconds", [((), state.compute)])
    return lines


def _preflight_metrics(found: Result) -> list[str]:
    sizes = [((each.kind, str(each.bytes)), each) for each in found.collectives]
    lines = [
        *_family("preflight_outcome", [((each,), int(each == found.outcome)) for each in OUTCOMES]),
        *_family("preflight_bus_bandwidth_bytes_per_second", [(labels, each.bandwidth) for labels, each in sizes]),
        *_family("preflight_collective_seconds", [(labels, each.seconds) for labels, each in sizes]),
    ]
    if found.links:
        slowest = min(link.bandwidth for link in found.links)
        lines += _family("preflight_slowest_link_bytes_per_second", [((), slowest)])
    return lines


def _family(name: str, samples: list[tuple[tuple[str, ...], float]]) -> list[str]:
    return family(METRICS[f"twinpool_worker_{name}"], samples)
