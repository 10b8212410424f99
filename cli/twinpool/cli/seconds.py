"""The part of ``twinpool plan`` that says what a layout costs in seconds, per token and per handoff."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from twinpool.core.links import AT_LEAST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.core.links import LevelLink
    from twinpool.operator.logic.placement.seconds import Costs, RuleCost, Served

_WORDS = {"tensor": "tensor ranks", "span": "pipeline stages"}


def cost_lines(cost: Costs, what: Served) -> Iterable[str]:
    """Yield what is said to people."""
    yield (
        f"what that is in seconds, for prompts of {what.work.prompt} tokens and {what.work.concurrency} requests at "
        f"once on {what.gpu.name} (estimates, no request was measured):"
    )
    yield from (f"  {_rule(item)}" for item in cost.rules)
    for item in cost.handoffs:
        yield f"  handoff: {item.share:.0%} of the KV over {item.level}, {_time(item.seconds)} each"
    if cost.handoffs:
        rule = f"within {cost.wanted} {_time(cost.at_wanted)}, over the slowest links {_time(cost.anywhere)}"
        yield f"  handoff: {_time(cost.handoff)} in the mean; {rule}"
    for role, share in cost.lost.items():
        yield f"  spread: one {cost.spread} takes at most {share:.0%} of the {role} groups with it"


def _rule(item: RuleCost) -> str:
    groups = f"{item.groups} {item.role} group{'s' if item.groups > 1 else ''}"
    token = "prompt token" if item.role == "prefill" else "written token"
    return (
        f"{_WORDS[item.rule]} of {groups} over {item.level} (wanted: {item.wanted}): {_time(item.seconds)} for each "
        f"{token}, {_time(item.anywhere)} over the slowest links"
    )


def _time(seconds: float) -> str:
    """Return seconds in the unit that reads best."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def link_lines(links: Iterable[LevelLink]) -> Iterable[str]:
    """Yield what is known of each level's links that differs from what was said of them."""
    for link in links:
        found = link.measured
        if found is not None:
            few = "" if found.pairs >= AT_LEAST else f", counts from {AT_LEAST} on"
            yield (
                f"links of {link.level}: {_rate(link.used)} counts; {_rate(found.bandwidth)} measured (median of "
                f"{found.pairs} pairs{few}), {_rate(link.configured)} configured"
            )
        elif link.used != link.configured:
            yield f"links of {link.level}: {_rate(link.used)}, as those inside it, {_rate(link.configured)} configured"


def _rate(size: float) -> str:
    return f"{size / 1e9:.3g} GB/s"


def costs_json(cost: Costs) -> dict[str, Any]:
    """Return the same for machines, in seconds."""
    return {**asdict(cost), "handoff": cost.handoff}
