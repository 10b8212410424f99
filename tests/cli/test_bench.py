"""``twinpool bench``: what is sent when, what is made of the answers, and that a known engine's times come out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import statistics
import threading
from itertools import islice, pairwise
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from twinpool.cli.__main__ import main
from twinpool.cli.bench import arrivals, command
from twinpool.cli.bench.arrivals import Planned
from twinpool.cli.bench.client import closed_loop, open_loop
from twinpool.cli.bench.judge import Objectives, Sample, judge, passed
from twinpool.simulate.traces import Request
from twinpool.worker.engines.simulated import flags
from twinpool.worker.engines.simulated.server import running

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

_numbers = itertools.count()


def test_constant_moments() -> None:
    assert list(islice(arrivals.constant(4), 4)) == [0, 0.25, 0.5, 0.75]


def test_poisson_moments_have_the_rate_and_the_spread_of_a_poisson_process() -> None:
    moments = list(islice(arrivals.poisson(10, Random(1)), 20_000))
    gaps = [b - a for a, b in pairwise(moments)]
    assert statistics.fmean(gaps) == pytest.approx(0.1, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.03)


@given(st.floats(0.1, 100), st.integers(1, 50), st.floats(0.1, 20))
def test_a_plan_keeps_its_bounds(rate: float, most: int, seconds: float) -> None:
    plan = arrivals.planned(arrivals.constant(rate), 10, 5, 2, most=most, seconds=seconds)
    assert len(plan) <= most
    assert all(request.at < seconds for request in plan)
    assert len(plan) == min(most, math.ceil(seconds * rate)) or math.isclose(seconds * rate, round(seconds * rate))


def test_a_trace_keeps_its_moments_lengths_and_shared_blocks() -> None:
    trace = (Request(0, 1500, 5, (7, 8)), Request(4, 600, 2, (7,)), Request(9, 3, 1))
    plan = arrivals.replayed(trace, 2, most=9, seconds=4)
    assert plan == [Planned(0, 1500, 5, blocks=(7, 8)), Planned(2, 600, 2, blocks=(7,))]
    first, second = (arrivals.prompt_ids(request, number, 0) for number, request in enumerate(plan))
    assert (len(first), len(second)) == (1500, 600)
    assert first[:512] == second[:512]
    assert first[512:600] != second[512:]


@given(st.integers(1, 300), st.integers(0, 300), st.integers(0, 3))
def test_prompts_share_what_they_should(prompt: int, shared: int, seed: int) -> None:
    shared = min(shared, prompt)
    one, other = (arrivals.prompt_ids(Planned(0, prompt, 1, shared), number, seed) for number in (0, 1))
    assert len(one) == len(other) == prompt
    assert one[:shared] == other[:shared]
    assert prompt - shared < 4 or one[shared:] != other[shared:]
    assert one == arrivals.prompt_ids(Planned(0, prompt, 1, shared), 0, seed), "the same again"


def answered(due: float, *events: float, tokens: int = 0, sent: float | None = None) -> Sample:
    return Sample(due, due if sent is None else sent, events[-1], events, tokens or len(events))


def test_times_count_from_the_moment_that_was_meant() -> None:
    """The sender stood still for two seconds: whoever was due meanwhile has waited."""
    samples = [answered(0, 2, 2.1), answered(1, 2.1, 2.2, sent=2.0)]
    report = judge(samples, Objectives())
    assert report.times["ttft"]["max"] == 2
    assert report.times["ttft"]["p50"] == pytest.approx(1.1)
    assert report.late == 1
    assert report.seconds == pytest.approx(2.2)


def test_figures_of_a_run() -> None:
    samples = [answered(at, at + 0.1, at + 0.3, at + 0.7, tokens=7) for at in range(99)]
    samples.append(Sample(99, 99, 100, error="HTTP 429 queue_full"))
    report = judge(samples, Objectives(0.2, 0.2))
    assert (report.requests, report.answered, dict(report.errors)) == (100, 99, {"HTTP 429 queue_full": 1})
    assert report.times["ttft"]["p99"] == pytest.approx(0.1)
    assert report.times["itl"]["mean"] == pytest.approx(0.1), "0.6 s for six tokens after the first"
    assert report.times["gap"]["max"] == pytest.approx(0.4)
    assert report.times["e2e"]["p50"] == pytest.approx(0.7)
    assert (report.request_rate, report.output_rate) == pytest.approx((0.99, 6.93))
    assert (report.attained, report.goodput) == pytest.approx((0.99, 0.99))
    assert passed(report, Objectives(0.2, 0.2, 0.99))
    assert not passed(report, Objectives(0.2, 0.2, 1))
    assert not passed(report, Objectives()), "without objectives every request must be answered"


def test_a_run_of_failures_has_no_times() -> None:
    report = judge([Sample(0, 0, 0, error="no connection")], Objectives(1))
    assert report.times == {"ttft": {}, "itl": {}, "gap": {}, "e2e": {}}
    assert (report.request_rate, report.attained, report.goodput) == (0, 0, 0)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5), st.floats(0, 5), st.integers(1, 9)), min_size=1),
    st.floats(0.01, 5),
    st.floats(0.01, 5),
)
def test_goodput_grows_with_what_is_allowed(rows: list[tuple[float, float, float, int]], a: float, b: float) -> None:
    samples = [answered(due, due + first, due + first + rest, tokens=n) for due, first, rest, n in rows]
    strict, loose = judge(samples, Objectives(min(a, b), a)), judge(samples, Objectives(max(a, b), a))
    assert 0 <= strict.attained <= loose.attained <= 1


@pytest.mark.looptime
async def test_an_open_loop_waits_for_nobody() -> None:
    loop, samples = asyncio.get_running_loop(), list[Sample]()

    async def send(number: int, request: Planned, due: float) -> Sample:
        sent = loop.time()
        await asyncio.sleep(100)
        return Sample(due, sent, loop.time(), (loop.time(),), 1)

    begin = loop.time()
    await open_loop([Planned(at, 1, 1) for at in (0, 1, 2.5)], send, samples.append)
    assert [round(sample.sent - begin, 6) for sample in samples] == [0, 1, 2.5]
    assert all(sample.ttft == pytest.approx(100) for sample in samples)


@pytest.mark.looptime
async def test_a_closed_loop_keeps_so_many_running() -> None:
    loop, most, now = asyncio.get_running_loop(), 0, 0

    async def send(number: int, request: Planned, due: float) -> Sample:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(1)
        now -= 1
        return Sample(due, due, loop.time(), (loop.time(),), 1)

    samples: list[Sample] = []
    begin = loop.time()
    await closed_loop([Planned(0, 1, 1)] * 7, 3, send, samples.append)
    assert (len(samples), most) == (7, 3)
    assert loop.time() - begin == pytest.approx(3)


class Served:
    """An endpoint in a thread of its own, since the command runs an event loop itself."""

    def __init__(self, serve: Callable[[], contextlib.AbstractAsyncContextManager[str]]) -> None:
        self._loop, self._ready, self.url = asyncio.new_event_loop(), threading.Event(), ""
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._main(serve),))

    async def _main(self, serve: Callable[[], contextlib.AbstractAsyncContextManager[str]]) -> None:
        self._stop = asyncio.Event()
        async with serve() as self.url:
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> str:
        self._thread.start()
        assert self._ready.wait(20)
        return self.url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def simulated() -> Iterator[str]:
    """The simulated engine: each token takes 20 ms, each 1000 prompt tokens 100 ms."""

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        # Of this process and test: others run the same beside it.
        pid = os.getpid()
        host = f"127.{124 + pid % 4}.{pid // 4 % 256}.{next(_numbers) % 250 + 1}"
        argv = ["--host", host, "--model", "m", "--tokens-per-second", "50", "--prefill-tokens-per-second", "10000"]
        async with running(flags.parse(argv)):
            yield f"http://{host}:8000"

    with Served(serve) as url:
        yield url


def faulty() -> contextlib.AbstractAsyncContextManager[str]:
    """An endpoint that fails in a different way with each request."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    turn = iter(range(100))

    async def completions(request: web.Request) -> web.StreamResponse:
        number = next(turn)
        if number == 0:
            return web.json_response({"error": {"code": "queue_full"}}, status=429)
        if number == 1:
            return web.Response(text="<html>", status=502)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        piece = b'data: {"choices": [{"text": "a"}]}\n\n'
        rest = {
            2: piece,
            3: piece + b'data: {"error": {"code": "worker_lost"}}\n\n',
            4: b"data: [DONE]\n\n",
            5: b"data: {\n\n",
            6: piece + b"data: [DONE]\n\n",
        }
        await answer.write(rest.get(number, b""))
        if number == 7:
            assert request.transport
            request.transport.abort()
        if number == 8:
            await asyncio.sleep(5)
        return answer

    @contextlib.asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        app = web.Application()
        app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", completions)])
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    return serve()


