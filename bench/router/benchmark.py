"""CPU of the router per streamed request and per event, beside other routers under the same load."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.harness.cell import Bar, Cell
from bench.harness.cpu import cpu_seconds
from bench.harness.load import stream
from bench.router import routers
from bench.router.peers import SMG, VLLM
from bench.router.routers import HEADERS, HOST, Engines, Running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TITLE = "router: CPU per streamed request"

_CHUNKS = 16
_PACED_CHUNKS = 60
_PAUSE = 0.02
#: Prompts share seven eighths within a family, as chats of one application do.
_FAMILIES = 64
_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class _Row:
    """One row: what runs, which load, and what it is divided by."""

    what: str
    unit: str
    ours: Running
    beside: Running | None
    at_most: float
    note: str
    bodies: tuple[bytes, ...]
    #: Requests of a full and of a quick sample, how many at a time, and by what the CPU seconds are divided.
    full: int
    quick: int
    streams: int
    per: float


def prompts(characters: int) -> tuple[bytes, ...]:
    """Return bodies whose prompts have so many characters."""
    rng = random.Random(1)
    words = [f"w{number:05d}" for number in range(20_000)]

    def text(size: int) -> str:
        return " ".join(rng.choices(words, k=size // 7 + 1))[:size]

    shared = [text(characters * 7 // 8) for _ in range(_FAMILIES)]
    made = []
    for number in range(_PROMPTS):
        prompt = shared[number % _FAMILIES] + text(characters - characters * 7 // 8)
        body = {"model": "m", "prompt": prompt, "max_tokens": _CHUNKS, "stream": True, "ignore_eos": True}
        made.append(json.dumps(body).encode())
    return tuple(made)


@contextmanager
def cells(quick: bool) -> Iterator[list[Cell]]:
    """Start the engines, our router once for each row and the peers beside it."""
    with ExitStack() as stack:
        whole = [routers.engine(stack, "decode", _CHUNKS) for _ in range(2)]
        split = [routers.engine(stack, "prefill", _CHUNKS) for _ in range(2)] + whole
        paced = [routers.engine(stack, "decode", _PACED_CHUNKS, _PAUSE) for _ in range(2)]
        yield [_cell(row, quick) for row in _rows(stack, whole, split, paced)]


def _rows(stack: ExitStack, whole: Engines, split: Engines, paced: Engines) -> Iterator[_Row]:
    spans = routers.collector(stack)
    request = "CPU s / 1k requests"
    short, long = prompts(200), prompts(32_000)
    yield _Row(
        f"whole requests, round robin, {_CHUNKS} events", request, routers.ours(stack, whole, "round-robin", spans),
        routers.vllm_router(stack, whole), 0.75, f"{VLLM}, round robin", short, 12_000, 4000, 32, 1000,
    )  # fmt: skip
    yield _Row(
        f"prefill and decode, {_CHUNKS} events", request, routers.ours(stack, split, "round-robin", spans),
        routers.vllm_router(stack, split), 0.5, f"{VLLM}, round robin", short, 12_000, 4000, 32, 1000,
    )  # fmt: skip
    prefix, smg = routers.ours(stack, whole, "price", spans), routers.smg(stack, whole)
    yield _Row(
        "prefix-aware, 200 characters", request, prefix, smg, 0.3, f"{SMG}, cache_aware", short,
        12_000, 3000, 32, 1000,
    )  # fmt: skip
    yield _Row(
        "prefix-aware, 32,000 characters", request, prefix, smg, 0.5, f"{SMG}, cache_aware", long,
        4000, 1000, 32, 1000,
    )  # fmt: skip
    yield _Row(
        f"events {_PAUSE * 1000:g} ms apart, 200 streams", "CPU s / 1k events",
        routers.ours(stack, paced, "round-robin", spans), routers.vllm_router(stack, paced), 0.8,
        f"{VLLM}, round robin", short, 2000, 400, 200, 1000 / _PACED_CHUNKS,
    )  # fmt: skip


def _cell(row: _Row, quick: bool) -> Cell:
    beside = row.beside
    return Cell(
        what=row.what,
        unit=row.unit,
        ours=_sampler(row, row.ours, quick),
        beside=_sampler(row, beside, quick) if beside is not None else None,
        bar=Bar("ratio", at_most=row.at_most) if beside is not None else None,
        note=f"{row.what}: beside {row.note}, in front of the same engines, which do nothing but write a fixed stream"
        if beside is not None
        else f"{row.what}: {row.note} could not be installed here, so nothing stands beside",
    )


def _sampler(row: _Row, running: Running, quick: bool) -> Callable[[], float]:
    pid, port = running

    def sample() -> float:
        requests = row.quick if quick else row.full
        before = cpu_seconds(pid)
        stream(HOST, port, "/v1/completions", row.bodies, row.streams, requests, HEADERS)
        return (cpu_seconds(pid) - before) / requests * row.per

    return sample
