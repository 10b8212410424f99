"""Requests through the data plane: handoff, streaming, and everything that is answered without a worker."""

from __future__ import annotations

import json

import pytest

GUARD = {"do_remote_prefill": True, "remote_host": "169.254.169.254", "remote_port": 1}


async def test_a_stream_is_prefilled_and_decoded_by_two_workers(router, kit):
    prefill, decode = router.engines
    answer = await router.ask(kit.post(kit.STREAM, headers="X-Request-Id: abc\r\ntraceparent: 00-1-2-01\r\n"))
    assert answer.status == 200
    assert answer.body == b"".join(kit.EVENTS)
    assert answer.headers["x-request-id"] == "abc"
    (p,), (d,) = prefill.requests, decode.requests
    assert p.json == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert d.json == {**kit.STREAM, "kv_transfer_params": kit.PARAMS}
    assert d.body.startswith(json.dumps(kit.STREAM).encode()[:-1])
    assert p.headers["x-request-id"] == d.headers["x-request-id"] == "abc"
    assert p.headers["traceparent"] == d.headers["traceparent"] == "00-1-2-01"
    assert router.value("handoffs_total", "remote", "") == 1
    assert router.value("requests_total", "/v1/completions", "200") == 1
    await router.idle()


async def test_the_answer_is_the_engines_bytes_with_only_hop_headers_changed(router, kit):
    answer = await router.ask(kit.post(kit.STREAM))
    head, _, rest = kit.SSE.partition(b"\r\n\r\n")
    got_head, _, got_rest = answer.raw.partition(b"\r\n\r\n")
    assert got_rest == rest
    assert got_head.startswith(head)
    assert got_head[len(head) :].startswith(b"\r\nx-request-id: ")


async def test_connections_to_workers_are_kept(router, kit):
    client = await router.connect()
    for _ in range(20):
        client.send(kit.post(kit.STREAM))
        assert (await client.answer()).status == 200
    assert [e.connections for e in router.engines] == [1, 1]


async def test_forged_parameters_and_rank_headers_reach_no_worker(router, kit):
    body = json.dumps({**kit.PROMPT, "ec_transfer_params": GUARD, "vllm_xargs": {"kv_transfer_params": GUARD, "a": 1}})
    forged = body[:-1] + ',"kv_transfer_params":%s,"kv\\u005ftransfer_params":%s}' % ((json.dumps(GUARD),) * 2)
    for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
        await router.ask(kit.post(forged.encode(), path, "X-data-parallel-rank: 7\r\nX-Prefiller-Host-Port: a:1\r\n"))
    seen = [r for e in router.engines for r in e.requests]
    assert len(seen) == 4
    for request in seen:
        assert b"169.254" not in request.body
        assert not {"x-data-parallel-rank", "x-prefiller-host-port"} & request.headers.keys()
        assert request.json["vllm_xargs"] == {"a": 1}


