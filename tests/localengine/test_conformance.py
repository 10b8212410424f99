"""Questions to two engines: what is compared, and that the simulated engine answers every one."""

import asyncio
import os

import pytest

from twinpool.localengine import conformance
from twinpool.localengine.conformance import QUESTIONS, Answer
from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.server import running


def answer(body, status=200, content_type="application/json"):
    return Answer(status, content_type, conformance.shape_of(body, content_type))


def test_values_are_not_compared_but_names_and_types_are():
    one = answer(b'{"id": "a", "usage": {"n": 1}, "choices": [{"x": 1}, {"x": 2}], "ok": true}')
    same = answer(b'{"id": "b", "usage": {"n": 2.5}, "choices": [{"x": 9}], "ok": false}')
    assert conformance.differences(one, same) == []
    other = answer(b'{"id": 3, "usage": {"m": 1}, "choices": [{"x": null}], "ok": true}')
    assert conformance.differences(one, other) == [
        '.choices[0].x: "number" and "NoneType"',
        '.id: "str" and "number"',
        ".usage.m: only in the second",
        ".usage.n: only in the first",
    ]


def test_status_comes_before_fields():
    assert conformance.differences(answer(b"{}"), answer(b'{"a": 1}', 404)) == ["status: 200 and 404"]
    assert conformance.differences(answer(b"", 200, ""), answer(b"hello", 200, "")) == [': "empty" and "text"']
    long = answer(b'{"' + b"a" * 500 + b'": 1}')
    assert len(conformance.differences(long, answer(b"[1]"))[0]) < 200


def test_streams_are_compared_by_their_events():
    kind = "text/event-stream"
    one = answer(b'data: {"t": "a"}\n\ndata: {"t": "b"}\n\n: comment\n\ndata: [DONE]\n\n', content_type=kind)
    assert one.shape == [{"t": "str"}, "[DONE]"]
    assert conformance.differences(one, answer(b'data: {"t": "a"}\n\ndata: [DONE]\n\n', content_type=kind)) == []
    assert conformance.differences(one, answer(b"data: [DONE]\n\n", content_type=kind))


def test_nobody_answers():
    assert conformance.ask("127.0.0.1", 9, QUESTIONS["health"]) == Answer(0, "", "ConnectionRefusedError")


@pytest.fixture
async def simulated():
    host = f"127.{96 + os.getpid() % 28}.{os.getpid() // 28 % 256}.251"
    argv = ["--host", host, "--model", "tiny", "--max-model-len", "2048", "--time-scale", "0", "--connector", "nixl"]
    async with running(flags.parse(argv)):
        yield host


REFUSED = {
    "no such path": 404,
    "wrong method": 405,
    "unknown model": 404,
    "no prompt": 400,
    "no messages": 400,
    "not JSON": 400,
    "too long a prompt": 400,
    "too many tokens asked for": 400,
    "tokens below 1": 400,
    "min above max": 400,
    "stream options without a stream": 400,
    "wrong type": 400,
    "too many strings to stop at": 400,
    "a rank that is not there": 400,
}


async def test_the_simulated_engine_answers_every_question(simulated):
    answers = {}
    for name, question in QUESTIONS.items():
        answers[name] = await asyncio.to_thread(conformance.ask, simulated, 8000, question)
    assert {name: answer.status for name, answer in answers.items()} == {**dict.fromkeys(QUESTIONS, 200), **REFUSED}
