"""What a client gets, for every kind of failure, in each phase, of each role, under each policy, alone or with a twin.

The expectation is written down from the promises, not from the code: with a healthy twin nobody fails before the first
event; without one the policy decides; after the first event a stream ends in an error that the client can see; and
never does a failure look like a complete answer.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from twinpool.router.settings import Limits

#: For workers that say nothing; long enough for the healthy ones on a busy machine. Nobody else is cut off by time.
SHORT = Limits(prefill_timeout=0.5, first_token_timeout=0.5, stall_timeout=0.5, connect_timeout=5.0)
PATIENT = Limits(prefill_timeout=20.0, first_token_timeout=20.0, stall_timeout=20.0, connect_timeout=5.0)
SILENT = ("hang", "stall later")
POLICIES = ("retry-then-local", "local", "fail")
#: Failures before anything of an answer has come.
EARLY = ("refused", "reset", "close", "garbage", "half a head", "hang", "500", "503", "429")
PREFILL_ONLY = ("no parameters", "half a body", "not JSON", "400")
DECODE_ONLY = ("hidden error", "head only", "400")
#: Failures after the first event.
LATE = ("reset later", "close later", "bad chunk later", "stall later")


def script_of(kit: Any, fault: str) -> Any:
    head, first = kit.SSE_HEAD, kit.chunk(kit.EVENTS[0])
    scripts = {
        "reset": kit.reset,
        "close": kit.always(b"", close=True),
        "garbage": kit.always(b"220 ftp ready\r\n\r\n"),
        "half a head": kit.always(b"HTTP/1.1 200 OK\r\nContent-Le", close=True),
        "hang": kit.hang,
        "no parameters": kit.always(kit.response(b'{"kv_transfer_params":null}')),
        "half a body": kit.always(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{", close=True),
        "not JSON": kit.always(kit.response(b"ready")),
        "head only": kit.always(head, close=True),
        "hidden error": kit.always(head + kit.chunk(b'data: {"error":{"code":500}}\n\n') + b"0\r\n\r\n"),
    }
    if fault in scripts:
        return scripts[fault]
    if fault.isdigit():
        return kit.always(kit.response(b'{"error":"engine"}', f"{fault} X"))

    async def later(engine: Any, seen: Any) -> None:
        seen.writer.write(head + first)
        await seen.writer.drain()
        await asyncio.sleep(0.01)
        if fault == "bad chunk later":
            seen.writer.write(b"zz\r\n")
        if fault == "reset later":
            await kit.reset(engine, seen)
        elif fault == "close later":
            seen.writer.close()
        else:
            await engine.release.wait()

    return later


def expected(role: str, fault: str, policy: str, twin: bool) -> set[str]:
    """Return what the client may see: ok, broken, or a status and error code."""
    if role == "prefill":
        if fault == "400":
            return {"ok"}  # decode, which sees the request as it was written, has the word
        if policy == "fail" and not twin:
            return {"503 no_prefill"}
        return {"ok"}
    if fault in LATE:
        return {"broken", "ok"} if twin else {"broken"}
    if fault in ("400", "429"):
        return {f"{fault} engine", "ok"} if twin else {f"{fault} engine"}
    if twin and fault not in ("500", "hidden error"):
        return {"ok"}
    if fault in ("500", "hidden error"):
        # Decode is asked to do all of it, unless the policy forbids that; with a twin, that one may be asked.
        return {"500 engine", "ok"} if twin else {"500 engine"}
    if fault == "503":
        return {"503 engine"}
    return {"502 worker_failed"}


def seen_by_client(kit: Any, answer: Any) -> str:
    if answer.status == 200:
        if answer.body == b"".join(kit.EVENTS):
            return "ok"
        assert answer.body.startswith(kit.EVENTS[0])
        assert answer.body.count(kit.EVENTS[0]) == 1, "no token twice"
        assert b"[DONE]" not in answer.body
        assert b"worker_lost" in answer.body
        return "broken"
    error = json.loads(answer.body)["error"]
    return f"{answer.status} {error['code'] if isinstance(error, dict) and 'message' in error else 'engine'}"


CELLS = [
    (role, fault, policy, twin)
    for role, faults in (("prefill", EARLY + PREFILL_ONLY), ("decode", EARLY + DECODE_ONLY + LATE))
    for fault in faults
    for policy in POLICIES
    for twin in (False, True)
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_every_failure_ends_as_promised(make_router, kit, role, policy):
    wrong = []
    for cell in (cell for cell in CELLS if cell[0] == role and cell[2] == policy):
        _, fault, _, twin = cell
        router = await make_router(SHORT if fault in SILENT else PATIENT, on_prefill_failure=policy)
        for made in ("prefill", "decode"):
            for _ in range(2 if twin and made == role else 1):
                await router.engine(made)
        bad = next(engine for engine in router.engines if engine.role == role)
        if fault == "refused":
            await bad.stop()
        else:
            bad.script = script_of(kit, fault)
        allowed = expected(role, fault, policy, twin)
        for _ in range(2):
            got = await outcome(router, kit)
            if got not in allowed:
                wrong.append((cell, got))
        await router.idle()
        await router.stop()
    assert not wrong


async def outcome(router: Any, kit: Any) -> str:
    """Send a stream and return what came of it."""
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    answer = asyncio.ensure_future(client.answer())

    def done() -> bool:
        for connection in list(router.clients):
            connection.sweep(router.loop.time())
        return answer.done()

    await kit.until(done)
    client.abort()
    if isinstance(answer.exception(), asyncio.IncompleteReadError | ConnectionError):
        return "broken"
    return seen_by_client(kit, answer.result())
