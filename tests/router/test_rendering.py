"""Prompts on their way over a renderer: asked once, in time or not at all, and believed as far as engines agree."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from twinpool.router.logic.rendering import ENOUGH

IDS = list(range(100, 2100))
TEXT = "word " * 2000
PROMPT = {"model": "m", "prompt": TEXT, "max_tokens": 5}
CHAT = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 5}
_TARGETS = {"/v1/completions": PROMPT, "/v1/chat/completions": CHAT}


@pytest.fixture
async def rendered(make_router: Any, kit: Any) -> Any:
    """A router over two prefill workers whose KV events are relied on, a decode worker and a renderer."""
    router = await make_router(policy="price", renders=True)

    async def render(engine: Any, seen: Any) -> None:
        body = {"token_ids": IDS, "features": None}
        seen.writer.write(kit.response(json.dumps(body if "chat" in seen.target else [body]).encode()))
        await seen.writer.drain()

    router.workers = [await router.engine(role, reads(kit)) for role in ("prefill", "prefill", "decode")]
    router.renderer = await router.engine("renderer", render)
    router.pool.chooser.exact.rely(16, frozenset(worker.name for worker in router.workers))
    return router


def reads(kit: Any, ids: list[int] | None = None, usage: bool = True) -> Any:
    """Return the script of an engine that says which tokens it read: those of the renderer, or others."""

    async def script(engine: Any, seen: Any) -> None:
        read = IDS if ids is None else ids
        answer: dict[str, Any] = {"served_by": engine.name}
        if seen.prefill:
            answer = {"kv_transfer_params": kit.PARAMS, "usage": kit.USAGE}
        if seen.json.get("return_token_ids"):
            answer["prompt_token_ids"] = read
        if not seen.prefill and usage:
            answer["usage"] = {"prompt_tokens": len(read)}
        seen.writer.write(kit.response(json.dumps(answer).encode()))
        await seen.writer.drain()

    return script


def other(number: int) -> dict[str, Any]:
    """Return a prompt that begins otherwise than all others, so that nothing is thought to be held of it."""
    return {**PROMPT, "prompt": f"{number} {TEXT}"}


def legs(router: Any, role: str) -> list[Any]:
    return [json.loads(seen.body) for engine in router.workers if engine.role == role for seen in engine.requests]


def outcomes(router: Any) -> dict[str, float]:
    found = router.pool.numbers.values.get("twinpool_router_renders_total", {})
    return {labels[0]: value for labels, value in found.items() if value}


@pytest.mark.parametrize("path", list(_TARGETS))
async def test_the_renderer_is_asked_once_and_its_ids_are_compared_before_they_are_sent_on(
    rendered: Any, kit: Any, path: str
) -> None:
    # Each prompt begins otherwise: nothing is thought to be held anywhere.
    for number in range(ENOUGH + 1):
        body = json.loads(json.dumps(_TARGETS[path]).replace("word", f"{number} word", 1))
        assert (await rendered.ask(kit.post(body, path))).status == 200
        assert len(rendered.renderer.requests) == number + 1
        assert rendered.renderer.requests[-1].json == body
        assert rendered.renderer.requests[-1].target == f"{path}/render"
    assert outcomes(rendered) == {"rendered": ENOUGH + 1}
    assert rendered.value("render_checks_total", "right") == ENOUGH
    assert rendered.value("render_checks_total", "wrong") == 0
    decodes = legs(rendered, "decode")
    assert all("return_token_ids" not in leg for leg in decodes), "what clients get is not changed"
    assert sum(leg.get("return_token_ids", False) for leg in legs(rendered, "prefill")) == ENOUGH
    if "chat" in path:
        assert decodes[-1]["kv_transfer_params"] == {**kit.PARAMS, "prompt_token_ids": IDS}
        assert all("prompt_token_ids" not in leg["kv_transfer_params"] for leg in decodes[:-1])
    else:
        assert decodes[-1]["prompt"] == IDS
        assert not any(leg["prompt"] == IDS for leg in decodes[:-1])
    await rendered.idle()


async def test_one_difference_ends_rendering(rendered: Any, kit: Any) -> None:
    for worker in rendered.workers:
        worker.script = reads(kit, [*IDS[:-1], 7])
    for _ in range(3):
        assert (await rendered.ask(kit.post(PROMPT))).status == 200
    assert rendered.value("render_checks_total", "wrong") == 1
    assert len(rendered.renderer.requests) == 1
    assert rendered.pool.rendering.distrusts
    assert not any(leg["prompt"] == IDS for leg in legs(rendered, "prefill") + legs(rendered, "decode"))
    # Renderers that come in its place are judged by themselves.
    rendered.renderer.name = "renderer-new"
    rendered.publish()
    assert not rendered.pool.rendering.distrusts


@pytest.mark.parametrize("same", [True, False])
async def test_of_prompts_that_decode_reads_engines_count_tokens(make_router: Any, kit: Any, same: bool) -> None:
    router = await make_router(policy="price", renders=True, disaggregated=False)
    router.workers = [await router.engine("decode", reads(kit, IDS if same else IDS[1:])) for _ in range(2)]
    router.renderer = await router.engine(
        "renderer", kit.always(kit.response(json.dumps([{"token_ids": IDS}]).encode()))
    )
    router.pool.chooser.exact.rely(16, frozenset(worker.name for worker in router.workers))
    assert (await router.ask(kit.post(PROMPT))).json["usage"]["prompt_tokens"] == len(IDS if same else IDS[1:])
    assert router.value("render_checks_total", "right" if same else "wrong") == 1
    assert router.pool.rendering.distrusts is not same


async def test_an_engine_that_says_nothing_proves_nothing(make_router: Any, kit: Any) -> None:
    router = await make_router(policy="price", renders=True, disaggregated=False)
    router.workers = [await router.engine("decode", reads(kit, usage=False)) for _ in range(2)]
    router.renderer = await router.engine(
        "renderer", kit.always(kit.response(json.dumps([{"token_ids": IDS}]).encode()))
    )
    router.pool.chooser.exact.rely(16, frozenset(worker.name for worker in router.workers))
    for number in range(ENOUGH + 2):
        assert (await router.ask(kit.post(other(number)))).status == 200
    assert outcomes(router) == {"rendered": ENOUGH + 2}
    assert not any(leg["prompt"] == IDS for leg in legs(router, "decode"))
    assert "twinpool_router_render_checks_total" not in router.pool.numbers.values


async def test_a_renderer_that_is_late_is_not_waited_for_nor_asked_again_at_once(rendered: Any, kit: Any) -> None:
    rendered.renderer.script = kit.hang
    for number in range(2):
        assert (await rendered.ask(kit.post(other(number)))).status == 200
    assert outcomes(rendered) == {"late": 1, "busy": 1}
    (seen,) = rendered.renderer.requests
    await asyncio.wait_for(seen.aborted.wait(), 5)
    assert all(leg["prompt"].endswith(TEXT) for leg in legs(rendered, "decode"))


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("reset", "failed"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n", "failed"),
        (b"HTTP/1.1 400 X\r\nContent-Length: 2\r\n\r\n{}", "unusable"),
        (b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\n{}", "unusable"),
        (b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[{}\r\n1\r\n]\r\n0\r\n\r\n", "unusable"),
        (b"nonsense\r\n\r\n", "failed"),
    ],
)
async def test_a_broken_renderer_costs_no_request(rendered: Any, kit: Any, script: Any, outcome: str) -> None:
    rendered.renderer.script = kit.reset if script == "reset" else kit.always(script)
    assert (await rendered.ask(kit.post(PROMPT))).status == 200
    assert outcomes(rendered) == {outcome: 1}


async def test_an_answer_without_end_is_cut(rendered: Any, kit: Any) -> None:
    rendered.pool.rendering.limits = type(rendered.pool.limits)(prefill_answer=100)
    assert (await rendered.ask(kit.post(PROMPT))).status == 200
    assert outcomes(rendered) == {"failed": 1}


async def test_a_dead_renderer_costs_no_request(rendered: Any, kit: Any) -> None:
    await rendered.renderer.stop()
    assert (await rendered.ask(kit.post(PROMPT))).status == 200
    assert outcomes(rendered) == {"failed": 1}
    # Without an admitted renderer nobody is asked.
    rendered.engines.remove(rendered.renderer)
    rendered.publish()
    assert (await rendered.ask(kit.post(PROMPT))).status == 200
    assert outcomes(rendered) == {"failed": 1}


async def test_a_client_that_leaves_while_its_prompt_is_rendered_leaves_nothing_behind(rendered: Any, kit: Any) -> None:
    rendered.renderer.script = kit.hang
    client = await rendered.connect()
    client.send(kit.post(PROMPT))
    await kit.until(lambda: rendered.renderer.requests)
    client.abort()
    await kit.until(lambda: outcomes(rendered) == {"dropped": 1})
    assert not any(worker.requests for worker in rendered.workers)
    await rendered.idle()


async def test_what_would_not_be_worth_it_and_token_ids_are_not_rendered(rendered: Any, kit: Any) -> None:
    for body in ({**PROMPT, "prompt": "hello"}, {**PROMPT, "prompt": IDS}, {**PROMPT, "n": 2}):
        assert (await rendered.ask(kit.post(body))).status == 200
    rendered.pool.chooser.exact.rely(0, frozenset())
    assert (await rendered.ask(kit.post(PROMPT))).status == 200
    assert not rendered.renderer.requests
    assert outcomes(rendered) == {}


async def test_more_prompts_than_a_renderer_takes_go_on_without(rendered: Any, kit: Any) -> None:
    rendered.renderer.script = kit.hang
    clients = [await rendered.connect() for _ in range(6)]
    for number, client in enumerate(clients):
        client.send(kit.post(other(number)))
    for client in clients:
        assert (await client.answer()).status == 200
    found = outcomes(rendered)
    assert found.pop("busy") >= 1
    assert found == {"late": 4}
