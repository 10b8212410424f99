"""What work costs on one worker, in seconds: the roofline of :mod:`twinpool.core.timing` flattened into coefficients.

Routers price every candidate of every request and the planner prices thousands of batches, so each price here is a few
multiplications. Always true: with the same shape and hardware these prices equal ``timing.step_seconds``, so router,
planner and simulator cannot disagree about what a token costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twinpool.core.kv import SHAPES, ModelShape, kv_bytes_per_token
from twinpool.core.timing import ACCELERATORS, Link

if TYPE_CHECKING:
    from twinpool.core.timing import Accelerator


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds per unit of work. The longer of two times is told without ``max``, whose call costs as much as the rest.

    Parameters
    ----------
    overhead:
        Every engine step, whatever its size.
    weights:
        Reading once the weights that every step reads: all but routed experts.
    context:
        Reading the KV of one token that stands before the step's tokens.
    token:
        Arithmetic of one token through the weights.
    pair:
        Attention of one token to one before it.
    pull_setup, pull_token:
        A handoff, and each prompt token of it that the decode worker does not hold.
    load_token:
        Bringing one cached token back from a slower tier of the same worker; 0 when there is none.
    experts, missed:
        Reading all routed experts of a mixture, and the share of them that one token is not sent to; 0 without.
    """

    overhead: float
    weights: float
    context: float
    token: float
    pair: float
    pull_setup: float
    pull_token: float
    load_token: float = 0.0
    experts: float = 0.0
    missed: float = 0.0

    def routed(self, tokens: float) -> float:
        """Return the time to read the experts of a mixture that a step of ``tokens`` is sent to.

        See :meth:`twinpool.core.experts.Experts.touched`.
        """
        return self.experts * (1 - math.pow(self.missed, tokens))

    def prefill(self, new: float, cached: float) -> float:
        """Return the time to compute ``new`` prompt tokens after ``cached`` ones in one step; 0 for none.

        Arithmetic or memory traffic, whichever is longer (Mooncake, FAST'25, equation 1, with causal attention).
        """
        if new <= 0:
            return 0.0
        arithmetic = new * (self.token + self.pair * (cached + new / 2))
        traffic = self.weights + self.context * cached
        if self.experts:
            traffic += self.routed(new)
        return self.overhead + (arithmetic if arithmetic > traffic else traffic)  # noqa: FURB136

    def step(self, batch: float, context: float) -> float:
        """Return the time of one decode step of ``batch`` sequences with ``context`` tokens in all; 0 for none.

        That is also the time between two tokens that each of them sees.
        """
        if batch <= 0:
            return 0.0
        arithmetic = batch * (self.token + self.pair / 2) + self.pair * context
        traffic = self.weights + self.context * context
        if self.experts:
            traffic += self.routed(batch)
        return self.overhead + (arithmetic if arithmetic > traffic else traffic)  # noqa: FURB136

    def verify(self, batch: float, drafted: int, context: float) -> float:
        """Return the time of a decode step that checks ``drafted`` tokens after the next one of each sequence.

        Every one of them is computed through the weights and compared with the context, which is read once.
        """
        if batch <= 0:
            return 0.0
        count = drafted + 1
        arithmetic = count * (batch * (self.token + self.pair * count / 2) + self.pair * context)
        traffic = self.weights + self.context * context
        if self.experts:
            traffic += self.routed(batch * count)
        return self.overhead + (arithmetic if arithmetic > traffic else traffic)  # noqa: FURB136

    def mixed(self, new: float, cached: float, batch: float, context: float) -> float:
        """Return the time of a step that computes ``new`` prompt tokens beside a decode batch (chunked prefill)."""
        arithmetic = new * (self.token + self.pair * (cached + new / 2))
        arithmetic += batch * (self.token + self.pair / 2) + self.pair * context
        traffic = self.weights + self.context * (cached + context)
        if self.experts:
            traffic += self.routed(new + batch)
        return self.overhead + (arithmetic if arithmetic > traffic else traffic)  # noqa: FURB136

    def interference(self, new: float, cached: float, batch: float, context: float) -> float:
        """Return the seconds for which ``new`` prompt tokens hold up each sequence of a decode batch."""
        if batch <= 0 or new <= 0:
            return 0.0
        return self.mixed(new, cached, batch, context) - self.step(batch, context)

    def whole(
        self, new: float, cached: float, batch: float, context: float, more: float
    ) -> tuple[float, float, float, float]:
        """Return what a whole request means on a worker that writes ``batch`` answers with ``context`` tokens in all.

        That is :meth:`prefill` of its ``new`` tokens after the ``cached`` ones and their :meth:`interference` with the
        answers, then :meth:`step` of those alone and with one of ``more`` tokens beside them. Routers ask this of each
        worker for each request, so it is written out: four calls would cost more than what they compute.
        """
        if self.experts or new <= 0:
            held_up, before = self.interference(new, cached, batch, context), self.step(batch, context)
            return self.prefill(new, cached), held_up, before, self.step(batch + 1, context + more)
        overhead, pair, kv = self.overhead, self.pair, self.context
        single = self.token + pair / 2
        arithmetic, traffic = new * (self.token + pair * (cached + new / 2)), self.weights + kv * cached
        prefill = overhead + (arithmetic if arithmetic > traffic else traffic)  # noqa: FURB136
        held_up = before = 0.0
        if batch > 0:
            before, reads = batch * single + pair * context, self.weights + kv * context
            arithmetic, traffic = arithmetic + before, traffic + kv * context
            before = before if before > reads else reads  # noqa: FURB136
            held_up = (arithmetic if arithmetic > traffic else traffic) - before  # noqa: FURB136
            before += overhead
        context += more
        after, reads = (batch + 1) * single + pair * context, self.weights + kv * context
        return prefill, held_up, before, overhead + (after if after > reads else reads)  # noqa: FURB136

    def pull(self, missing: float) -> float:
        """Return the time to hand over ``missing`` prompt tokens; a pull overlaps nothing (NIXL)."""
        return self.pull_setup + self.pull_token * missing if missing > 0 else 0.0

    def warm(self, prompt: float, device: float, held: float) -> float:
        """Return the time of a prompt whose first ``device`` tokens are on the accelerator and first ``held`` anywhere.

        What a slower tier holds is loaded only when that beats computing it.
        """
        compute = self.prefill(prompt - device, device)
        if held <= device:
            return compute
        return min(compute, self.load_token * (held - device) + self.prefill(prompt - held, held))

    def scaled(self, factor: float) -> Prices:
        """Return the prices of an engine that takes ``factor`` times as long to compute; transfers are as they were."""
        return replace(
            self,
            overhead=self.overhead * factor,
            weights=self.weights * factor,
            experts=self.experts * factor,
            context=self.context * factor,
            token=self.token * factor,
            pair=self.pair * factor,
        )


