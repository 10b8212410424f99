"""Routing by KV events, whole: simulated engines publish, the router's processes follow, look up and compare."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys

import pytest

from twinpool.core.blockhash import chain
from twinpool.core.protocol import ROUTER_CONFIG_ENV, RouterConfig
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.index_exact import Held
from twinpool.router.shell.events import Followers
from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.flags import EventSettings
from twinpool.worker.engines.simulated.logic.blocks import Stored
from twinpool.worker.engines.simulated.server import running
from twinpool.worker.engines.simulated.shell.publisher import Publisher

CONFIG = RouterConfig(
    "p",
    "n",
    ("m",),
    adapters=("sql",),
    adapter_sources=("/models/sql",),
    policy="price",
    drain_timeout=20.0,
    renders=True,
)  # fmt: skip
EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5577"}
FLAGS = ("--model", "m", "--port", "8000", "--connector", "nixl", "--time-scale", "0", "--max-model-len", "8192")
PROMPT = list(range(3000, 5000))
RANK_0, RANK_1 = ("X-data-parallel-rank: 0\r\n", "X-data-parallel-rank: 1\r\n")


async def until(condition, seconds=60):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the other side is ZMQ
            await asyncio.sleep(0.01)


class Stage:
    """Two prefill workers and a decode worker that publish events, and a router in front of them."""

    def __init__(self, kit, path):
        self.kit = kit
        self.path = path
        self.hosts = {}
        self.engines = {}
        self.stack = contextlib.AsyncExitStack()
        self.process = None
        self.admin = 0

    async def engine(self, name, number, *extra, events=EVENTS):
        host = self.hosts[name] = f"127.93.{os.getpid() % 250}.{number}"
        told = () if events is None else ("--kv-events-config", json.dumps(events))
        stack = await self.stack.enter_async_context(contextlib.AsyncExitStack())
        role = "aggregated" if name.startswith("renderer") else name[:-1]
        settings = flags.parse(["--host", host, "--role", role, *FLAGS, *told, *extra])
        await stack.enter_async_context(running(settings))
        self.engines[name] = stack

    async def start(self, **ports):
        entries = [
            {"role": name[:-1], "host": host, "port": 8000, "kvEvents": 5557, "kvReplay": 5577, **ports}
            for name, host in self.hosts.items()
        ]
        self.path.write_text(json.dumps(entries))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "twinpool.router", "--port", "8000", "--admin-port", "8081",
            "--endpoints", str(self.path), "--workers", "1",
            env={**os.environ, ROUTER_CONFIG_ENV: CONFIG.to_json(), "POD_IP": self.address},
        )  # fmt: skip

        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    ready = (await self.get("/ready")).status == 200
                    known = (await self.get("/admin/endpoints")).json["endpoints"]
                    if ready and len(known) == len(entries) and all(one["admitted"] for one in known):
                        return
                await asyncio.sleep(0.02)

    @property
    def address(self):
        return f"127.93.{os.getpid() % 250}.250"

    async def get(self, path, port=8081, data=None, host=None):
        reader, writer = await asyncio.open_connection(host or self.address, port)
        client = self.kit.RawClient(reader, writer)
        client.send(data or f"GET {path} HTTP/1.1\r\nHost: r\r\n\r\n".encode())
        answer = await client.answer()
        client.abort()
        return answer

    async def index(self, test):
        body = None
        for _ in range(600):
            body = (await self.get("/admin/index")).json
            if test({one["name"].partition(":")[0]: one for one in body["endpoints"]}, body):
                return body
            await asyncio.sleep(0.1)
        raise AssertionError(body)

    async def ask(self, prompt, host=None, headers="", model="m"):
        body = {"model": model, "prompt": prompt, "max_tokens": 4}
        answer = await self.get("", 8000, self.kit.post(body, headers=headers), host)
        assert answer.status == 200, answer.body
        return answer.json

    async def metric(self, name):
        text = (await self.get("/metrics")).body.decode()
        lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(f"twinpool_router_{name}"))
        return {labels.partition("{")[2].rstrip("}"): float(value) for labels, _, value in lines}

    async def stop(self):
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        await self.stack.aclose()


@pytest.fixture
async def stage(kit, tmp_path):
    made = Stage(kit, tmp_path / "workers.json")
    yield made
    await made.stop()


async def test_prompts_of_token_ids_follow_what_engines_say(stage):
    for number, name in enumerate(("prefill0", "prefill1", "decode0")):
        # Each third message is lost, and replayed.
        await stage.engine(name, number + 1, "--fault", "lose-events=3")
    await stage.start()
    await stage.ask(PROMPT)
    await stage.index(lambda by, _: sum(one.get("blocks", 0) for one in by.values()) >= 250)
    body = await stage.index(lambda by, all_: all_["blockSize"] == 16 and all(one["relied"] for one in by.values()))
    assert all(one["coverage"] == 1.0 and not one["namesWrong"] for one in body["endpoints"])
    assert sum(one["namesRight"] for one in body["endpoints"]) >= 2
    # Ten prompts with a common beginning, one after the other, so that events come between them.
    for number in range(10):
        await stage.ask([*PROMPT[:1600], *range(number, number + 64)])
        wanted = body["table"]["entries"] + 4 * (number + 1)
        await stage.index(lambda _, all_, wanted=wanted: all_["table"]["entries"] >= wanted)
    found = await stage.metric("index_predictions_total")
    assert sum(value for labels, value in found.items() if "right" in labels) >= 5
    assert not any(value for labels, value in found.items() if "wrong" in labels)
    assert (await stage.metric("index_questions_total"))['outcome="answered"'] >= 10
    gaps = await stage.metric("kv_event_gaps_total")
    assert sum(value for labels, value in gaps.items() if "asked" in labels) > 0
    assert sum(value for labels, value in gaps.items() if "reset" in labels) == 0
    assert all((await stage.metric("index_relied")).values())
    # An engine that is gone for good is followed no more.
    await stage.engines["prefill0"].aclose()
    await stage.index(lambda by, _: not by[stage.hosts["prefill0"]]["relied"])
    await stage.ask(PROMPT)


async def test_prompts_to_an_adapter_follow_the_blocks_that_it_computed(stage):
    for number, name in enumerate(("prefill0", "prefill1", "decode0")):
        await stage.engine(name, 60 + number, "--enable-lora", "--lora-modules", "sql=/models/sql")
    await stage.start()
    for number in range(8):
        await stage.ask([*PROMPT[:1600], *range(number, number + 64)], model="sql")
        await stage.index(lambda _, all_, least=100 + 4 * number: all_["table"]["entries"] >= least)
    before = await stage.metric("index_predictions_total")
    assert sum(value for labels, value in before.items() if "right" in labels) >= 5
    assert not any(value for labels, value in before.items() if "wrong" in labels)
    # The model itself has computed none of it.
    usage = (await stage.ask(PROMPT[:1600]))["usage"]
    assert not (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    assert not any(
        value for labels, value in (await stage.metric("index_predictions_total")).items() if "wrong" in labels
    )


async def test_an_engine_that_does_not_publish_or_has_other_blocks_is_estimated(stage):
    await stage.engine("prefill0", 11, "--block-size", "32")
    await stage.engine("decode0", 12)
    await stage.engine("decode1", 13, events=None)
    await stage.engine("decode2", 14)
    await stage.start()
    for host in stage.hosts.values():
        await stage.ask(PROMPT, host)
    body = await stage.index(
        lambda by, all_: all_["blockSize"] == 16 and "blocks have 32" in by[stage.hosts["prefill0"]]["reason"]
    )
    reasons = {one["name"].partition(":")[0]: one["reason"] for one in body["endpoints"]}
    assert "does not answer" in reasons[stage.hosts["decode1"]]
    assert (await stage.get("/metrics")).status == 200


async def test_without_a_replay_socket_a_gap_forgets_everything(stage):
    events = {key: value for key, value in EVENTS.items() if key != "replay_endpoint"}
    await stage.engine("decode0", 21, "--fault", "lose-events=3", events=events)
    await stage.start(kvReplay=0)
    host = stage.hosts["decode0"]

    async def until_reset():
        for number in range(1000):
            await stage.ask(list(range(number, number + 40)))
            if (await stage.metric("kv_event_gaps_total")).get(f'worker="{host}:8000",rank="0",outcome="reset"'):
                return

    await until_reset()
    assert (await stage.index(lambda by, _: by[host]["relied"]))["endpoints"][0]["resets"] >= 1


async def test_a_chat_goes_where_events_say_that_it_is_though_the_router_never_saw_it(stage):
    for number, name in enumerate(("prefill0", "prefill1", "decode0")):
        await stage.engine(name, number + 31)
    await stage.engine("renderer0", 34, "--enable-scale-out", events=None)
    await stage.start()
    holder = stage.hosts["prefill1"]
    for number in range(6):
        chat = {"model": "m", "messages": [{"role": "user", "content": f"{number} {' word' * 1500}"}], "max_tokens": 4}
        # Not through the router: only the engine's events tell of it.
        answer = await stage.get("", 8000, stage.kit.post(chat, "/v1/chat/completions"), holder)
        held = answer.json["usage"]["prompt_tokens"] // 16
        await stage.index(
            lambda by, all_, held=(number + 1) * held: all_["blockSize"] == 16 and by[holder]["blocks"] >= held * 0.9
        )
        answer = await stage.get("", 8000, stage.kit.post(chat, "/v1/chat/completions"))
        assert answer.status == 200
    legs = await stage.metric("prefill_leg_seconds_count")
    assert legs == {f'worker="{holder}:8000"': 6.0}
    assert (await stage.metric("prefill_by_cache_seconds_count"))['cache="warm"'] == 6
    assert (await stage.metric("renders_total"))['outcome="rendered"'] == 6
    # Three were compared, the others sent on as ids.
    assert await stage.metric("render_checks_total") == {'outcome="right"': 3.0, 'outcome="wrong"': 0.0}
    assert (await stage.metric("renderers"))[""] == 1
    assert (await stage.get("/admin/endpoints")).json["distrustsRenderers"] is False


async def test_a_renderer_of_other_tokens_is_found_out_and_told_of(stage):
    for number, name in enumerate(("prefill0", "prefill1", "decode0")):
        await stage.engine(name, number + 41)
    host = stage.hosts["renderer0"] = f"127.93.{os.getpid() % 250}.44"
    rendered = stage.kit.response(
        b'{"token_ids":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}', extra="Connection: close\r\n"
    )

    async def render(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(rendered)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(render, host, 8000, limit=2**20)
    stage.stack.callback(server.close)
    await stage.start()
    chat = {"model": "m", "messages": [{"role": "user", "content": "word " * 1500}], "max_tokens": 4}
    for worker in ("prefill0", "prefill1"):  # whose events are relied on from then on
        await stage.get("", 8000, stage.kit.post(chat, "/v1/chat/completions"), stage.hosts[worker])
    await stage.index(lambda by, _: sum(one["relied"] for one in by.values()) >= 2)
    chat["messages"][0]["content"] = "other words " * 800
    answer = await stage.get("", 8000, stage.kit.post(chat, "/v1/chat/completions"))
    assert answer.json["usage"]["prompt_tokens"] > 17, "the engine read the text"
    assert (await stage.metric("render_checks_total"))['outcome="wrong"'] == 1
    assert (await stage.get("/admin/endpoints")).json["distrustsRenderers"] is True


async def test_each_rank_is_followed_on_its_own_and_a_gap_of_one_forgets_that_one_alone(stage):
    events = {key: value for key, value in EVENTS.items() if key != "replay_endpoint"}
    await stage.engine("decode0", 71, "--data-parallel-size", "2", "--fault", "lose-events=3", events=events)
    await stage.start(kvReplay=0, ranks=2)
    host = stage.hosts["decode0"]
    # Rank 0 says two things, so none is lost; rank 1 says many.
    for number in range(2):
        await stage.ask(list(range(number, number + 40)), host, RANK_0)
    for number in range(6):
        await stage.ask(list(range(number, number + 40)), host, RANK_1)
    body = await stage.index(
        lambda by, _: by[host]["relied"] and by[host]["ranks"][1]["resets"] and by[host]["ranks"][0]["messages"] == 2
    )
    first, second = body["endpoints"][0]["ranks"]
    assert (first["rank"], first["address"], first["blocks"], first["resets"]) == (0, f"{host}:5557", 4, 0)
    assert (second["rank"], second["address"]) == (1, f"{host}:5558")
    gaps = await stage.metric("kv_event_gaps_total")
    assert gaps[f'worker="{host}:8000",rank="0",outcome="reset"'] == 0
    assert gaps[f'worker="{host}:8000",rank="1",outcome="reset"'] >= 1
    assert set(await stage.metric("index_blocks")) == {f'worker="{host}:8000",role="decode",rank="{n}"' for n in "01"}


async def test_a_rank_is_followed_at_its_own_pod_and_its_next_process_has_nothing_of_the_last():
    """One leader whose second rank is in another pod, which is replaced."""
    leader, first, second = (f"127.93.{os.getpid() % 250}.{number}" for number in (81, 82, 83))
    settings = EventSettings("tcp://*:5557", "tcp://*:5577", "kv", 100)
    tokens = list(range(64))
    names = chain(tokens, 16, 4)
    emptied = []
    endpoint = Endpoint("e", "decode", leader, 8000, pod="e", events=5557, replay=5577, ranks=2)

    def at(host):
        return dataclasses.replace(endpoint, rank_hosts=(leader, host))

    followers = Followers(lambda: None, emptied.append)
    async with contextlib.AsyncExitStack() as stack:
        ranks = [Publisher(settings, host, 16, rank=rank) for host, rank in ((leader, 0), (first, 1), (second, 1))]
        for rank in ranks:
            stack.push_async_callback(rank.close)
        stack.callback(followers.close)
        followers.watch([at("")])
        assert [each["reason"] for each in followers.state(at(""))["ranks"]][1] == "the address of its pod is not known"
        followers.watch([at(first)])
        ranks[1].publish([Stored(tuple(names), None, tuple(tokens), None)], 1.0)
        await until(lambda: followers.relied == (16, frozenset({"e#0", "e#1"})))
        assert followers.located(names) == [("e#1", Held(4, 4, 4))]
        followers.sent("e#0", names[:2], 0.0)
        followers.sent("e", names, 0.0)
        assert dict(followers.located(names))["e#0"] == Held(0, 0, 2)
        followers.watch([at(second)])
        assert "e#1" not in dict(followers.located(names)), "another process"
        ranks[2].publish([Stored(tuple(names[:1]), None, tuple(tokens[:16]), None)], 1.0)
        await until(lambda: followers.relied == (16, frozenset({"e#0", "e#1"})))
        await until(lambda: dict(followers.located(names)).get("e#1") == Held(1, 1, 1))
    assert not emptied


async def successes(stage, name):
    """Return how many requests each rank of an engine has answered."""
    text = (await stage.get("/metrics", 8000, host=stage.hosts[name])).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    return [sum(float(one.rpartition(" ")[2]) for one in lines if f'engine="{rank}"' in one) for rank in range(2)]


async def test_a_prompt_goes_to_the_rank_that_holds_it_on_both_hops(stage):
    for number, name in enumerate(("prefill0", "decode0")):
        await stage.engine(name, number + 51, "--data-parallel-size", "2")
    await stage.start(ranks=2)
    for host in stage.hosts.values():
        await stage.ask(PROMPT, host, RANK_1)
    await stage.index(
        lambda by, _: all(one["relied"] and one["ranks"][1]["blocks"] == len(PROMPT) // 16 for one in by.values())
    )
    for number in range(4):
        # A client's own rank header reaches no engine.
        await stage.ask([*PROMPT[:1600], number, *range(64)], headers=RANK_0)
    assert await successes(stage, "prefill0") == [0, 5]
    assert await successes(stage, "decode0") == [0, 5]
    by_router = {f'role="{role}",by="router"': 4 for role in ("prefill", "decode")}
    assert await stage.metric("rank_choices_total") == by_router
    prefill = stage.hosts["prefill0"]
    assert await stage.metric("index_predictions_total") == {f'worker="{prefill}:8000",rank="1",outcome="right"': 4}


async def test_a_chat_goes_to_the_rank_that_holds_it(stage):
    await stage.engine("prefill0", 61, "--data-parallel-size", "2")
    await stage.engine("decode0", 62, "--data-parallel-size", "2")
    await stage.engine("renderer0", 63, "--enable-scale-out", events=None)
    await stage.start(ranks=2)
    host = stage.hosts["prefill0"]
    for rank, text in enumerate(("zero", "one")):
        chat = {"model": "m", "messages": [{"role": "user", "content": f"{text} {' word' * 1500}"}], "max_tokens": 4}
        headers = f"X-data-parallel-rank: {rank}\r\n"
        await stage.get("", 8000, stage.kit.post(chat, "/v1/chat/completions", headers), host)
    await stage.index(lambda by, _: by[host]["relied"] and all(rank["blocks"] > 50 for rank in by[host]["ranks"]))
    for _ in range(3):
        assert (await stage.get("", 8000, stage.kit.post(chat, "/v1/chat/completions"))).status == 200
    assert await successes(stage, "prefill0") == [1, 4]
    assert (await stage.metric("renders_total"))['outcome="rendered"'] >= 1


async def test_what_a_rank_holds_is_reported_as_cached_and_another_prompt_is_the_engines_to_place(stage):
    await stage.engine("decode0", 61, "--data-parallel-size", "2")
    await stage.start(ranks=2)
    host = stage.hosts["decode0"]
    await stage.ask(PROMPT, host, RANK_1)
    await stage.index(lambda by, _: by[host]["relied"] and by[host]["ranks"][1]["blocks"] == len(PROMPT) // 16)
    answer = await stage.ask(PROMPT)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) - 16
    for number in range(4):
        await stage.ask(list(range(number, number + 200)))
    assert await stage.metric("rank_choices_total") == {
        'role="decode",by="router"': 1,
        'role="decode",by="engine"': 4,
    }
    # The engine has begun anew: what its ranks held is gone, and nothing is named for it.
    await stage.get("", 8000, b"POST /reset_prefix_cache HTTP/1.1\r\nHost: e\r\nContent-Length: 0\r\n\r\n", host)
    await stage.index(lambda by, _: not any(rank["blocks"] for rank in by[host]["ranks"]))
    await stage.ask(PROMPT)
    assert (await stage.metric("rank_choices_total"))['role="decode",by="router"'] == 1
