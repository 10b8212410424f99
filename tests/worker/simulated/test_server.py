"""The engine over HTTP, as a client, a router and an operator see it."""

import asyncio
import json
import time

import msgspec
import pytest
import zmq
import zmq.asyncio

HAND_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


async def until(condition, within=5.0):
    """Wait for a condition with a deadline."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


async def prefill(client, prompt, **fields):
    body = await client.complete(prompt, max_tokens=1, kv_transfer_params=HAND_OVER, **fields)
    return body["kv_transfer_params"]


def free(client):
    return client.app.engine.blocks.free == client.app.engine.limits.kv_blocks


async def test_small_endpoints_answer_as_vllm(engines):
    engine = await engines("--max-model-len", "64")
    assert await engine.get("/health") == (200, b"")
    assert await engine.get("/ping") == (200, b"")
    assert json.loads((await engine.get("/version"))[1])["version"].startswith("0.32")
    assert json.loads((await engine.get("/load"))[1]) == {"server_load": 0}
    (model,) = json.loads((await engine.get("/v1/models"))[1])["data"]
    assert (model["id"], model["max_model_len"]) == ("m", 64)
    assert (await engine.get("/nothing"))[0] == 404
    assert (await engine.get("/v1/completions"))[0] == 405
    _, tokens = await engine.post("/tokenize", {"prompt": "hello there", "return_token_strs": True})
    assert (tokens["count"], "".join(tokens["token_strs"])) == (len(tokens["tokens"]), "hello there")
    assert await engine.post("/detokenize", {"tokens": tokens["tokens"]}) == (200, {"prompt": "hello there"})
    assert b'vllm:num_requests_running{engine="0",model_name="m"} 0' in (await engine.get("/metrics"))[1]


async def test_adapters_are_models_with_a_parent_and_caches_of_their_own(engines):
    engine = await engines("--enable-lora", "--lora-modules", "sql=org/sql", "legal=/l", "--max-loras", "2")
    data = json.loads((await engine.get("/v1/models"))[1])["data"]
    assert [(entry["id"], entry["root"], entry["parent"]) for entry in data] == [
        ("m", "m", None),
        ("sql", "org/sql", "m"),
        ("legal", "/l", "m"),
    ]
    prompt = "one two three four five six seven eight nine ten " * 4
    answers = [await engine.complete(prompt, model=name, max_tokens=2) for name in ("m", "sql", "legal", "sql")]
    assert [answer["model"] for answer in answers] == ["m", "sql", "legal", "sql"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0


async def test_errors_have_vllms_shape(engines):
    engine = await engines()
    body = await engine.complete("hi", status=404, model="other")
    assert body["error"]["type"] == "NotFoundError"
    assert (await engine.complete("hi", status=400, stream_options={}))["error"]["code"] == 400
    assert (await engine.post("/tokenize", []))[0] == 400
    async with engine.session.post(engine.url + "/v1/completions", data=b"{") as response:
        assert response.status == 400
        assert "not JSON" in (await response.json())["error"]["message"]


async def test_streamed_and_whole_answers_are_the_same_text(engines):
    engine = await engines()
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "ignore_eos": True}
    _, whole = await engine.post("/v1/chat/completions", body, {"x-request-id": "abc"})
    assert whole["id"] == "chatcmpl-abc"
    body.update(stream=True, stream_options={"include_usage": True})
    async with engine.session.post(engine.url + "/v1/chat/completions", json=body) as response:
        assert response.content_type == "text/event-stream"
        lines = [line[6:] async for line in response.content if line.strip()]
    assert lines.pop().strip() == b"[DONE]"
    chunks = [json.loads(line) for line in lines]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[:-1])
    assert text == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"


async def test_several_prompts_and_answers_come_in_order(engines):
    engine = await engines()
    many = await engine.complete(["one", "two"], n=2, max_tokens=5)
    texts = [choice["text"] for choice in many["choices"]]
    assert texts == [
        (await engine.complete(prompt, max_tokens=5))["choices"][0]["text"] for prompt in ("one", "one", "two", "two")
    ]


async def test_a_stop_string_ends_the_answer(engines):
    engine = await engines()
    text = (await engine.complete("hi", max_tokens=20, ignore_eos=True))["choices"][0]["text"]
    stop = text.split()[2]
    (choice,) = (await engine.complete("hi", max_tokens=20, ignore_eos=True, stop=stop))["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("stop", text[: text.index(stop)])
    assert free(engine)


@pytest.mark.parametrize("prompt", ["hello", "a much longer prompt " * 40, [7, 8, 9]])
async def test_a_pair_answers_like_a_single_engine_and_computes_nothing_twice(pair, engines, prompt):
    single = await (await engines()).complete(prompt, max_tokens=16)
    first, second = pair
    parameters = await prefill(first, prompt)
    assert not free(first)
    answer = await second.complete(prompt, max_tokens=16, kv_transfer_params=parameters)
    assert answer["choices"] == single["choices"]
    assert answer["kv_transfer_params"] is None
    count = single["usage"]["prompt_tokens"]
    metrics = second.app.engine.metrics
    assert metrics.value("prompt_tokens_by_source", "external_kv_transfer") == count
    assert metrics.value("prompt_tokens_by_source", "local_compute") == 0
    await until(lambda: free(first))


async def test_the_wrong_kv_gives_the_wrong_answer(pair):
    first, second = pair
    right = await second.complete("right", max_tokens=16)
    swapped = await second.complete("right", max_tokens=16, kv_transfer_params=await prefill(first, "wrong"))
    wrong = await second.complete("wrong", max_tokens=16)
    assert swapped["choices"] == wrong["choices"] != right["choices"]


async def test_a_list_that_is_handed_over_answers_wrongly_with_http_200_as_vllm_does(pair):
    first, second = pair
    parameters = await prefill(first, ["one", "two"])
    answers = (await second.complete(["one", "two"], max_tokens=8, kv_transfer_params=parameters))["choices"]
    assert answers[0]["text"] == answers[1]["text"]
    await until(lambda: free(first))  # the second prompt's blocks go by their lease
    assert first.app.engine.metrics.value("nixl_num_kv_expired_reqs") == 1


async def test_parameters_serve_once(pair):
    first, second = pair
    parameters = await prefill(first, "hello")
    await second.complete("hello", kv_transfer_params=parameters)
    await until(lambda: free(first))
    body = await second.complete("hello", status=500, kv_transfer_params=parameters)
    assert "is not held here" in body["error"]["message"]


async def test_an_expired_lease_fails_the_decode(pair):
    first, second = pair
    parameters = await prefill(first, "hello")
    await until(lambda: free(first))
    assert first.app.engine.metrics.value("nixl_num_kv_expired_reqs") == 1
    await second.complete("hello", status=500, kv_transfer_params=parameters)
    assert free(second)


@pytest.mark.parametrize("change", [{"remote_port": 9}, {"remote_engine_id": "another"}])
async def test_a_holder_that_cannot_be_had_fails_the_decode(pair, change):
    first, second = pair
    parameters = {**await prefill(first, "hello"), **change}
    await second.complete("hello", status=500, kv_transfer_params=parameters)
    assert second.app.engine.metrics.value("nixl_num_failed_transfers") == 1


async def test_a_holder_of_another_model_is_refused(pair, engines):
    other = await engines("--connector", "nixl", "--model", "another", "m")
    body = await other.complete("hello", status=500, kv_transfer_params=await prefill(pair[0], "hello"))
    assert "compatibility hash" in body["error"]["message"]


async def test_a_failed_pull_inside_a_stream_is_an_error_event(pair):
    parameters = {**await prefill(pair[0], "hello"), "remote_port": 9}
    body = {"model": "m", "prompt": "hello", "stream": True, "kv_transfer_params": parameters}
    async with pair[1].session.post(pair[1].url + "/v1/completions", json=body) as response:
        text = await response.text()
    assert response.status == 200
    assert '"code":500' in text
    assert text.endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_decode_frees_prefills_blocks(engines):
    argv = ("--connector", "nixl", "--time-scale", "1", "--kv-blocks", "8", "--max-model-len", "128")
    first, second = await engines(*argv), await engines(*argv)
    # Decode is full, so that the handoff has to wait for room and has not been pulled when its client leaves.
    holder = asyncio.create_task(second.complete("x " * 40, max_tokens=80, ignore_eos=True))
    await until(lambda: second.app.engine.metrics.value("num_requests_running") == 1)
    await until(lambda: second.app.engine.blocks.free <= 4)
    prompt = "y " * 60
    parameters = await prefill(first, prompt)
    leaver = asyncio.create_task(second.complete(prompt, max_tokens=5, kv_transfer_params=parameters))
    await until(lambda: second.app.engine.metrics.value("num_requests_waiting") == 1)
    leaver.cancel()
    await until(lambda: free(first), within=1.0)
    assert first.app.engine.metrics.value("nixl_num_kv_expired_reqs") == 0
    holder.cancel()
    await until(lambda: free(second), within=1.0)


async def test_a_pull_that_nobody_wants_any_more_closes_its_connection(engines):
    asked, left = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(4)
        asked.set()
        await reader.read()
        left.set()
        writer.close()

    first, second = await engines("--connector", "nixl"), await engines("--connector", "nixl")
    parameters = await prefill(first, "one two")
    async with await asyncio.start_server(silent, second.host, 0) as holder:
        parameters["remote_port"] = holder.sockets[0].getsockname()[1]
        parameters["remote_host"] = second.host
        leaver = asyncio.create_task(second.complete("one two", max_tokens=5, kv_transfer_params=parameters))
        await asyncio.wait_for(asked.wait(), 5)
        leaver.cancel()
        await asyncio.wait_for(left.wait(), 5)


async def test_kv_that_waits_for_room_on_decode_outlives_its_first_lease(engines):
    argv = ("--connector", "nixl", "--time-scale", "1", "--kv-blocks", "8", "--max-model-len", "128")
    lease = ("--lease-seconds", "0.6")
    first, second = await engines(*argv, *lease), await engines(*argv, *lease, "--tokens-per-second", "50")
    holder = asyncio.create_task(second.complete("x " * 40, max_tokens=80, ignore_eos=True))
    await until(lambda: second.app.engine.blocks.free <= 4)
    prompt = "y " * 60
    parameters = await prefill(first, prompt)
    await second.complete(prompt, max_tokens=5, kv_transfer_params=parameters)
    assert (await holder)["usage"]["completion_tokens"] == 80
    assert first.app.engine.metrics.value("nixl_num_kv_expired_reqs") == 0


async def test_a_client_that_leaves_a_stream_cancels_it_within_200_milliseconds(engines):
    engine = await engines("--tokens-per-second", "100", "--time-scale", "1")
    body = {"model": "m", "prompt": "hi", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    async with engine.session.post(engine.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        response.close()
        left = time.monotonic()
    await until(lambda: engine.app.engine.unfinished == 0)
    assert time.monotonic() - left < 0.2
    assert free(engine)
    assert engine.app.engine.metrics.value("request_success", "abort") == 1


async def test_300_streams_at_once(engines):
    engine = await engines("--time-scale", "0")
    body = {"model": "m", "max_tokens": 20, "ignore_eos": True, "stream": True}

    async def one(number):
        async with engine.session.post(
            engine.url + "/v1/completions", json={**body, "prompt": f"number {number}"}
        ) as response:
            return (await response.text()).count("data: {")

    assert await asyncio.gather(*(one(number) for number in range(300))) == [20] * 300
    assert free(engine)


async def test_draining_answers_abort_at_once_and_ending_cuts_streams(engines):
    engine = await engines("--tokens-per-second", "50", "--time-scale", "1")
    body = {"model": "m", "prompt": "hi", "max_tokens": 5000, "ignore_eos": True, "stream": True}
    async with engine.session.post(engine.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        engine.app.drain()
        (choice,) = (await engine.complete("hi"))["choices"]
        assert (choice["finish_reason"], choice["text"]) == ("abort", "")
        assert (await engine.get("/health"))[0] == 200
        engine.app.end()
        rest = await response.text()
    assert '"finish_reason":"abort"' in rest
    assert rest.endswith("data: [DONE]\n\n")
    assert free(engine)


@pytest.mark.parametrize("fault", ["status=503", "reset", "reset-mid-stream=2", "explode"])
async def test_faults_of_one_request(engines, fault):
    engine = await engines()
    answers = {"status=503": 503, "explode": 400}
    if fault in answers:
        await engine.complete("hi", status=answers[fault], headers={"x-twinpool-fault": fault})
    else:
        with pytest.raises((ConnectionError, OSError)):
            await engine.complete("hi", headers={"x-twinpool-fault": fault})
    await engine.complete("hi")


async def test_hanging_and_slow_requests(engines):
    engine = await engines()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await engine.complete("hi", headers={"x-twinpool-fault": "hang"})
    start = time.monotonic()
    await engine.complete("hi", headers={"x-twinpool-fault": "slow=0.2"})
    assert time.monotonic() - start >= 0.2


async def test_kv_events_are_published_and_replayed(engines):
    config = {
        "enable_kv_cache_events": True,
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "kv@m",
    }
    engine = await engines("--kv-events-config", json.dumps(config))
    context = zmq.asyncio.Context()
    try:
        replay = context.socket(zmq.DEALER)
        replay.connect(f"tcp://{engine.host}:5558")
        await engine.complete("x" * 200, max_tokens=1)
        assert (await engine.session.post(engine.url + "/reset_prefix_cache")).status == 200
        await engine.complete("y" * 200, max_tokens=1)
        await replay.send_multipart([b"", (0).to_bytes(8, "big")])
        batches = []
        while (frames := await asyncio.wait_for(replay.recv_multipart(), 5))[2] != b"\xff" * 8:
            batches.append((frames[1], int.from_bytes(frames[2], "big"), msgspec.msgpack.decode(frames[3])))
    finally:
        context.destroy(linger=0)
    assert [number for _, number, _ in batches] == list(range(len(batches)))
    assert {topic for topic, _, _ in batches} == {b"kv@m"}
    events = [event for _, _, (_, batch, rank) in batches for event in batch if rank == 0]
    assert [event["type"] for event in events] == ["BlockStored", "AllBlocksCleared", "BlockStored"]
    stored = events[0]
    assert len(stored["token_ids"]) == stored["block_size"] * len(stored["block_hashes"])
    assert stored["parent_block_hash"] is None


async def test_ranks_have_their_own_caches_and_ports(engines):
    ranks, decode = (
        await engines("--connector", "nixl", "--data-parallel-size", "2"),
        await engines("--connector", "nixl"),
    )
    prompt = "one two three four five six seven eight nine ten " * 4

    async def ask(rank, **fields):
        return await ranks.complete(prompt, headers={"X-data-parallel-rank": str(rank)}, **fields)

    plain = {"max_tokens": 4, "ignore_eos": True}
    first, again, other = await ask(1, **plain), await ask(1, **plain), await ask(0, **plain)
    cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in (first, again, other)]
    assert cached[0] == cached[2] == 0
    assert cached[1] > 0
    assert {body["choices"][0]["text"] for body in (again, other)} == {first["choices"][0]["text"]}
    text = (await ranks.get("/metrics"))[1].decode()
    assert 'vllm:request_success_total{engine="0",model_name="m",finished_reason="length"} 1' in text
    assert 'vllm:request_success_total{engine="1",model_name="m",finished_reason="length"} 2' in text
    assert text.count("# TYPE vllm:request_success_total counter") == 1

    parameters = (await ask(1, max_tokens=1, kv_transfer_params=HAND_OVER))["kv_transfer_params"]
    assert parameters["remote_port"] == 5601
    handed = await decode.complete(prompt, kv_transfer_params=parameters, **plain)
    assert handed["choices"][0]["text"] == first["choices"][0]["text"]
    assert "out of range [0, 2)" in (await ask(2, status=400))["error"]["message"]


async def test_whoever_names_no_rank_gets_the_one_with_the_fewest_requests(engines):
    engine = await engines("--data-parallel-size", "2", "--tokens-per-second", "1000", "--time-scale", "1")
    await asyncio.gather(*(engine.complete("hi", max_tokens=20, ignore_eos=True) for _ in range(4)))
    text = (await engine.get("/metrics"))[1].decode()
    for rank in range(2):
        assert f'vllm:request_success_total{{engine="{rank}",model_name="m",finished_reason="length"}} 2' in text
    assert (await engine.get("/health"))[0] == 200


async def test_ranks_publish_events_on_ports_that_count_up(engines):
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv"}
    engine = await engines("--kv-events-config", json.dumps(config), "--data-parallel-size", "2")
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as sub:
        sub.connect(f"tcp://{engine.host}:5558")
        sub.setsockopt(zmq.SUBSCRIBE, b"kv")
        deadline = time.monotonic() + 10
        number = 0
        while not await sub.poll(50):
            assert time.monotonic() < deadline
            number += 1
            headers = {"X-data-parallel-rank": "1"}
            await engine.complete(f"{number} " + "one two three four " * 20, max_tokens=1, headers=headers)
        _, _, payload = await sub.recv_multipart()
        assert msgspec.msgpack.decode(payload)[2] == 1


async def test_a_renderer_gives_the_tokens_that_the_engine_would_read(engines):
    renderer, engine = await engines("--enable-scale-out"), await engines()
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 8}
    _, rendered = await renderer.post("/v1/chat/completions/render", chat)
    _, answer = await engine.post("/v1/chat/completions", {**chat, "return_token_ids": True})
    assert rendered["token_ids"] == answer["prompt_token_ids"]
    _, (completion,) = await renderer.post("/v1/completions/render", {"model": "m", "prompt": "hello there"})
    assert completion["token_ids"] == (await engine.post("/tokenize", {"prompt": "hello there"}))[1]["tokens"]
    assert (await engine.post("/v1/completions/render", {"model": "m", "prompt": "x"}))[0] == 404
    assert (await renderer.post("/v1/completions/render", {"model": "other", "prompt": "x"}))[0] == 404


async def test_a_chat_with_the_tokens_of_its_messages_is_not_read_again(engines):
    engine = await engines()
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "return_token_ids": True}
    _, given = await engine.post("/v1/chat/completions", {**chat, "kv_transfer_params": {"prompt_token_ids": [7, 8]}})
    assert given["prompt_token_ids"] == [7, 8]
    assert given["usage"]["prompt_tokens"] == 2
    status, refused = await engine.post(
        "/v1/chat/completions", {**chat, "kv_transfer_params": {"prompt_token_ids": ["7"]}}
    )
    assert (status, refused["error"]["param"]) == (400, "kv_transfer_params.prompt_token_ids")
