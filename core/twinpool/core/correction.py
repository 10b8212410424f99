"""How far observed times are from predicted ones, learnt online: the one number that makes a model fit its hardware.

The factor is learnt on the logarithm, so that twice as slow and twice as fast weigh the same, and each sample moves it
by a bounded step, so that no outlier (a stall, a cold start, a wrong clock) can carry it away. Always true: the factor
stays within [1/64, 64].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

#: Share of the distance to a sample that the factor goes: half of a change is learnt in about 14 samples.
_WEIGHT = 0.05
#: Samples before this one weigh more than that.
_FIRST = round(1 / _WEIGHT) - 1
#: The farthest that one sample may be from the present factor and still count in full: a factor of two.
_REACH = math.log(2.0)
_LIMIT = math.log(64.0)


@dataclass(slots=True)
class Correction:
    """What predictions are to be multiplied by. ``samples`` counts what it was learnt from."""

    log_factor: float = 0.0
    samples: int = 0
    #: Observed over predicted. Kept beside its logarithm, as it is asked for more often than anything is learnt.
    factor: float = field(init=False)

    def __post_init__(self) -> None:
        self.factor = math.exp(self.log_factor)

    def learn(self, predicted: float, observed: float) -> None:
        """Learn from one more sample, both in seconds; ``predicted`` is the model's own, uncorrected.

        Samples without a positive time say nothing and change nothing. The first samples weigh more, so that a model
        that is wrong by a constant is right after a few dozen.
        """
        if not (predicted > 0 and 0 < observed < math.inf):
            return
        self.samples = count = self.samples + 1
        known = self.log_factor
        error = math.log(observed / predicted) - known
        if not -_REACH < error < _REACH:
            error = math.copysign(_REACH, error)
        known += error / (1 + count) if count < _FIRST else error * _WEIGHT
        if not -_LIMIT < known < _LIMIT:
            known = math.copysign(_LIMIT, known)
        self.log_factor, self.factor = known, math.exp(known)
