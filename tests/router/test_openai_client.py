"""The ``openai`` package, unchanged, against the router in front of a simulated prefill and decode engine."""

from __future__ import annotations

import asyncio

import openai
import pytest

MESSAGES = [{"role": "user", "content": "Which planets have rings?"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
async def client(twins):
    made = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{twins.port}/v1", api_key="unused", max_retries=0)
    async with made:
        yield made


async def test_models(client):
    assert [model.id async for model in client.models.list()] == ["m", "other"]


async def test_chat(client, twins):
    answer = await client.chat.completions.create(
        model="m", messages=MESSAGES, tools=TOOLS, max_completion_tokens=12, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 12
    assert answer.choices[0].finish_reason == "length"
    assert answer._request_id
    stream = await client.chat.completions.create(
        model="other",
        messages=MESSAGES,
        tools=TOOLS,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 12
    assert twins.value("handoffs_total", "remote", "") == 2


async def test_completions_at_once(client, twins):
    answers = await asyncio.gather(
        *(client.completions.create(model="m", prompt=f"number {n}", max_tokens=5) for n in range(30))
    )
    assert len({answer.id for answer in answers}) == 30
    assert twins.value("handoffs_total", "remote", "") == 30
    await twins.idle()


async def test_errors_are_the_packages_own(client, twins):
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=MESSAGES)
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=100_000)
    assert "maximum context length" in bad.value.message, "the engine's own words"
    with pytest.raises(openai.BadRequestError) as stored:
        await client.responses.create(model="m", input="x", previous_response_id="resp_1")
    assert stored.value.param == "previous_response_id"
    twins.pool.update(())
    with pytest.raises(openai.InternalServerError) as nobody:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert (nobody.value.status_code, nobody.value.code) == (503, "no_worker")
    assert int(nobody.value.response.headers["retry-after"]) > 0


async def test_leaving_a_stream_ends_the_work(client, twins, kit):
    stream = await client.completions.create(
        model="m", prompt="a long answer", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await twins.idle()
    for role in ("prefill", "decode"):
        engine = twins.apps[role].engine
        await kit.until(lambda engine=engine: engine.blocks.free == engine.limits.kv_blocks, f"no block held by {role}")


async def test_a_lost_worker_is_an_exception_not_a_short_answer(client, twins):
    stream = await client.completions.create(
        model="m",
        prompt="x",
        max_tokens=50,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"x-twinpool-fault": "reset-mid-stream=3"},
    )
    with pytest.raises(openai.APIError, match="worker was lost"):
        async for _ in stream:
            pass


async def test_without_asyncio(twins):
    def ask():
        with openai.OpenAI(base_url=f"http://127.0.0.1:{twins.port}/v1", api_key="unused", max_retries=0) as sync:
            whole = sync.completions.create(model="m", prompt="hello", max_tokens=6).choices[0].text
            pieces = sync.completions.create(model="m", prompt="hello", max_tokens=6, stream=True)
            return whole, "".join(piece.choices[0].text for piece in pieces)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed
