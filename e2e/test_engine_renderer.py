"""The renderer of the real vLLM beside its engine: the same token ids, which the engine takes instead of the text."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from twinpool.core.protocol import ENGINE_PORT
from twinpool.localengine.image import serving_environment
from twinpool.localengine.pod import end, tiny_config
from twinpool.router.logic.rendering import read_rendered, tokens_read
from twinpool.router.logic.request import Route, decode_body, read, with_ids
from twinpool.worker.engines.command import Pod
from twinpool.worker.engines.render import render_command
from twinpool.worker.engines.select import engine_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
QUESTIONS: list[tuple[Route, dict[str, Any]]] = [
    (Route.COMPLETIONS, {"prompt": "The quick brown fox jumps over the lazy dog, and then, surprisingly, again. " * 9}),
    (Route.COMPLETIONS, {"prompt": "héllo wörld 你好 " * 20, "add_special_tokens": False, "cache_salt": "a"}),
    (Route.CHAT, {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why? " * 50}]}),
    (
        Route.CHAT,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Who? " * 50}]}],
            "tools": TOOLS,
            "tool_choice": "none",
        },
    ),
]


@pytest.fixture(scope="module")
def pair(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The addresses of a renderer and of an engine, with the command lines that their pods have."""
    hosts = [f"127.{208 + os.getpid() % 16}.{os.getpid() // 16 % 256}.{number}" for number in (21, 22)]
    config = tiny_config(role="aggregated", connector=None, python=str(engine.python))
    environment = {**serving_environment(engine), "HOME": os.environ.get("HOME", "/")}
    commands = (
        render_command(config, Pod(hosts[0]), environment, sys.executable),
        engine_command(config, Pod(hosts[1]), environment, 0, sys.executable),
    )
    logs: list[Path] = [tmp_path_factory.mktemp("renderer") / "log" for _ in commands]
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(command.argv, env=dict(command.environment), stdout=output, stderr=output)
            )
    try:
        for host, process, log in zip(hosts, processes, logs, strict=True):
            deadline = time.monotonic() + 300
            while not healthy(host):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.2)
        yield hosts[0], hosts[1]
    finally:
        end(*processes)


def healthy(host: str) -> bool:
    with (
        contextlib.suppress(OSError),
        urllib.request.urlopen(f"http://{host}:{ENGINE_PORT}/health", timeout=5) as answer,
    ):
        return bool(answer.status == 200)
    return False


def ask(host: str, path: str, body: bytes) -> bytes:
    request = urllib.request.Request(f"http://{host}:{ENGINE_PORT}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310 - the scheme is in the line above
        text: bytes = answer.read()
    return text


@pytest.mark.parametrize(("route", "fields"), QUESTIONS)
def test_the_engine_reads_the_renderers_ids_and_answers_them_like_the_text(
    pair: tuple[str, str], route: Route, fields: dict[str, Any]
) -> None:
    renderer, engine = pair
    question = {"model": "tiny", "temperature": 0, "max_tokens": 12, "return_token_ids": True, **fields}
    request = read(route, json.dumps(question).encode())
    rendered = read_rendered(ask(renderer, f"{route.value}/render", request.body))
    assert rendered is not None
    by_text = ask(engine, route.value, request.body)
    assert tokens_read(by_text) == rendered.ids
    known = with_ids(request, rendered.text, chat=route is Route.CHAT)
    by_ids = ask(engine, route.value, decode_body(known, None))
    assert tokens_read(by_ids) == rendered.ids
    first, second = json.loads(by_text)["choices"], json.loads(by_ids)["choices"]
    assert [choice["token_ids"] for choice in first] == [choice["token_ids"] for choice in second]


def test_the_engine_takes_the_ids_of_a_chat_without_reading_its_messages(pair: tuple[str, str]) -> None:
    _, engine = pair
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    request = read(Route.CHAT, json.dumps({**chat, "return_token_ids": True}).encode())
    known = decode_body(with_ids(request, b"[5,6,7]", chat=True), None)
    assert tokens_read(ask(engine, Route.CHAT.value, known)) == [5, 6, 7]


def test_a_renderer_knows_its_model_alone(pair: tuple[str, str]) -> None:
    renderer, _ = pair
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(renderer, "/v1/completions/render", b'{"model":"another","prompt":"x"}')
    with refused.value as error:
        assert error.code == 404
