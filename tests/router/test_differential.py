"""Through the router or straight to one engine: the same request gets the same answer, field by field.

The engines are simulated ones that hand their KV over; what an answer says depends on every token of its prompt, so a
field that the handoff loses or changes shows.
"""

from __future__ import annotations

import json

import pytest

#: Fields of a request and whether such a request is split over two workers.
FIELDS = [
    ({}, True),
    ({"max_tokens": 7}, True),
    ({"max_tokens": 1}, True),
    ({"max_completion_tokens": 5, "max_tokens": 9}, True),
    ({"min_tokens": 3, "max_tokens": 6}, True),
    ({"max_tokens": None, "min_tokens": None, "stop": None}, True),
    ({"n": 1}, True),
    ({"n": 2, "max_tokens": 4}, False),
    ({"ignore_eos": True, "max_tokens": 12}, True),
    ({"stop": ["e", "zz"], "max_tokens": 30}, True),
    ({"stop_token_ids": [3, 5], "max_tokens": 20}, True),
    ({"cache_salt": "tenant-a", "max_tokens": 4}, True),
    ({"return_token_ids": True, "max_tokens": 4}, True),
    ({"temperature": 0, "seed": 12345678901234567890, "top_p": 1.0e-0, "max_tokens": 4}, True),
    ({"priority": -3, "user": "u", "unknown_field": {"a": [1]}, "max_tokens": 3}, True),
    ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto", "max_tokens": 3}, True),
    ({"response_format": {"type": "json_object"}, "max_tokens": 3}, True),
    ({"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "169.254.1.1"}, "max_tokens": 3}, True),
    ({"vllm_xargs": {"a": 1}, "max_tokens": 3}, True),
    # What the engine refuses is refused in its own words.
    ({"max_tokens": 0}, True),
    ({"max_tokens": "many"}, True),
    ({"max_tokens": 5000}, True),
    ({"min_tokens": 9, "max_tokens": 3}, True),
    ({"n": 1000}, False),
    ({"stop": [""]}, True),
    ({"stop": 7}, True),
]
COMPLETIONS = [
    ({"prompt": "other words"}, True),
    ({"prompt": [11, 12, 13]}, True),
    ({"prompt": ["one"]}, True),
    ({"prompt": [[11, 12]]}, True),
    ({"prompt": ["one", "two", "three"], "max_tokens": 3}, False),
    ({"prompt": [[1, 2], [3]], "n": 2, "max_tokens": 3}, False),
    ({"prompt": ""}, True),
    ({"prompt": []}, False),
    ({"prompt": [99999999]}, True),
    ({"prompt": "word " * 400}, True),
]
CHATS = [
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, True),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}]}, True),
    ({"messages": []}, True),
    ({"messages": [{"role": "user", "content": 7}]}, True),
]
BASES = {
    "/v1/completions": {"model": "m", "prompt": "a prompt of several words that is long enough for a block or two"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hello there " * 8}]},
}
CASES = [(path, *case) for path in BASES for case in FIELDS]
CASES += [("/v1/completions", *case) for case in COMPLETIONS] + [("/v1/chat/completions", *case) for case in CHATS]
STREAMS = ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}})


def meaning(answer) -> list[object]:
    """Return what an answer says, without the names that every answer has of its own."""
    if "event-stream" in answer.headers["content-type"]:
        lines = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
        documents = [json.loads(line) if line != b"[DONE]" else "[DONE]" for line in lines]
    else:
        documents = [answer.json]
    for document in documents:
        if isinstance(document, dict):
            for name in ("id", "created", "kv_transfer_params"):
                document.pop(name, None)
            usage = document.get("usage") or {}
            usage.pop("prompt_tokens_details", None)
    return [answer.status, *documents]


@pytest.mark.parametrize("stream", STREAMS, ids=["whole", "stream", "usage"])
async def test_a_split_request_answers_as_one_engine_does(twins, kit, stream):
    alone = kit.RawClient(*await kit.asyncio.open_connection(twins.alone, 8000))
    client = await twins.connect()
    for path, fields, split in CASES:
        request = kit.post({**BASES[path], **fields, **stream}, path)
        metrics = twins.apps["decode"].engine.metrics
        before = metrics.value("prompt_tokens_by_source", "external_kv_transfer")
        client.send(request)
        through = await client.answer()
        alone.send(request)
        straight = await alone.answer()
        assert meaning(through) == meaning(straight), (path, fields)
        pulled = metrics.value("prompt_tokens_by_source", "external_kv_transfer") - before
        assert bool(pulled) == (split and through.status == 200), (path, fields)
    alone.abort()
    await twins.idle()
    blocks = twins.apps["prefill"].engine.blocks
    limit = twins.apps["prefill"].engine.limits.kv_blocks
    await kit.until(lambda: blocks.free == limit, "no block waits on the prefill engine")


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_other_routes_answer_as_the_engine_does(twins, kit, path):
    body = {"model": "m", "prompt": "hello"} if path == "/tokenize" else {"model": "m", "tokens": [3, 4]}
    alone = kit.RawClient(*await kit.asyncio.open_connection(twins.alone, 8000))
    alone.send(kit.post(body, path))
    assert (await twins.ask(kit.post(body, path))).body == (await alone.answer()).body
    alone.abort()
