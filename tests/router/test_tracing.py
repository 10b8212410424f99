"""Spans of a request over both hops: parents, times, and what engines are told."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from twinpool.router.logic.trace import parent
from twinpool.router.shell.tracing import Tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
CLIENT = f"traceparent: 00-{TRACE:032x}-{SPAN:016x}-01\r\n"


class Traced:
    """A router whose spans are kept."""

    def __init__(self, router: Any) -> None:
        self.router = router
        self._kept = InMemorySpanExporter()
        router.pool.tracing = Tracing(router.pool.config, Random(1), self._kept)

    async def spans(self) -> dict[str, Any]:
        """Return the spans by name, once the requests have ended."""
        await self.router.idle()
        await asyncio.to_thread(self.router.pool.tracing._provider.force_flush)
        return {span.name: span for span in self._kept.get_finished_spans()}

    async def heard(self) -> dict[str, str]:
        """Return the ``traceparent`` that each engine got."""
        seen = {}
        for engine in self.router.engines:
            request = next(request for request in engine.requests if request.method == "POST")
            seen[engine.role] = request.headers.get("traceparent", "")
        return seen


@pytest.fixture
async def traced(make_router: Any) -> AsyncIterator[Any]:
    made: list[Traced] = []

    async def make(sampling: float = 1.0) -> Traced:
        router = await make_router(tracing_url="http://collector/v1/traces", tracing_sampling=sampling)
        await router.engine("prefill")
        await router.engine("decode")
        made.append(Traced(router))
        return made[-1]

    yield make
    for item in made:
        await asyncio.to_thread(item.router.pool.tracing.close)


async def test_both_hops_are_children_of_the_request_and_engines_of_their_hop(traced: Any, kit: Any) -> None:
    made = await traced()
    await made.router.ask(kit.post(kit.STREAM, headers=CLIENT))
    spans = await made.spans()
    assert set(spans) == {"POST /v1/completions", "queue", "prefill", "decode"}
    root = spans.pop("POST /v1/completions")
    assert (root.context.trace_id, root.parent.span_id) == (TRACE, SPAN)
    assert {span.parent.span_id for span in spans.values()} == {root.context.span_id}
    for role, header in (await made.heard()).items():
        told = parent(header.encode())
        assert told is not None
        assert (told.trace, told.span, told.sampled) == (TRACE, spans[role].context.span_id, True)
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["twinpool.handoff"] == "remote"
    assert [event.name for event in spans["decode"].events] == ["first token"]


async def test_the_parts_follow_each_other_and_add_up_to_the_whole(traced: Any, kit: Any) -> None:
    made = await traced()
    await made.router.ask(kit.post(kit.STREAM))
    spans = await made.spans()
    root = spans["POST /v1/completions"]
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    assert root.parent is None
    assert root.start_time == queue.start_time
    assert queue.end_time <= prefill.start_time <= prefill.end_time <= decode.start_time <= decode.end_time
    assert decode.end_time <= root.end_time
    parts = sum(span.end_time - span.start_time for span in (queue, prefill, decode))
    whole = root.end_time - root.start_time
    assert parts <= whole
    gaps = (prefill.start_time - queue.end_time) + (decode.start_time - prefill.end_time)
    assert whole - parts == gaps + (root.end_time - decode.end_time), "nothing else lies between"


async def test_a_failed_leg_says_why_and_its_successor_follows(traced: Any, kit: Any) -> None:
    made = await traced()
    made.router.engines[0].script = kit.reset
    await made.router.ask(kit.post(kit.STREAM))
    spans = await made.spans()
    assert spans["prefill"].status.status_code.name == "ERROR"
    assert spans["prefill"].attributes["error.type"] == "connection_lost"
    assert spans["POST /v1/completions"].attributes["twinpool.handoff"] == "local"


async def test_what_is_not_sampled_leaves_no_span_and_keeps_the_clients_word(traced: Any, kit: Any) -> None:
    made = await traced(0.0)
    unsampled = CLIENT.replace("-01\r", "-00\r")
    await made.router.ask(kit.post(kit.STREAM, headers=unsampled))
    assert set((await made.heard()).values()) == {unsampled.strip().removeprefix("traceparent: ")}
    assert await made.spans() == {}


async def test_a_client_that_traces_is_traced_whatever_the_share(traced: Any, kit: Any) -> None:
    made = await traced(0.0)
    await made.router.ask(kit.post(kit.STREAM, headers=CLIENT))
    assert "decode" in await made.spans()


async def test_a_request_that_is_refused_has_a_span_with_its_status(traced: Any, kit: Any) -> None:
    made = await traced()
    made.router.engines.clear()
    made.router.publish()
    answer = await made.router.ask(kit.post(kit.STREAM))
    root = (await made.spans())["POST /v1/completions"]
    assert root.attributes["http.response.status_code"] == answer.status == 503
    assert root.status.status_code.name == "ERROR"
