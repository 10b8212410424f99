"""Streams that lose their worker and go on: what the client gets is what one undisturbed engine would have written."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.router.logic import continuation
from twinpool.router.logic.continuation import Chunks, Stream, framed, possible
from twinpool.router.logic.request import Route, read

GREEDY: dict[str, Any] = {"model": "m", "prompt": "hello", "max_tokens": 8, "stream": True, "temperature": 0}


def request(**fields: Any) -> Any:
    return read(Route.COMPLETIONS, json.dumps({**GREEDY, **fields}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "n": 1, "top_p": 0.5, "seed": 1, "user": "u", "stop": None, "presence_penalty": 0.0},
        {"stream_options": {"include_usage": True}},
        {"stream_options": None, "prompt": [1, 2, 3], "logprobs": None, "repetition_penalty": 1.0},
    ],
)
def test_what_can_be_continued(fields: dict[str, Any]) -> None:
    assert possible(Route.COMPLETIONS, request(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.1},
        {"temperature": None},
        {"stream": False},
        {"n": 2},
        {"stop": ["x"]},
        {"stop": "x"},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 1},
        {"repetition_penalty": 1.1},
        {"logprobs": 0},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_json": {}},
        {"min_tokens": 2},
        {"logit_bias": {"1": 1}},
        {"echo": True},
        {"max_tokens": None},
        {"max_tokens": 0},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": {"include_usage": "?"}},
        {"some_field_of_tomorrow": 1},
        {"prompt": ["a", "b"]},
    ],
)
def test_what_cannot_be_continued(fields: dict[str, Any]) -> None:
    assert not possible(Route.COMPLETIONS, request(**fields))


def test_only_completions_are_continued() -> None:
    body = json.dumps({**GREEDY, "messages": [{"role": "user", "content": "hi"}]}).encode()
    assert not possible(Route.CHAT, read(Route.CHAT, body))
    assert not possible(Route.COMPLETIONS, read(Route.COMPLETIONS, b'{"prompt":"a","stream":true,"max_tokens":5}'))


def test_engines_are_asked_for_ids_and_prefill_is_not() -> None:
    asked = continuation.with_token_ids(request(return_token_ids=False))
    assert json.loads(asked.body) == {**GREEDY, "return_token_ids": True}
    assert "return_token_ids" not in continuation.with_token_ids(request()).fields


# One engine's stream, and the same in parts by several.

TEXTS = ["", "a", " b", "", "", " ccc", "d"]


class Writer:
    """Writes what the answer to a prompt of ids is, from any of its tokens on: token n of the answer is 100 + n."""

    def __init__(self, prompt: int, length: int, finish: str, identity: str, ids: bool) -> None:
        self.prompt, self.length, self.finish, self.identity, self.ids = prompt, length, finish, identity, ids

    def events(self, begin: int, usage: bool, merged: int) -> list[bytes]:
        found, head = [], {"id": self.identity, "object": "text_completion", "created": 1, "model": "m"}
        for start in range(begin, self.length, merged):
            those = range(start, min(start + merged, self.length))
            last = those[-1] == self.length - 1
            choice = {
                "index": 0,
                "text": "".join(TEXTS[n % len(TEXTS)] for n in those),
                "logprobs": None,
                "finish_reason": self.finish if last else None,
                "prompt_token_ids": [*range(self.prompt), *(100 + n for n in range(begin))]
                if self.ids and start == begin
                else None,
                "token_ids": [100 + n for n in those] if self.ids else None,
            }
            found.append({**head, "choices": [choice]})
        if usage:
            prompt, answer = self.prompt + begin, self.length - begin
            numbers = {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}
            found.append({**head, "choices": [], "usage": {**numbers, "prompt_tokens_details": {"cached_tokens": 3}}})
        lines = [json.dumps(event, separators=(",", ":")) for event in found]
        return [b"data: %b\n\n" % line.encode() for line in (*lines, "[DONE]")]


def taken(data: bytes) -> tuple[str, list[Any]]:
    """The text of a stream, and all its events."""
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    events = [line if line == "[DONE]" else json.loads(line) for line in lines]
    return "".join(e["choices"][0]["text"] for e in events if e != "[DONE]" and e.get("choices")), events


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 12), st.booleans(), st.booleans(), st.sampled_from(["stop", "length"]), st.data()
)
def test_any_number_of_losses_anywhere_gives_the_undisturbed_answer(
    prompt: int, length: int, usage: bool, by_ids: bool, finish: str, data: st.DataObject
) -> None:
    wanted = {"prompt": list(range(prompt))} if by_ids else {}
    options = {"stream_options": {"include_usage": True}} if usage else {}
    asked = request(max_tokens=length, **wanted, **options)
    stream, got, begin = Stream(asked), b"", 0
    ended = False
    for leg in range(data.draw(st.integers(0, 3)) + 1):
        merged = data.draw(st.integers(1, 3))
        events = Writer(prompt, length, finish, f"cmpl-{leg}", ids=True).events(begin, usage, merged)
        raw = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
        lost = leg < 3 and data.draw(st.booleans())
        raw = raw[: data.draw(st.integers(0, len(raw)))] if lost else raw
        step = data.draw(st.integers(1, 80))
        for start in range(0, len(raw), step):
            got += stream.feed(raw[start : start + step])
        assert not stream.broken
        if (missing := stream.ending()) is not None:
            got, ended = got + missing, True
            break
        rest = stream.rest()
        assert rest is not None
        fields = json.loads(rest.body)
        begin = length - fields["max_tokens"]
        known = list(range(prompt)) if by_ids else "hello"
        assert fields["prompt"] == ([*range(prompt), *(100 + n for n in range(begin))] if begin else known)
        assert fields["return_token_ids"]
    alone = Writer(prompt, length, finish, "cmpl-0", ids=False).events(0, usage, 1)
    text, events = taken(got)
    full_text, full_events = taken(b"".join(alone))
    assert full_text.startswith(text)
    assert len({(e["id"], e["created"]) for e in events if e != "[DONE]"}) <= 1
    assert all(e["choices"][0]["token_ids"] is None for e in events if e != "[DONE]" and e["choices"])
    assert all(e["choices"][0]["prompt_token_ids"] is None for e in events if e != "[DONE]" and e["choices"])
    if ended:
        assert text == full_text
        assert events[-1] == "[DONE]"
        assert events.count("[DONE]") == 1
        if usage:
            sums = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert [events[-2]["usage"][name] for name in sums] == [full_events[-2]["usage"][name] for name in sums]


def test_an_undisturbed_stream_is_the_engines_bytes() -> None:
    asked = request(stream_options={"include_usage": True})
    raw = b"".join(map(framed, Writer(2, 7, "stop", "cmpl-0", ids=True).events(0, True, 1)))
    alone = Writer(2, 7, "stop", "cmpl-0", ids=False).events(0, True, 1)
    stream = Stream(asked)
    assert stream.feed(raw) == b"".join(alone)
    assert stream.done
    assert stream.ending() == b""


@pytest.mark.parametrize("end", ["abort", "error"])
def test_an_engine_that_says_that_it_gave_up_is_lost_before_its_last_event(end: str) -> None:
    stream = Stream(request())
    events = Writer(2, 4, end, "cmpl-0", ids=True).events(0, False, 1)
    text, _ = taken(stream.feed(b"".join(map(framed, events))))
    assert text == "a b"  # the last event, which says so, is not passed on
    assert stream.broken
    rest = stream.rest()
    assert rest is not None
    assert json.loads(rest.body)["max_tokens"] == 5


def test_an_error_in_the_middle_and_an_early_end_are_losses() -> None:
    for last in (b'data: {"error":{"message":"dead","code":500}}\n\n', b"data: [DONE]\n\n"):
        stream = Stream(request())
        stream.feed(b"".join(map(framed, [*Writer(2, 4, "stop", "c", ids=True).events(0, False, 1)[:2], last])))
        assert stream.broken
        assert stream.rest() is not None


def test_what_is_not_understood_is_passed_on_and_then_not_continued() -> None:
    for odd in (
        b"data: nonsense\n\n",
        b'data: {"id":"c","choices":[{"text":"x"}]}\n\n',
    ):
        stream = Stream(request())
        assert stream.feed(framed(odd)) == odd
        assert stream.rest() is None
    stream = Stream(request())
    assert stream.feed(framed(b": ping\n\n")) == b": ping\n\n"
    assert stream.feed(framed(b'data: {"id":"c","choices":[]}\n\n')) == b'data: {"id":"c","choices":[]}\n\n'
    assert stream.rest() is not None


def test_nobody_goes_on_without_knowing_the_prompt_or_beyond_the_limit() -> None:
    for token_ids, limit in (([7], 8), ([7, 8], 2)):
        choice = {"text": "x", "token_ids": token_ids, "finish_reason": None}
        stream = Stream(request(max_tokens=limit, **({"prompt": [1]} if limit == 2 else {})))
        stream.feed(framed(b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode()))
        assert stream.rest() is None
    # The end is there, but its usage cannot be told without the prompt's length.
    choice = {"text": "x", "token_ids": [7], "finish_reason": "stop"}
    stream = Stream(request(stream_options={"include_usage": True}))
    stream.feed(framed(b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice]}).encode()))
    assert stream.ending() is None
    assert stream.rest() is None


def test_usage_of_a_later_worker_without_details_is_put_right() -> None:
    stream = Stream(request(prompt=[1, 2], stream_options={"include_usage": True}))
    first, second = (Writer(2, 3, "stop", name, ids=True) for name in ("c0", "c1"))
    stream.feed(b"".join(map(framed, first.events(0, True, 1)[:2])))
    assert stream.rest() is not None
    events = second.events(2, True, 1)
    bare = json.loads(events[-2].removeprefix(b"data: "))
    del bare["usage"]["prompt_tokens_details"]
    got = stream.feed(b"".join(map(framed, [*events[:-2], b"data: %b\n\n" % json.dumps(bare).encode(), events[-1]])))
    _, found = taken(got)
    assert found[-2]["usage"] == {"prompt_tokens": 2, "total_tokens": 5, "completion_tokens": 3}


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.integers(1, 30), st.booleans())
def test_chunks_come_out_however_they_are_split(payloads: list[bytes], step: int, extension: bool) -> None:
    size = b"%x;a=b\r\n" if extension else b"%x\r\n"
    raw = b"".join(size % len(p) + p + b"\r\n" for p in payloads) + b"0\r\nx-trailer: 1\r\n\r\n"
    chunks = Chunks()
    assert b"".join(chunks.feed(raw[n : n + step]) for n in range(0, len(raw), step)) == b"".join(payloads)


# Over the loopback: engines that die.

USAGE = {"stream_options": {"include_usage": True}}


def writes(kit: Any, until: int | None, how: str = "close", length: int = 6) -> Any:
    """An engine that writes an answer of ``length`` tokens, and is lost before event ``until``."""

    async def script(engine: Any, seen: Any) -> None:
        if seen.prefill:
            await kit.answer_normally(engine, seen)
            return
        body = seen.json
        prompt = body["prompt"] if isinstance(body["prompt"], list) else list(range(3))
        begin = max(0, len(prompt) - 3)
        writer = Writer(3, length, "length", f"cmpl-{engine.name}", ids=body.get("return_token_ids", False))
        events = writer.events(begin, "stream_options" in body, 1)
        seen.writer.write(kit.SSE_HEAD)
        for event in events[:until]:
            seen.writer.write(kit.chunk(event))
            await seen.writer.drain()
        if until is None:
            seen.writer.write(b"0\r\n\r\n")
        elif how == "close":
            seen.writer.close()
        elif how == "end":
            seen.writer.write(b"0\r\n\r\n")
        else:
            seen.writer.write(kit.chunk(b'data: {"error":{"message":"dead","code":500}}\n\n') + b"0\r\n\r\n")
        await seen.writer.drain()

    return script


@pytest.mark.parametrize("how", ["close", "end", "error event"])
@pytest.mark.parametrize("split", [True, False])
async def test_a_stream_goes_on_at_another_worker(make_router: Any, kit: Any, how: str, split: bool) -> None:
    router = await make_router(continuation=True, disaggregated=split)
    if split:
        await router.engine("prefill")
    first = await router.engine("decode", writes(kit, 3, how))
    second = await router.engine("decode", writes(kit, 3, how))
    router.pool.chooser._turns["decode"] = 1
    body = {**kit.STREAM, **GREEDY, **USAGE, "max_tokens": 6}
    second.script = writes(kit, None)
    for _ in range(2):  # both turns: the one that dies first, the other first
        answer = await router.ask(kit.post(body))
        text, events = taken(answer.body)
        assert text == "a b ccc"
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 6
        assert events[-2]["usage"]["prompt_tokens"] == 3
        assert len({e["id"] for e in events[:-1]}) == 1
    assert router.value("continuations_total", "resumed") >= 1
    assert router.value("broken_streams_total") <= 1
    rests = [seen.json for seen in (*first.requests, *second.requests) if isinstance(seen.json["prompt"], list)]
    assert [rest["prompt"] for rest in rests] == [[0, 1, 2, 100, 101, 102]] * len(rests)
    assert all(rest["max_tokens"] == 3 for rest in rests)
    await router.idle()


async def test_off_by_default_and_only_where_it_is_the_same(make_router: Any, kit: Any) -> None:
    for config, fields in (({}, {}), ({"continuation": True}, {"temperature": 1})):
        router = await make_router(disaggregated=False, **config)
        engines = [await router.engine("decode", writes(kit, 3)) for _ in range(2)]
        answer = await router.ask(kit.post({**kit.STREAM, **GREEDY, **fields}))
        assert b"worker_lost" in answer.body
        assert b"[DONE]" not in answer.body
        assert sum(len(engine.requests) for engine in engines) == 1
        assert not any(b"return_token_ids" in seen.body for engine in engines for seen in engine.requests)


async def test_a_stream_that_nobody_can_go_on_with_ends_with_an_error_event(make_router: Any, kit: Any) -> None:
    router = await make_router(continuation=True, disaggregated=False)
    (engine,) = [await router.engine("decode", writes(kit, 3))]

    async def refuse(engine: Any, seen: Any) -> None:
        if isinstance(seen.json["prompt"], list):
            await kit.always(refusals[-1])(engine, seen)
        else:
            await writes(kit, 3)(engine, seen)

    engine.script = refuse
    refusals = [
        kit.response(b'{"error":{}}', "400 Bad Request"),
        kit.response(b"{}"),
        kit.SSE_HEAD + kit.chunk(b'data: {"error":{"message":"no","code":400}}\n\n') + b"0\r\n\r\n",
    ]
    while refusals:
        answer = await router.ask(kit.post({**kit.STREAM, **GREEDY, "max_tokens": 6}))
        assert answer.status == 200
        text, events = taken(answer.body)
        assert text == "a b"
        assert events[-1]["error"]["code"] == "worker_lost"
        refusals.pop()
    assert router.value("continuations_total", "failed") == 3
    assert router.value("continuations_total", "resumed") == 0
    await router.idle()


async def test_an_answer_without_its_last_bytes_is_ended_here(make_router: Any, kit: Any) -> None:
    router = await make_router(continuation=True, disaggregated=False)
    engine = await router.engine("decode")
    for events in (6, 7, 8):  # all tokens; with the usage; with [DONE]
        engine.script = writes(kit, events)
        answer = await router.ask(kit.post({**kit.STREAM, **GREEDY, **USAGE, "max_tokens": 6}))
        text, found = taken(answer.body)
        assert text == "a b ccc"
        assert found[-2]["usage"]["total_tokens"] == 9
        assert found.count("[DONE]") == 1
    assert router.value("continuations_total", "finished") == 3
    assert len(engine.requests) == 3


async def test_a_worker_that_is_lost_before_its_answer_is_tried_again_as_ever(make_router: Any, kit: Any) -> None:
    router = await make_router(continuation=True, disaggregated=False)
    first = await router.engine("decode", kit.reset)
    second = await router.engine("decode", writes(kit, None))
    for _ in range(2):
        answer = await router.ask(kit.post({**kit.STREAM, **GREEDY, "max_tokens": 6}))
        assert taken(answer.body)[0] == "a b ccc"
    assert first.requests
    assert len(second.requests) == 2
    assert router.value("continuations_total", "resumed") == 0


async def test_what_is_no_stream_is_passed_on_as_it_is(make_router: Any, kit: Any) -> None:
    router = await make_router(continuation=True, disaggregated=False)
    engine = await router.engine("decode", kit.always(kit.response(b'{"error":{}}', "400 Bad Request")))
    answer = await router.ask(kit.post({**kit.STREAM, **GREEDY}))
    assert (answer.status, answer.body) == (400, b'{"error":{}}')
    engine.script = kit.always(kit.SSE_HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + b"data: x", close=True)
    client = await router.connect()
    client.send(kit.post({**kit.STREAM, **GREEDY}))
    assert (await client.rest()).endswith(b"data: x")


async def test_a_client_that_reads_slowly_holds_the_next_worker_back_too(make_router: Any, kit: Any) -> None:
    router = await make_router(continuation=True, disaggregated=False)
    text, length = "x" * 65536, 400

    def paused() -> bool:
        return any(client._paused for client in router.clients)

    async def endless(engine: Any, seen: Any) -> None:
        begin = len(seen.json["prompt"]) - 1
        seen.writer.write(kit.SSE_HEAD)
        for n in range(begin, length):
            ids = {"token_ids": [n], "finish_reason": "length" if n == length - 1 else None}
            event = {"id": "c", "choices": [{"index": 0, "text": text, **ids}]}
            seen.writer.write(kit.chunk(b"data: %b\n\n" % json.dumps(event).encode()))
            if not begin and paused():
                seen.writer.close()
                return
            await (seen.writer.drain() if begin else asyncio.sleep(0.001))
        seen.writer.write(kit.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    engines = [await router.engine("decode", endless) for _ in range(2)]
    client = await router.connect()
    client.writer.transport.pause_reading()
    client.send(
        kit.post({**kit.STREAM, **GREEDY, "prompt": [1], "max_tokens": length}, headers="Connection: close\r\n")
    )
    exchange = await kit.until(lambda: next((c._exchange for c in router.clients if c._exchange), None))
    await kit.until(paused, "the client holds its worker back")
    exchange._decode.upstream.give_up()
    await kit.until(lambda: exchange._state.continuations and exchange._streaming, "another worker goes on")
    assert exchange._decode.upstream.paused
    client.writer.transport.resume_reading()
    _, _, body = (await client.rest()).partition(b"\r\n\r\n")
    got, events = taken(Chunks().feed(body))
    assert len(got) == length * len(text)
    assert events[-1] == "[DONE]"
    assert sum(len(engine.requests) for engine in engines) == 2


async def test_a_client_that_leaves_a_continued_stream_leaves_nothing(make_router: Any, kit: Any) -> None:
    router = await make_router(continuation=True, disaggregated=False)
    first = await router.engine("decode", writes(kit, 3))
    second = await router.engine("decode", writes(kit, 3))

    async def wait(engine: Any, seen: Any) -> None:
        if isinstance(seen.json["prompt"], list):
            await kit.hang(engine, seen)
        else:
            await writes(kit, 3)(engine, seen)

    first.script = second.script = wait
    client = await router.connect()
    client.send(kit.post({**kit.STREAM, **GREEDY}))
    await kit.until(lambda: len(first.requests) + len(second.requests) == 2, "the rest is asked for")
    rest = next(s for e in (first, second) for s in e.requests if isinstance(s.json["prompt"], list))
    client.abort()
    await asyncio.wait_for(rest.aborted.wait(), 5)
    await router.idle()