async def test_what_cannot_be_split_is_served_whole_by_decode(router, kit):
    prefill, decode = router.engines
    for extra in ({"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"best_of": 3}, {"prompt_logprobs": 1}):
        body = {**kit.PROMPT, **extra}
        answer = await router.ask(kit.post(body))
        assert answer.json == {"served_by": "decode-0"}
        assert decode.requests[-1].json == body
    assert not prefill.requests


async def test_pass_through_routes_go_to_decode(router, kit):
    prefill, decode = router.engines
    for path in ("/v1/embeddings", "/tokenize", "/detokenize"):
        answer = await router.ask(kit.post({"model": "m", "input": "x"}, path + "?q=1"))
        assert answer.json == {"served_by": "decode-0"}
        assert decode.requests[-1].target == path + "?q=1"
    assert not prefill.requests


async def test_an_alias_reaches_the_engine_as_the_models_name(router, kit):
    body = b'{"prompt":"hello", "model" : "other","max_tokens":5,"top_p":1.0e-0}'
    assert (await router.ask(kit.post(body))).status == 200
    for engine in router.engines:
        assert engine.requests[0].json["model"] == "m"
    assert router.engines[1].requests[0].body.startswith(b'{"prompt":"hello","model":"m","max_tokens":5,"top_p":1.0e-0')
    models = await router.ask(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
    assert [(entry["id"], entry["root"]) for entry in models.json["data"]] == [("m", "m"), ("other", "m")]


async def test_an_adapter_is_asked_for_by_its_own_name(make_router, kit):
    router = await make_router(adapters=("sql", "legal"))
    await router.engine("prefill")
    await router.engine("decode")
    assert (await router.ask(kit.post({"model": "sql", "prompt": "hello", "max_tokens": 5}))).status == 200
    assert [engine.requests[0].json["model"] for engine in router.engines] == ["sql", "sql"], "on both hops"
    models = (await router.ask(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")).json["data"]
    assert [(entry["id"], entry["root"], entry.get("parent")) for entry in models] == [
        ("m", "m", None),
        ("other", "m", None),
        ("sql", "sql", "m"),
        ("legal", "legal", "m"),
    ]
    unknown = await router.ask(kit.post({"model": "poems", "prompt": "hello"}))
    assert unknown.status == 404
    assert "This pool serves 'm', 'other', 'sql', 'legal'." in unknown.error["message"]


async def test_responses_and_messages_are_served_whole_and_stored_ones_refused(router, kit):
    prefill, decode = router.engines
    for path in ("/v1/responses", "/v1/messages"):
        body = {"model": "m", "input": "x", "store": False, "previous_response_id": None}
        answer = await router.ask(kit.post(body, path))
        assert answer.json == {"served_by": "decode-0"}
        assert decode.requests[-1].json == body
    assert not prefill.requests
    for name, value in (("store", True), ("previous_response_id", "r1"), ("background", True), ("conversation", "c")):
        answer = await router.ask(kit.post({"model": "m", "input": "x", name: value}, "/v1/responses"))
        assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "stateless", name)
    assert len(decode.requests) == 2


@pytest.mark.parametrize("size", [6_200, 32_000, 128_000, 4_000_000, 20_000_000])
async def test_long_prompts_pass(router, kit, size):
    prompt = "long " * (size // 5)
    answer = await router.ask(kit.post({**kit.STREAM, "prompt": prompt}))
    assert (answer.status, answer.body) == (200, b"".join(kit.EVENTS))
    assert all(engine.requests[-1].json["prompt"] == prompt for engine in router.engines)


async def test_an_aggregated_pool_sends_whole_requests(make_router, kit):
    router = await make_router(disaggregated=False, connector=None)
    decode = await router.engine("decode")
    answer = await router.ask(kit.post(kit.STREAM))
    assert answer.body == b"".join(kit.EVENTS)
    assert decode.requests[0].body == json.dumps(kit.STREAM).encode()


async def test_own_pages_and_refusals(router, kit):
    models = await router.ask(b"GET /v1/models HTTP/1.1\r\nHost: r\r\n\r\n")
    assert [m["id"] for m in models.json["data"]] == ["m", "other"]
    health = await router.ask(b"GET /health HTTP/1.1\r\nHost: r\r\n\r\n")
    assert (health.status, health.json) == (200, {"status": "ok"})
    unknown = await router.ask(b"GET /nothing HTTP/1.1\r\nHost: r\r\n\r\n")
    assert unknown.status == 404
    assert "/v1/chat/completions" in unknown.error["message"]
    method = await router.ask(b"GET /v1/completions HTTP/1.1\r\nHost: r\r\n\r\n")
    assert (method.status, method.headers["allow"]) == (405, "POST")
    assert (await router.ask(kit.post({}, "/v1/models"))).headers["allow"] == "GET"
    model = await router.ask(kit.post({**kit.PROMPT, "model": "nope"}))
    assert model.status == 404
    assert model.error["code"] == "model_not_found"
    assert "'m', 'other'" in model.error["message"]
    broken = await router.ask(kit.post(b'{"model":'))
    assert broken.status == 400
    assert "not valid JSON" in broken.error["message"]
    assert not any(e.requests for e in router.engines)


async def test_without_a_decode_worker_the_client_is_told_to_come_back(make_router, kit):
    router = await make_router()
    answer = await router.ask(kit.post(kit.STREAM))
    assert answer.status == 503
    assert answer.error["code"] == "no_worker"
    assert int(answer.headers["retry-after"]) > 0


async def test_handoffs_stay_within_a_revision(make_router, kit):
    router = await make_router(policy="random")
    for revision in ("old", "new"):
        await router.engine("prefill", revision=revision)
        await router.engine("decode", revision=revision)
    await router.engine("prefill", revision="lonely")
    ids: dict[str, str] = {}
    for number in range(40):
        await router.ask(kit.post(kit.STREAM, headers=f"X-Request-Id: q{number}\r\n"))
    for engine in router.engines:
        for request in engine.requests:
            ids.setdefault(request.headers["x-request-id"], engine.revision)
            assert ids[request.headers["x-request-id"]] == engine.revision
    assert set(ids.values()) == {"old", "new"}
