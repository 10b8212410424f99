"""Three kinds of requests that want three ratios, and how they are drawn. Sizes in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from twinpool.simulate.traces import Request


@dataclass(frozen=True, slots=True)
class Kind:
    """Means of prompts and answers, both exponential; ``source`` says where they come from.

    ``requests`` are so many that a run is long beside one answer: what all fits at once would never wait.
    """

    name: str
    prompt: float
    output: float
    requests: int
    source: str


KINDS = (
    Kind("code completion", 2048, 28, 1500, "means of Azure's code trace of 2023 (Splitwise, ISCA'24)"),
    Kind("chat", 1155, 211, 2500, "means of Azure's conversation trace of 2023 (Splitwise, ISCA'24)"),
    Kind("reasoning", 500, 1500, 8000, "chosen: short questions with long answers"),
)


def requests(kind: Kind, count: int, seed: int) -> list[Request]:
    """Return ``count`` requests whose prompts have nothing in common, one a second in the mean (Poisson)."""
    dice, now, found = Random(seed), 0.0, []
    for _ in range(count):
        now += dice.expovariate(1.0)
        prompt = max(16, min(16_000, int(dice.expovariate(1 / kind.prompt))))
        found.append(Request(now, prompt, max(2, min(6000, int(dice.expovariate(1 / kind.output))))))
    return found