def prices_of(
    shape: ModelShape, gpu: Accelerator, gpus: int = 1, link: Link | None = None, block_size: int = 16
) -> Prices:
    """Return the prices of ``shape`` on ``gpus`` GPUs, its KV moving over ``link`` in blocks of ``block_size`` tokens.

    Two FLOPs per weight and token and four per layer, head element and token pair (see ``timing.prefill_work``); one
    descriptor for the keys and one for the values of each layer and block (vLLM's NIXL layout). Of a mixture a step
    reads the experts that its tokens are sent to.
    """
    link = link or Link()
    flops = gpus * gpu.peak(shape.weight_bytes) * gpu.flops_share
    bandwidth = gpus * gpu.bandwidth * gpu.bandwidth_share
    kv = kv_bytes_per_token(shape)
    experts = shape.experts
    return Prices(
        overhead=gpu.overhead,
        weights=shape.dense * shape.weight_bytes / bandwidth,
        context=kv / bandwidth,
        token=2 * shape.active / flops,
        pair=4 * shape.layers * shape.heads * shape.head_dim / flops,
        pull_setup=link.setup,
        pull_token=kv / link.bandwidth + 2 * shape.layers * link.per_descriptor / block_size,
        experts=experts.total * shape.weight_bytes / bandwidth if experts else 0.0,
        missed=1 - experts.per_token / experts.count if experts else 0.0,
    )


#: What is assumed of a worker about which nothing is known yet: an 8B model on one H100 over 200 Gbit/s. Choices among
#: equal workers depend on the proportions alone, and observed times correct the scale (``twinpool.core.correction``).
ASSUMED = prices_of(SHAPES["llama-3-8b"], ACCELERATORS["h100"])