def test_the_times_of_a_known_engine_come_out(simulated: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", f"{simulated}/v1/", "--rate", "20", "--arrivals", "constant", "--requests", "20"]
    argv += ["--prompt-tokens", "1000", "--output-tokens", "11", "--ttft", "10s", "--itl", "5s", "-o", "json"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["answered"], report["errors"], report["model"]) == (20, {}, "m")
    assert (report["promptTokens"], report["outputTokens"]) == (20_000, 220)
    # Never shorter than the engine takes; how much longer is up to the machine's load.
    assert 0.1 <= report["times"]["ttft"]["p50"] < 3
    assert 0.0195 <= report["times"]["itl"]["p50"] < 1
    assert report["times"]["e2e"]["mean"] >= report["times"]["ttft"]["mean"] + 10 * 0.0195
    assert report["attained"] == 1
    assert report["passed"] is True


def test_objectives_that_are_missed(simulated: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "bench",
        simulated,
        "--concurrency",
        "4",
        "--requests",
        "8",
        "--output-tokens",
        "3",
        "--shared-tokens",
        "100",
    ]
    assert main([*argv, "--ttft", "1ms", "--percentile", "50"]) == 1
    said = capsys.readouterr().out
    assert "answered 8 of 8" in said
    assert re.search(r"^TTFT +\d", said, re.MULTILINE)
    assert "TTFT <= 1.0 ms: 0.0% of all requests, 50% wanted: missed" in said
    assert "closed loop" in said


def test_every_failure_has_a_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with Served(faulty) as url:
        argv = ["bench", url, "--concurrency", "1", "--requests", "9", "--timeout", "500ms", "-o", "yaml"]
        assert main(argv) == 1
    report = yaml.safe_load(capsys.readouterr().out)
    assert report["errors"] == {
        "HTTP 429 queue_full": 1,
        "HTTP 502": 1,
        "cut off": 1,
        "error in the stream: worker_lost": 1,
        "empty answer": 1,
        "broken: JSONDecodeError": 1,
        "broken: ClientPayloadError": 1,
        "timeout": 1,
    }
    assert report["answered"] == 1
    assert report["passed"] is False


def test_a_trace_is_replayed(simulated: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "log.jsonl"
    lines = [{"time": 5.0 + i / 10, "prompt_tokens": 40 + i, "output_tokens": 2} for i in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)) + "\nnonsense\n")
    assert main(["bench", simulated, "--trace", str(trace), "--speed", "3", "-o", "json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["promptTokens"] == 40 + 41 + 42 + 43
    assert "left out: 1 lines" in captured.err


def test_the_objectives_of_a_pool(
    simulated: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    objectives: dict[str, Any] = {"ttft": "1h", "itl": "1h", "percentile": 90}
    monkeypatch.setattr(command.Kubectl, "get", lambda *_: {"spec": {"objectives": objectives}})
    argv = [
        "bench",
        simulated,
        "--rate",
        "50",
        "--requests",
        "3",
        "--output-tokens",
        "2",
        "--pool",
        "llama",
        "-o",
        "json",
    ]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["objectives"] == {"ttft": 3600, "itl": 3600, "share": 0.9}
    objectives.clear()
    assert main(argv) == 1
    assert "has no objectives" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "one of --rate, --concurrency and --trace"),
        (["--rate", "1", "--concurrency", "1"], "one of --rate"),
        (["--rate", "0"], "--rate 0"),
        (["--rate", "nan"], "--rate nan"),
        (["--concurrency", "-1"], "--concurrency -1"),
        (["--concurrency", "1", "--seconds", "1"], "--requests beside --concurrency"),
        (["--rate", "1", "--prompt-tokens", "0"], "--prompt-tokens 0"),
        (["--rate", "1", "--shared-tokens", "600"], "--shared-tokens 600"),
        (["--rate", "0.001", "--seconds", "0.001", "--arrivals", "poisson"], "no request comes"),
        (["--rate", "1", "--ttft", "800"], "800ms, 5s"),
        (["--rate", "1", "--percentile", "0"], "--percentile 0"),
        (["--trace", "/nowhere"], "/nowhere cannot be read"),
        (["--trace", "/dev/null"], "/dev/null holds no request"),
        (["--rate", "1"], "does not answer"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "http://127.0.0.1:9", *argv]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
