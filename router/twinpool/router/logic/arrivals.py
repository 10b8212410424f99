"""The work that clients bring, counted as it arrives: what the number of workers is decided from.

Counted before the queue and before any worker, since what comes out of a saturated stage says nothing of what came in.
Always true: every number only grows (but for the logarithms), so a reader takes differences and misses nothing between
two looks; numbers of several processes add up.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple, dataclass

#: Legs to a worker from which nothing is learnt, because its engine was just started: caches and graphs are cold.
COLD_LEGS = 3
#: One timing counts at most as this factor, so that no stall decides alone.
_REACH = math.log(16.0)
#: What an answer weighs after the next one.
_KEPT = 0.98


@dataclass(slots=True)
class Arrivals:
    """Sums since the start of the process.

    Parameters
    ----------
    requests, prompt_tokens, output_tokens:
        Requests for the workers, their prompts and the longest answers that they may get; estimates in tokens.
    prefill, prefill_squared:
        Seconds of prefill that the uncached part of each prompt takes by ``economics.ASSUMED``, and their squares.
    answered_tokens, cached_tokens:
        Prompt tokens of prefills whose engine said how much of them it had cached, and those.
    streams, streamed_tokens:
        Streams that came to their end, and their tokens.
    prefill_log, prefills:
        Sum of log(observed / predicted) of prefills that found their worker idle, and their number.
    step_log, steps:
        The same of the time between two tokens, one value for each stream.
    """

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    prefill: float = 0.0
    prefill_squared: float = 0.0
    answered_tokens: int = 0
    cached_tokens: int = 0
    streams: int = 0
    streamed_tokens: int = 0
    prefill_log: float = 0.0
    prefills: int = 0
    step_log: float = 0.0
    steps: int = 0

    def arrived(self, prompt: int, output: int, prefill: float) -> None:
        """Count a request."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.prefill += prefill
        self.prefill_squared += prefill * prefill

    def cached(self, prompt: int, cached: int) -> None:
        """Count what an engine says that it had of a prompt."""
        self.answered_tokens += max(prompt, cached)
        self.cached_tokens += cached

    def streamed(self, tokens: int) -> None:
        """Count a stream that is complete."""
        self.streams += 1
        self.streamed_tokens += tokens

    def prefilled(self, predicted: float, observed: float) -> None:
        """Learn from the time of one prefill, both in seconds."""
        if predicted > 0 and observed > 0:
            self.prefill_log += _bounded(observed / predicted)
            self.prefills += 1

    def stepped(self, predicted: float, observed: float) -> None:
        """Learn from the time between the tokens of one stream, both in seconds."""
        if predicted > 0 and observed > 0:
            self.step_log += _bounded(observed / predicted)
            self.steps += 1


@dataclass(slots=True)
class HitRate:
    """Which share of their prompts the last hundred or so prefills found cached, by tokens."""

    tokens: float = 0.0
    cached: float = 0.0

    def learn(self, tokens: int, cached: int) -> None:
        """One more prefill is answered."""
        self.tokens = self.tokens * _KEPT + max(tokens, cached)
        self.cached = self.cached * _KEPT + cached

    @property
    def share(self) -> float:
        """Return the share; 0 as long as no engine has said anything."""
        return self.cached / self.tokens if self.tokens else 0.0


def _bounded(ratio: float) -> float:
    return max(-_REACH, min(_REACH, math.log(ratio)))


def total(several: Iterable[Arrivals]) -> Arrivals:
    """Add up what several processes counted."""
    return Arrivals(*map(sum, zip(*(astuple(one) for one in several), strict=True)))
