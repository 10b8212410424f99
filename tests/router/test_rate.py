"""Limits of API keys: what passes, when to come back, and that one key's use costs no other."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic.keys import Keyring, digest_of
from twinpool.router.logic.rate import Rates

KEYS = {name: name.encode() * 16 for name in "ab"}


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 500)), max_size=60), st.integers(1, 30), st.integers(1, 900))
def test_a_key_gets_its_rate_a_minutes_worth_and_one_request_at_most(steps, requests, tokens):
    rates, now, taken, spent, last = Rates(requests, tokens), 100.0, 0, 0, 0
    for pause, cost in steps:
        now += pause
        wait = rates.take("a", cost, now)
        assert wait >= 0
        if not wait:
            taken, spent, last = taken + 1, spent + cost, cost
        minutes = (now - 100.0) / 60
        assert taken <= requests * (1 + minutes) + 1 + 1e-6
        assert spent - last <= tokens * (1 + minutes) + 1e-6
    assert rates.take("b", 1, now) == 0, "another key's use costs nothing"


@given(st.integers(1, 100), st.integers(1, 10_000))
def test_who_comes_back_when_told_is_let_in(requests, tokens):
    rates, now = Rates(requests, tokens), 0.0
    for _ in range(200):
        wait = rates.take("a", 333, now)
        now += wait
        assert not wait or not rates.take("a", 333, now + 1e-6)


def test_a_limit_that_is_not_set_limits_nothing():
    rates = Rates(0, 0)
    assert all(rates.take("a", 10**9, 0.0) == 0 for _ in range(100))
    assert Rates(0.5, 0).take("a", 1, 0.0) == 0, "less than one in a minute is still one, now and then"
    rates = Rates(0, 60)
    assert rates.take("a", 600, 0.0) == 0, "larger than a minute's worth: once"
    assert rates.take("a", 1, 0.0) == pytest.approx(541)


async def test_a_key_beyond_its_limit_is_told_when_to_come_back(make_router, kit):
    router = await make_router(disaggregated=False, connector=None, key_requests=2)
    await router.engine("decode")
    router.pool.keyring = Keyring([(name, digest_of(key, name)) for name, key in KEYS.items()], os.urandom(16))
    client = await router.connect()

    async def ask(name, request=None):
        header = f"Authorization: Bearer {KEYS[name].decode()}\r\n"
        models = f"GET /v1/models HTTP/1.1\r\nHost: r\r\n{header}\r\n".encode()
        client.send(models if request else kit.post(kit.STREAM, headers=header))
        return await client.answer()

    assert [(await ask("a")).status for _ in range(3)] == [200, 200, 429]
    refused = await ask("a")
    assert (refused.error["code"], refused.error["type"]) == ("key_limit", "rate_limit_error")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert (await ask("b")).status == 200
    assert (await ask("a", "models")).status == 200, "what reaches no worker costs nothing"
    assert router.value("turned_away_total", "limit") == 2
    assert router.value("key_requests_total", "a") == 2
    assert router.value("key_tokens_total", "b") > kit.STREAM["max_tokens"]
    await router.idle()
