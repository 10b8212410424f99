"""Which split of a model over GPUs serves most within the objectives: every feasible one is timed, and ranked.

Rooflines over data sheets with nothing overlapped and even routing of experts: good for ranking, never a measurement.
A split that an engine refuses is told apart from one that works and is poor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twinpool.core.communication import (
    REDUCES,
    Wire,
    expert_seconds,
    pipeline_seconds,
    tensor_seconds,
)
from twinpool.core.kv import kv_bytes_per_token_per_gpu
from twinpool.core.sizing import Memory, Split, Workload, memory
from twinpool.core.timing import decode_work, prefill_work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.core.accelerators import Accelerator
    from twinpool.core.kv import ModelShape

#: Requests that one engine runs at once (vLLM's default ``--max-num-seqs`` on large GPUs).
MOST_REQUESTS = 1024
#: GPUs of one replica that are looked at.
MOST_GPUS = 64
_POWERS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Network:
    """GPUs of a node (or of an NVLink domain), and bytes/s between two GPUs inside one and across two."""

    per_node: int = 8
    inside: float = 450e9
    across: float = 50e9

    def wire(self, gpus: int) -> Wire:
        """Return the widest link among so many GPUs that are as close as they can be."""
        return Wire(self.inside, 1e-6) if gpus <= self.per_node else Wire(self.across, 3e-6)


@dataclass(frozen=True, slots=True)
class Option:
    """One split and what it yields.

    Parameters
    ----------
    prefill, decode:
        Goodput: tokens/s for each GPU within the objectives, 0 where one cannot be met.
    requests:
        Requests at once on the replica at which ``decode`` is reached.
    prompt, token:
        Seconds of a prompt on an idle replica, and between two tokens with the requests that were asked for.
    problems, warnings:
        Why an engine refuses it, and what is legal but poor.
    """

    split: Split
    memory: Memory
    prefill: float
    decode: float
    requests: int
    prompt: float
    token: float
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """Return whether it fits and an engine takes it."""
        return self.memory.fits and not self.problems


def option(shape: ModelShape, gpu: Accelerator, split: Split, work: Workload, network: Network) -> Option:
    """Return what a split needs and yields on this GPU and network."""
    held = memory(shape, gpu, split, work)
    prompt = _stage(shape, gpu, split, network, work.prompt, prefill_work(shape, work.prompt, 0).flops, 0)
    asked = -(-work.concurrency // (split.data * split.pipeline))
    token = _decode(shape, gpu, split, work, network, asked) * split.pipeline
    batch = _batch(shape, gpu, split, work, network, held)
    step = _decode(shape, gpu, split, work, network, batch)
    return Option(
        split=split,
        memory=held,
        prefill=_prefill_goodput(prompt, split, work),
        decode=batch * split.data / step / split.gpus,
        requests=batch * split.data * split.pipeline,
        prompt=prompt * split.pipeline,
        token=token,
        problems=tuple(problems(shape, split, work)),
        warnings=tuple(_warnings(shape, split, work, network, token)),
    )


def _stage(
    shape: ModelShape, gpu: Accelerator, split: Split, network: Network, tokens: int, flops: float, context: int
) -> float:
    """Return the seconds of one pipeline stage for ``tokens`` on each data-parallel rank.

    Each GPU computes its share of its rank's FLOPs, and reads its share of the weights (of experts only those that some
    token of any rank is sent to) and of the KV of ``context`` tokens of its rank.
    """
    arithmetic = flops / (split.tensor * split.pipeline) / (gpu.peak(shape.weight_bytes) * gpu.flops_share)
    routed = shape.read(tokens * split.data) - shape.dense
    weights = shape.dense / split.tensor + routed / split.ranks
    read = weights * shape.weight_bytes + context * kv_bytes_per_token_per_gpu(shape, split.tensor)
    traffic = read / split.pipeline / (gpu.bandwidth * gpu.bandwidth_share)
    return gpu.overhead + max(arithmetic, traffic) + _talk(shape, split, network, tokens)


def _talk(shape: ModelShape, split: Split, network: Network, tokens: int) -> float:
    """Return the seconds in which the ranks of one stage talk: all-reduces, expert exchange, hop to the next stage."""
    reduces = tensor_seconds(shape, tokens, split.tensor, network.wire(split.tensor))
    experts = 0.0
    if shape.experts is not None and split.expert:
        # A layer with spread experts has one all-reduce less; its tokens are shared among the tensor ranks.
        reduces *= 1 - shape.experts.layers / (REDUCES * shape.layers)
        experts = _exchange(shape, split, network, tokens / split.tensor)
    hop = pipeline_seconds(shape, tokens, 2, network.wire(split.gpus)) if split.pipeline > 1 else 0.0
    return (reduces + experts) / split.pipeline + hop


def _exchange(shape: ModelShape, split: Split, network: Network, tokens: float) -> float:
    """Return the seconds of the experts' exchange: inside nodes and across them at the same time, so the longer one."""
    nodes = -(-split.ranks // network.per_node)
    inside = expert_seconds(shape, tokens / nodes, min(split.ranks, network.per_node), network.wire(1))
    return max(inside, expert_seconds(shape, tokens, nodes, Wire(network.across, 3e-6)))


def _decode(shape: ModelShape, gpu: Accelerator, split: Split, work: Workload, network: Network, batch: int) -> float:
    flops = batch * decode_work(shape, work.context).flops
    return _stage(shape, gpu, split, network, batch, flops, batch * work.context)


def _batch(shape: ModelShape, gpu: Accelerator, split: Split, work: Workload, network: Network, held: Memory) -> int:
    """Return the largest batch of a stage and rank that has room and keeps the time between tokens; 0 for none."""
    low, high = 0, min(held.requests // split.pipeline, MOST_REQUESTS // split.pipeline)
    while low < high:
        middle = (low + high + 1) // 2
        if _decode(shape, gpu, split, work, network, middle) * split.pipeline <= work.itl:
            low = middle
        else:
            high = middle - 1
    return low


def _prefill_goodput(stage: float, split: Split, work: Workload) -> float:
    """Return the prompt tokens/s for each GPU at which the mean wait is what the objective leaves.

    One queue in front of each rank, prompts of one length: M/D/1, whose mean wait is ``rho S / (2 (1 - rho))``
    (DistServe, OSDI'24, section 3.1, uses the same form).
    """
    left = work.ttft - stage * split.pipeline
    if left <= 0:
        return 0.0
    return 2 * left / (2 * left + stage) * work.prompt / stage * split.data / split.gpus


def problems(shape: ModelShape, split: Split, work: Workload) -> Iterator[str]:
    """Yield why vLLM refuses a split."""
    if shape.heads % split.tensor:
        yield f"{shape.heads} attention heads cannot be shared by {split.tensor} GPUs"
    elif shape.latent is None and shape.kv_heads % split.tensor and split.tensor % shape.kv_heads:
        yield f"{shape.kv_heads} KV heads can be neither shared by nor copied onto {split.tensor} GPUs evenly"
    if split.pipeline > shape.layers:
        yield f"{shape.layers} layers are fewer than {split.pipeline} stages"
    if shape.experts is None and (split.data > 1 or split.expert):
        yield "it has no experts: take more replicas instead of data or expert parallelism"
    elif shape.experts is not None and split.expert:
        slots = shape.experts.count + work.redundant
        if split.ranks > slots:
            yield f"{slots} experts are fewer than {split.ranks} GPUs"
        elif work.redundant and slots % split.ranks:
            yield f"{slots} experts with copies cannot be spread evenly over {split.ranks} GPUs"


def _warnings(shape: ModelShape, split: Split, work: Workload, network: Network, token: float) -> Iterator[str]:
    if shape.latent is not None and split.tensor > 1:
        yield f"the latent KV is kept on each of {split.tensor} GPUs: data parallelism would keep it once"
    elif split.tensor > shape.kv_heads:
        yield f"{shape.kv_heads} KV heads on {split.tensor} GPUs: the KV cache is kept more than once"
    if split.tensor > network.per_node:
        yield "every layer talks across nodes; keep it inside one NVLink domain"
    if shape.experts is not None and split.expert and split.ranks < network.per_node:
        yield f"experts are spread over {split.ranks} of {network.per_node} GPUs of a node: more would hold fewer each"
    if split.data > 1 and not split.expert:
        yield "experts are cut into parts: each layer gathers all ranks' tokens; spread whole experts instead"
    if token > work.itl:
        yield (
            f"with {work.concurrency} requests at once a token takes {token * 1e3:.0f} ms, more than the objective of "
            f"{work.itl * 1e3:.0f} ms"
        )


def options(
    shape: ModelShape, gpu: Accelerator, work: Workload, network: Network, role: str = "decode", most: int = MOST_GPUS
) -> list[Option]:
    """Return the feasible splits on at most ``most`` GPUs, those with most goodput of the role for each GPU first.

    Sizes are powers of two; stages share the layers evenly (engines take others, and their largest stage decides).
    """
    found = [option(shape, gpu, split, work, network) for split in _splits(shape, most)]

    def goodput(item: Option) -> tuple[float, int]:
        return -(item.prefill if role == "prefill" else item.decode), item.split.gpus

    return sorted((item for item in found if item.feasible), key=goodput)


def _splits(shape: ModelShape, most: int) -> Iterator[Split]:
    spread = shape.experts is not None
    for tensor in _POWERS:
        for pipeline in (count for count in _POWERS if shape.layers % count == 0):
            for data in _POWERS if spread else (1,):
                if tensor * pipeline * data <= most:
                    if data == 1:
                        yield Split(tensor, pipeline)
                    if spread and tensor * data > 1:
                        yield Split(tensor, pipeline, data, expert=True)


def prefill_per_decode(prompt: float, prefill: float, answer: float, decode: float) -> float:
    """Return how many prefill replicas one decode replica needs: tokens of a request over tokens/s, on both sides.

    What DeepSeek publishes of its nodes gives 0.73 (open-infra-index, day 6).
    """
    return (prompt / prefill) / (answer / decode)
