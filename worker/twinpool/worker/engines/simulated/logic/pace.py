"""How long the simulated engine takes: the roofline of :mod:`twinpool.core.timing`, or fixed speeds instead."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twinpool.core.economics import Prices, prices_of
from twinpool.core.kv import SHAPES, ModelShape, kv_bytes_per_token
from twinpool.core.timing import ACCELERATORS, Accelerator, Link, Work, prefill_work, step_seconds, transfer_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable


_LINK = Link()


@dataclass(frozen=True, slots=True)
class Pace:
    """The engine's speed. ``prefill_rate`` (tokens/s) and ``token_seconds`` (per decode step) replace the roofline."""

    shape: ModelShape = SHAPES["llama-3-8b"]
    gpu: Accelerator = ACCELERATORS["h100"]
    gpus: int = 1
    link: Link = _LINK
    prefill_rate: float | None = None
    token_seconds: float | None = None

    @property
    def prices(self) -> Prices:
        """Return what work costs at this pace, for choices between computing and moving."""
        found = prices_of(self.shape, self.gpu, self.gpus, self.link)
        if self.prefill_rate is None:
            return found
        return replace(
            found, overhead=0.0, weights=0.0, experts=0.0, context=0.0, pair=0.0, token=1 / self.prefill_rate
        )

    def step(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of a step that computes, for each sequence, (new tokens, tokens before them)."""
        chunks = list(chunks)
        prefill = [chunk for chunk in chunks if chunk[0] > 1]
        decode = [chunk for chunk in chunks if chunk[0] == 1]
        fixed, rest = 0.0, []
        if prefill and self.prefill_rate is not None:
            fixed += sum(new for new, _ in prefill) / self.prefill_rate
        else:
            rest += prefill
        if decode and self.token_seconds is not None:
            fixed += self.token_seconds
        else:
            rest += decode
        if not rest:
            return fixed
        return fixed + self._of_work(rest)

    def _of_work(self, chunks: list[tuple[int, int]]) -> float:
        work = sum((prefill_work(self.shape, new, before) for new, before in chunks), Work())
        return step_seconds(self.shape, self.gpu, work, self.gpus)

    def drafts(self, chunks: list[tuple[int, int]], share: float) -> float:
        """Return the seconds that a step takes longer for (drafted tokens, tokens before them) of its sequences.

        Checking them costs what the roofline says of a step that computes them too, over one that does not; nothing
        where each token has a fixed time. Drafting one token takes ``share`` of a decode step.
        """
        if not chunks:
            return 0.0
        alone = self.step((1, before) for _, before in chunks)
        draft = max(count for count, _ in chunks) * share * alone
        if self.token_seconds is not None:
            return draft
        reading = [(1, before) for _, before in chunks]
        checked = [(1 + count, before) for count, before in chunks]
        return draft + max(0.0, self._of_work(checked) - self._of_work(reading))

    def transfer_bytes(self, blocks: int, block_size: int) -> int:
        """Return the bytes of ``blocks`` KV blocks."""
        return kv_bytes_per_token(self.shape) * blocks * block_size

    def descriptors(self, blocks: int) -> int:
        """Return the pieces in which they move: keys and values of every layer are apart (vLLM's NIXL layout)."""
        return 2 * self.shape.layers * blocks

    def transfer(self, blocks: int, block_size: int) -> float:
        """Return the seconds that pulling ``blocks`` takes."""
        return transfer_seconds(self.link, self.transfer_bytes(blocks, block_size), self.descriptors(blocks))
