"""Whether some experts of a mixture are busier than chance makes them. Pure arithmetic, standard library only.

A step waits for the GPU with most to do. Even under even routing one GPU has more than the mean, the more so the fewer
tokens there are; skew below that is noise, and moving experts for it costs and wins nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Standard deviations, and excess over what even routing shows, from which skew is more than chance.
DEVIATIONS, EXCESS = 3.0, 1.1


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Tokens of one step that a GPU was sent in the mean, and at most; both added up over the layers."""

    mean: float
    most: float


@dataclass(frozen=True, slots=True)
class Balance:
    """Several steps together.

    Parameters
    ----------
    ratio:
        Load of the busiest GPU over the mean, by layer and step, weighted by load; 1 is even.
    noise:
        What even routing is expected to show at these loads.
    significant:
        Whether the ratio is too large for chance.
    steps:
        Steps that were looked at.
    """

    ratio: float
    noise: float
    significant: bool
    steps: int


def balance(steps: Sequence[StepLoad], ranks: int, layers: int) -> Balance | None:
    """Return how even the load of ``ranks`` GPUs over ``layers`` layers of experts was; None without tokens.

    Each maximum is taken to vary by one deviation of what it is the maximum of; it varies by less.
    """
    counted = [step for step in steps if step.mean > 0]
    total = sum(step.mean for step in counted)
    if not total or ranks < 2:
        return None
    expected = layers * sum(expected_most(step.mean / layers, ranks) for step in counted)
    deviation = math.sqrt(total)
    most = sum(step.most for step in counted)
    beyond = most - expected > DEVIATIONS * deviation and most > EXCESS * expected
    return Balance(most / total, expected / total, beyond, len(counted))


def expected_most(mean: float, ranks: int) -> float:
    """Return an upper bound of what the busiest of ``ranks`` GPUs is expected to get under even routing.

    Tokens of a GPU are binomial, whose moments are below those of Poisson: ``E[max] <= (ln R + m (e^t - 1)) / t`` for
    every ``t > 0`` (Jensen and a union bound; Boucheron, Lugosi, Massart, Concentration Inequalities, theorem 2.5). It
    is about ``m + sqrt(2 m ln R)`` for many tokens, and holds for few, of which a GPU may get all.
    """

    def bound(power: float) -> float:
        return (math.log(ranks) + mean * math.expm1(power)) / power

    low, high = 1e-6, 12.0
    for _ in range(60):
        third = (high - low) / 3
        if bound(low + third) < bound(high - third):
            high -= third
        else:
            low += third
    return min(bound(low), mean * ranks)
