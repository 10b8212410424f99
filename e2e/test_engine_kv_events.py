"""The exact index beside the real vLLM: blocks have the names that we compute, and what is foretold is reported."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.blockhash import chain
from twinpool.core.protocol import ENGINE_PORT, KV_EVENTS_PORT, KV_REPLAY_PORT, WorkerConfig
from twinpool.localengine.image import serving_environment
from twinpool.localengine.models import TINY
from twinpool.localengine.pod import end
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.index_exact import Held
from twinpool.router.logic.index_view import ExactView
from twinpool.router.shell.events import Followers
from twinpool.worker.engines.command import Pod
from twinpool.worker.engines.select import engine_command

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Name and folder of a LoRA adapter for the tiny model that changes nothing: its weights are zeros."""
    folder: Path = tmp_path_factory.mktemp("adapter")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "bias": "none",
        "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    head, size = {}, 8 * 256 * 4
    for number, (layer, part) in enumerate((layer, part) for layer in range(4) for part in "AB"):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight"
        shape = [8, 256] if part == "A" else [256, 8]
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [number * size, (number + 1) * size]}
    text = json.dumps(head).encode()
    weights = len(text).to_bytes(8, "little") + text + bytes(8 * size)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return "sql", str(folder)


@pytest.fixture(scope="module")
def host(engine: Engine, adapter: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM that publishes KV events, with the flags that the launcher gives it."""
    address = f"127.{208 + os.getpid() % 16}.{os.getpid() // 16 % 256}.9"
    config = WorkerConfig(
        pool="p",
        namespace="n",
        role="aggregated",
        revision="r",
        engine="vllm",
        model="tiny",
        model_path=str(TINY.folder),
        python=str(engine.python),
        max_model_len=2048,
        args=("--kv-cache-memory-bytes=33554432", "--block-size=32", "--seed=0"),
        kv_events=True,
        adapters=("=".join(adapter),),
    )
    environment = {**serving_environment(engine), "HOME": os.environ.get("HOME", "/")}
    command = engine_command(config, Pod(address), environment, 0, sys.executable)
    log: Path = tmp_path_factory.mktemp("engine") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command.argv, env=dict(command.environment), stdout=output, stderr=output)
    try:
        asyncio.run(until(lambda: healthy(address, process, log), 300))
        yield address
    finally:
        end(process)


def healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    connection = http.client.HTTPConnection(address, ENGINE_PORT, timeout=5)
    with contextlib.suppress(OSError), contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


async def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the other side is another process
            await asyncio.sleep(0.05)


def cached_by_report(address: str, prompt: list[int], **fields: Any) -> int:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
    connection = http.client.HTTPConnection(address, ENGINE_PORT, timeout=120)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        details = json.load(connection.getresponse())["usage"]["prompt_tokens_details"]
    return int((details or {}).get("cached_tokens") or 0)


async def test_what_events_foretell_is_what_the_engine_reports(host: str, adapter: tuple[str, str]) -> None:
    # A prompt before the router comes: a replay brings its blocks.
    await asyncio.to_thread(cached_by_report, host, list(range(10, 210)))
    followers, view = Followers(lambda: None, lambda _: None), ExactView()
    endpoint = Endpoint("e", "decode", host, ENGINE_PORT, pod="e", events=KV_EVENTS_PORT, replay=KV_REPLAY_PORT)
    followers.watch([endpoint])
    try:
        await until(lambda: followers.relied == (32, frozenset({"e"})))
        view.rely(*followers.relied)
        source = followers.sources["e"]
        compared = 0
        # Prefixes of each other, whole blocks and not, with another beginning, and with a salt of their own.
        for prompt, fields in [
            (list(range(10, 210)), {}),
            (list(range(10, 202)), {}),
            (list(range(10, 310)), {}),
            (list(range(11, 310)), {}),
            (list(range(10, 42)), {}),
            (list(range(10, 310)), {"cache_salt": "team-a"}),
            (list(range(10, 400)), {"cache_salt": "team-a"}),
            # An adapter's blocks are its own, also those of a prompt that the model has.
            (list(range(10, 310)), {"model": adapter[0]}),
            (list(range(10, 400)), {"model": adapter[0]}),
            (list(range(10, 310)), {"model": adapter[0], "cache_salt": "team-a"}),
        ]:
            names = chain(prompt, 32, 99, fields.get("cache_salt"), adapter if "model" in fields else None)
            foretold = view.cached("e", dict(followers.located(names)), len(prompt))
            assert foretold is not None
            assert foretold.sure
            assert await asyncio.to_thread(lambda p=prompt, f=fields: cached_by_report(host, p, **f)) == foretold.device
            compared += foretold.device > 0
            await until(lambda n=names: dict(followers.located(n)).get("e", Held(0, 0)).device == len(n))
        assert compared == 5
        assert (source.wrong, source.resets) == (0, 0)
        assert source.right >= 2
        # More than the cache holds: what it evicted is foretold no more.
        before = followers.blocks("e")
        for number in range(40):
            await asyncio.to_thread(cached_by_report, host, list(range(number, number + 1000)))
        await until(lambda: followers.located(chain(list(range(10, 210)), 32, 99)) == [])
        assert before < followers.blocks("e")
        assert await asyncio.to_thread(cached_by_report, host, list(range(10, 210))) == 0
    finally:
        followers.close()
