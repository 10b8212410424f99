"""How many tokens to draft for each sequence of a step (speculative decoding), and what that is expected to win.

A step that waits for memory checks a few more tokens for nothing; one that waits for arithmetic pays for each of them.
So drafting pays in small batches and costs in large ones. Standard library only, because launchers carry it. Always
true: the number of drafted tokens never grows with the batch, and drafting that wins less than :data:`MARGIN` is off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinpool.core.economics import Prices
    from twinpool.core.protocol import SpeculationMethod

#: Least advantage over no drafts at all: below it, what is assumed decides, not the arithmetic.
MARGIN = 1.05
#: Largest batch of a schedule; vLLM carries its last entry on.
MAX_BATCH = 1024
#: The batch that one fixed number is chosen for, and the tokens that stand before each sequence. Few, to be careful:
#: reading a long context takes time in which drafts are checked for nothing.
USUAL_BATCH, USUAL_CONTEXT = 32, 512


@dataclass(frozen=True, slots=True)
class Drafter:
    """A way to draft, before anything was measured.

    Parameters
    ----------
    acceptance:
        Probability that a drafted token is kept when those before it were.
    share:
        What drafting one token reads and computes, as a share of the model's own step.
    most:
        Most tokens that are worth considering.
    own_kv:
        Whether the drafter has a KV cache of its own, which prefill must then fill and hand over too.
    source:
        Where the figures come from.
    """

    acceptance: float
    share: float
    most: int
    own_kv: bool
    source: str


_HEAD = "; one layer and the output head are a tenth of an 8B model's weights"
#: Before the first answer nothing is known of the traffic: these are low ends of what was published.
DRAFTERS: dict[SpeculationMethod, Drafter] = {
    "ngram": Drafter(
        0.5, 0.0, 4, own_kv=False, source="https://github.com/vllm-project/vllm/issues/19254: 0.54 to 0.73"
    ),
    "suffix": Drafter(0.5, 0.0, 4, own_kv=False, source="taken as for ngram"),
    "draft_model": Drafter(
        0.6,
        0.1,
        5,
        own_kv=True,
        source="arXiv 2211.17192, table 2: 0.53 to 0.75; a draft of a tenth of the weights is assumed",
    ),
    "eagle": Drafter(0.6, 0.1, 5, own_kv=True, source="taken as below eagle3" + _HEAD),
    "eagle3": Drafter(
        0.65,
        0.1,
        5,
        own_kv=True,
        source="https://huggingface.co/nebius/EAGLE3-Llama-3.3-70B-Instruct: public drafts keep 1.8 of 7 on MT-bench"
        + _HEAD,
    ),
    "mtp": Drafter(
        0.85, 0.1, 2, own_kv=True, source="arXiv 2412.19437, section 5.4.3: 0.85 to 0.90 for the first" + _HEAD
    ),
}


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Return the tokens that a step is expected to give a sequence, the one that is always right among them.

    ``(1 - a^(g+1)) / (1 - a)``: Leviathan et al., arXiv 2211.17192, equation 1.
    """
    return float(sum(acceptance**position for position in range(drafted + 1)))


def step_seconds(prices: Prices, drafter: Drafter, batch: int, drafted: int, context: float) -> float:
    """Return the time to draft for, and check, ``batch`` sequences of ``context`` tokens each."""
    draft = drafter.share * (prices.step(batch, batch * context) - prices.overhead)
    return prices.verify(batch, drafted, batch * context) + drafted * draft


def speedup(prices: Prices, drafter: Drafter, batch: int, drafted: int, context: int = USUAL_CONTEXT) -> float:
    """Return the tokens per second with drafts, relative to none (SmartSpec's goodput, arXiv 2406.14066)."""
    alone = step_seconds(prices, drafter, batch, 0, context)
    return expected_tokens(drafter.acceptance, drafted) * alone / step_seconds(prices, drafter, batch, drafted, context)


def best(prices: Prices, drafter: Drafter, batch: int, most: int, context: int = USUAL_CONTEXT) -> int:
    """Return the number of tokens, at most ``most``, that gives most tokens per second; 0 when none wins enough."""
    gains = {count: speedup(prices, drafter, batch, count, context) for count in range(1, most + 1)}
    count = max(gains, key=gains.__getitem__, default=0)
    return count if count and gains[count] >= MARGIN else 0


def schedule(prices: Prices, drafter: Drafter, context: int = USUAL_CONTEXT) -> tuple[tuple[int, int, int], ...]:
    """Return (first batch, last batch, tokens) for every batch from 1 to :data:`MAX_BATCH`, without gaps."""
    entries: list[tuple[int, int, int]] = []
    most = drafter.most
    for batch in range(1, MAX_BATCH + 1):
        most = best(prices, drafter, batch, most, context)
        if entries and entries[-1][2] == most:
            entries[-1] = (entries[-1][0], batch, most)
        else:
            entries.append((batch, batch, most))
    return tuple(entries)
