"""How far observed times are from predicted ones, learnt online: the one number that makes a model fit its hardware.

The factor is learnt on the logarithm, so that twice as slow and twice as fast weigh the same, and each sample moves it
by a bounded step, so that no outlier (a stall, a cold start, a wrong clock) can carry it away. Always true: the factor
stays within [1/64, 64].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Share of the distance to a sample that the factor goes: half of a change is learnt in about 14 samples.
_WEIGHT = 0.05
#: The farthest that one sample may be from the present factor and still count in full: a factor of two.
_REACH = math.log(2.0)
_LIMIT = math.log(64.0)


@dataclass(frozen=True, slots=True)
class Correction:
    """What predictions are to be multiplied by. ``samples`` counts what it was learnt from."""

    log_factor: float = 0.0
    samples: int = 0

    @property
    def factor(self) -> float:
        """Return observed over predicted."""
        return math.exp(self.log_factor)


def learn(correction: Correction, predicted: float, observed: float) -> Correction:
    """Return the correction after one more sample, both in seconds; ``predicted`` is the model's own, uncorrected.

    Samples without a positive time say nothing and change nothing. The first samples weigh more, so that a model that
    is wrong by a constant is right after a few dozen.
    """
    if not (predicted > 0 and 0 < observed < math.inf):
        return correction
    count = correction.samples + 1
    error = math.log(observed / predicted) - correction.log_factor
    step = max(_WEIGHT, 1 / (1 + count)) * max(-_REACH, min(_REACH, error))
    moved = max(-_LIMIT, min(_LIMIT, correction.log_factor + step))
    return Correction(moved, count)
