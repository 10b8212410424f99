"""``twinpool explain --scaling``: the numbers of groups that a pool should have, why, and their last changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.cli.table import value_text
from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.core.scaling import ScalingFigures, ScalingStatus
    from twinpool.core.spec import InferencePool


def explained(pool: InferencePool, output: str) -> str:
    """Return what is to be said of a pool's scaling, as text or JSON.

    Raises
    ------
    TwinpoolError
        When the pool has no ``scaling``.
    """
    if pool.spec.scaling is None:
        raise TwinpoolError(f"pool {pool.metadata.name} has fixed replicas", "give it spec.scaling (docs/scaling.md)")
    found = _condition(pool)
    if output != "text":
        status = pool.status.scaling
        body = {
            "pool": pool.metadata.name,
            "limits": pool.spec.scaling.model_dump(mode="json", by_alias=True, exclude_none=True),
            "scaling": None if status is None else status.model_dump(mode="json", by_alias=True, exclude_none=True),
            "condition": found,
        }
        return value_text(body, output)
    return "".join(f"{line}\n" for line in _lines(pool, found))


def _condition(pool: InferencePool) -> dict[str, Any]:
    items = (item for item in pool.status.conditions if item.type == "ScalingActive")
    return next((item.model_dump(mode="json", by_alias=True) for item in items), {})


def _lines(pool: InferencePool, condition: dict[str, Any]) -> Iterator[str]:
    scaling, status = pool.spec.scaling, pool.status.scaling
    assert scaling is not None
    if status is None:
        yield "nothing has been decided yet: the operator has not looked at this pool"
        return
    there = {name: getattr(pool.status, name) for name in ("prefill", "decode")}
    for name, count in (("prefill", status.target.prefill), ("decode", status.target.decode)):
        bounds, role = getattr(scaling, name), there[name]
        ready = "" if role is None else f", {role.routable} serve"
        yield f"{name}: {count} groups wanted{ready} (from {bounds.min} to {bounds.max})"
    if scaling.gpu_budget is not None:
        yield f"GPU budget: {scaling.gpu_budget}"
    yield f"why: {status.reason}"
    if condition:
        yield f"now: {condition['reason']}: {condition['message']}"
    yield from _figures(status.figures, status.time)
    yield from _decisions(status)


def _figures(figures: ScalingFigures | None, time: str) -> Iterator[str]:
    if figures is None:
        return
    needs = [figures.need_prefill, figures.need_decode]
    prefill, decode = ("no number of" if need is None else str(need) for need in needs)
    yield f"figures of {time}:"
    yield f"  {figures.requests_per_second:g} requests/s, {figures.waiting} held back by routers"
    yield (
        f"  each: {figures.prefill_seconds:g} s of prefill for {figures.prompt_tokens:g} prompt tokens "
        f"({figures.hit_rate:.0%} cached), {figures.output_tokens:g} tokens written"
    )
    yield f"  waiting for prefill: {figures.backlog_seconds:g} s of work; being written: {figures.decoding:g} answers"
    yield (
        f"  engines take {figures.prefill_factor:g} times as long as the model to prefill and {figures.step_factor:g} "
        f"times for a token; groups took {figures.start_seconds:g} s to start"
    )
    yield f"  needed: {prefill} prefill and {decode} decode groups"


def _decisions(status: ScalingStatus) -> Iterator[str]:
    yield "last changes:" if status.decisions else "no changes yet"
    for item in status.decisions:
        before, after = item.before, item.after
        yield f"  {item.time}  {before.prefill}:{before.decode} -> {after.prefill}:{after.decode}  {item.reason}"
