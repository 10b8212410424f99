"""The access log and the times: what is said of a request, of which ones, and what is never said."""

from __future__ import annotations

import asyncio
import json
import os
import random

from twinpool.router.logic.access import FAILURES_PER_SECOND, Entry, Sampler, line
from twinpool.router.shell import access
from twinpool.router.shell.access import AccessLog

ENTRY = Entry(1.0, "id", "/v1/completions", 200, "", True, 7, 3, 0.0, 0.0123456789, 0.5, "remote", "", "p0", "d0", 1, 1)


def test_a_line_says_what_there_is() -> None:
    said = json.loads(line(ENTRY))
    assert said["first_byte"] == 0.012346
    assert (said["handoff"], said["prefill"], said["queued"], said["stream"]) == ("remote", "p0", 0.0, True)
    assert not {"key", "reason"} & said.keys()
    assert line(ENTRY).endswith(b"}\n")


def test_a_share_of_all_and_failures_within_a_bound() -> None:
    sampler = Sampler(0.1, random.Random(1))
    assert 60 < sum(sampler.wanted(200) for _ in range(1000)) < 140
    quiet = Sampler(0.0, random.Random(1))
    assert not any(quiet.wanted(status) for status in (200, 404, 429, 499))
    assert sum(quiet.wanted(502) for _ in range(1000)) == FAILURES_PER_SECOND
    quiet.second()
    assert quiet.wanted(502)


async def read(router, kit, count):
    """Flush the router's log into a pipe and return its entries."""
    readable, router.pool.access._output = os.pipe()
    router.pool.access.flush()
    await router.pool.access._writing
    os.close(router.pool.access._output)
    with os.fdopen(readable) as log:
        found = [json.loads(text) for text in log]
    assert len(found) == count
    return found


async def test_what_is_said_of_requests(make_router, kit):
    router = await make_router(access_log=1.0)
    for role in ("prefill", "decode"):
        await router.engine(role)
    secret = "a prompt that nobody else may read"
    await router.ask(kit.post({**kit.STREAM, "prompt": secret}, headers="X-Request-Id: abc\r\n"))
    await router.ask(kit.post({**kit.PROMPT, "n": 2}))
    router.engines[1].script = kit.reset
    await router.ask(kit.post(kit.STREAM))
    router.engines[1].script = kit.hang
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    await kit.until(lambda: len(router.engines[1].requests) >= 5)
    client.abort()
    await router.idle()
    split, whole, failed, left = await read(router, kit, 4)
    assert (split["request_id"], split["status"], split["handoff"], split["events"]) == ("abc", 200, "remote", 6)
    assert (split["prefill"], split["decode"], split["decode_legs"]) == ("prefill-0", "decode-0", 1)
    assert 0 <= split["queued"] <= split["first_byte"] <= split["total"] < 10
    assert (whole["handoff"], whole["status"]) == ("whole", 200)
    assert "prefill" not in whole
    assert (failed["status"], failed["decode_legs"]) == (502, 2)
    assert (left["status"], "first_byte" in left) == (499, False)
    assert secret not in json.dumps([split, whole, failed, left])


async def test_requests_that_were_turned_away_are_in_the_log(make_router, kit):
    router = await make_router(access_log=1.0, queue_concurrency=1, queue_max=0)
    await router.engine("decode", kit.hang)
    client = await router.connect()
    client.send(kit.post(kit.STREAM))
    await kit.until(lambda: router.engines[0].requests)
    assert (await router.ask(kit.post(kit.STREAM))).status == 429
    (entry,) = await read(router, kit, 1)
    assert (entry["status"], "queued" in entry) == (429, False)
    client.abort()
    await router.idle()


async def test_times_of_a_stream(make_router, kit):
    router = await make_router()
    for role in ("prefill", "decode"):
        await router.engine(role)

    async def slowly(engine, seen):
        seen.writer.write(kit.SSE_HEAD)
        for event in kit.EVENTS:
            await asyncio.sleep(0.02)
            seen.writer.write(kit.chunk(event))
        seen.writer.write(b"0\r\n\r\n")

    router.engines[1].script = slowly
    await router.ask(kit.post(kit.STREAM))
    histograms = router.pool.numbers.histograms
    between = histograms["twinpool_router_inter_token_seconds"][("decode-0",)].total
    assert 0.019 < between < 1.0, "five tokens and [DONE], 20 ms apart"
    assert 0.019 < histograms["twinpool_router_first_event_seconds"][("remote", "decode-0")].total < 1.0


async def test_a_log_that_nobody_takes_costs_no_request(make_router, kit, monkeypatch):
    monkeypatch.setattr(access, "_LONGEST", 3)
    router = await make_router()
    log = AccessLog(1.0, random.Random(1), router.pool.numbers)
    log.flush()
    readable, log._output = os.pipe()
    os.set_blocking(log._output, True)
    log._write(b"x" * 60_000)
    for _ in range(5):
        log.add(ENTRY)
    assert router.value("access_log_dropped_total") == 2
    log._lines *= 2000
    log.flush()
    log.add(ENTRY)
    log.flush()
    assert len(log._lines) == 1, "one write at a time"
    os.close(readable)
    await log._writing
    log.flush()
    await log._writing
    os.close(log._output)
