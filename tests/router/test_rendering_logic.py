"""Whether a prompt is rendered, and whether what comes of it is built upon."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from twinpool.core.economics import ASSUMED
from twinpool.core.protocol import RouterConfig
from twinpool.router.logic import price
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.endpoints import Endpoint, directory
from twinpool.router.logic.index_exact import Held
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.policy import Ask, Candidate
from twinpool.router.logic.rendering import (
    CHECKED_EACH,
    DISTRUST_SECONDS,
    ENOUGH,
    LEAST_BYTES,
    Gain,
    Trust,
    count_read,
    read_rendered,
    renderable,
    tokens_read,
)
from twinpool.router.logic.request import Request, Route, decode_body, prefill_body, read, with_comparison, with_ids
from twinpool.router.logic.seats import seats_of

LONG = "word " * LEAST_BYTES


def chat(content: Any = LONG, **fields: Any) -> Request:
    messages = [{"role": "user", "content": content}]
    return read(Route.CHAT, json.dumps({"model": "m", "messages": messages, **fields}).encode())


def text(prompt: Any = LONG, **fields: Any) -> Request:
    return read(Route.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


def test_one_long_text_and_one_long_chat_of_text_are_rendered() -> None:
    assert renderable(Route.COMPLETIONS, text())
    assert renderable(Route.CHAT, chat())
    assert renderable(Route.CHAT, chat([{"type": "text", "text": LONG}]))
    assert renderable(Route.CHAT, chat('{"type": "image_url"} ' + LONG)), "it is text that talks of an image"


@pytest.mark.parametrize(
    ("route", "request_"),
    [
        (Route.COMPLETIONS, text("short")),
        (Route.COMPLETIONS, text([LONG])),
        (Route.COMPLETIONS, text([1] * LEAST_BYTES)),
        (Route.COMPLETIONS, text(echo=True)),
        (Route.CHAT, chat(n=2)),
        (Route.CHAT, replace(chat(), adapter="sql")),
        (Route.CHAT, chat([{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "http://x"}}])),
        (Route.CHAT, read(Route.CHAT, json.dumps({"model": "m", "other": LONG}).encode())),
        (Route.EMBEDDINGS, read(Route.EMBEDDINGS, json.dumps({"model": "m", "input": LONG}).encode())),
    ],
)
def test_what_ids_would_not_say_all_of_is_not_rendered(route: Route, request_: Request) -> None:
    assert not renderable(route, request_)


def test_a_renderers_answers_are_read_as_vllm_writes_them() -> None:
    found = read_rendered(b'{"request_id":"chatcmpl-a","token_ids":[3, 286,81],"features":null,"model":"tiny"}')
    assert found is not None
    assert (found.ids, found.text) == ([3, 286, 81], b"[3, 286,81]")
    completion = read_rendered(b'[{"request_id":"cmpl-a","token_ids":[7]}]')
    assert completion is not None
    assert completion.ids == [7]


@pytest.mark.parametrize(
    "answer",
    [b"", b"{}", b"[]", b'[{"token_ids":[1]},{"token_ids":[2]}]', b'{"token_ids":[]}', b'{"token_ids":["1"]}',
     b'{"token_ids":[-1]}', b'{"token_ids":[1],"features":{"mm_hashes":{}}}'],
)  # fmt: skip
def test_answers_of_no_use_are_none(answer: bytes) -> None:
    assert read_rendered(answer) is None


def test_what_engines_say_that_they_read() -> None:
    assert tokens_read(b'{"prompt_token_ids":[1,2],"choices":[{"index":0}]}') == [1, 2]
    assert tokens_read(b'{"choices":[{"prompt_token_ids":[3]}]}') == [3]
    assert tokens_read(b'{"choices":[]}') is None
    assert tokens_read(b"no") is None
    assert count_read(b'..."text":"\\"prompt_tokens\\": 9"}],"usage":{"prompt_tokens": 12,"total_tokens":13}}') == 12
    assert count_read(b'data: {"text":"\\"prompt_tokens\\": 9"}') is None


def test_ids_take_the_place_of_a_text_on_both_legs() -> None:
    known = with_ids(text("hi", max_tokens=5, stream=True), b"[5, 6]", chat=False)
    assert json.loads(decode_body(known, None)) == {"model": "m", "prompt": [5, 6], "max_tokens": 5, "stream": True}
    prefill = json.loads(prefill_body(known))
    assert (prefill["prompt"], prefill["max_tokens"]) == ([5, 6], 1)
    assert "prompt_token_ids" not in prefill["kv_transfer_params"]


def test_ids_of_a_chat_go_beside_its_messages_on_both_legs() -> None:
    known = with_ids(chat("hi"), b"[5,6]", chat=True)
    assert json.loads(prefill_body(known))["kv_transfer_params"]["prompt_token_ids"] == [5, 6]
    handed = json.loads(decode_body(known, b'{"do_remote_prefill":true} '))
    assert handed["kv_transfer_params"] == {"do_remote_prefill": True, "prompt_token_ids": [5, 6]}
    whole = json.loads(decode_body(known, None))
    assert whole["kv_transfer_params"] == {"prompt_token_ids": [5, 6]}
    assert whole["messages"] == json.loads(known.body)["messages"]


@pytest.mark.parametrize("given_", [{}, {"return_token_ids": False}])
def test_a_comparison_asks_the_prefill_worker_alone(given_: dict[str, Any]) -> None:
    compared = with_comparison(chat("hi", **given_))
    asked = prefill_body(compared)
    assert asked.count(b"return_token_ids") == 1
    assert json.loads(asked)["return_token_ids"] is True
    assert decode_body(compared, None) == compared.body


def test_a_prompt_is_rendered_where_more_than_its_time_is_at_stake() -> None:
    gain = Gain()
    assert gain.worth(32_000, 10 * gain.expected(32_000))
    assert not gain.worth(32_000, gain.expected(32_000))
    assert not gain.worth(32_000, 0.0)
    assert gain.expected(0) < gain.expected(32_000) == pytest.approx(0.0212)
    assert gain.patience(0) == 0.05
    assert gain.patience(100_000) == pytest.approx(2 * gain.expected(100_000))


def test_renders_that_take_long_or_bring_nothing_end_and_are_tried_again() -> None:
    for harm in ("slow", "useless"):
        gain = Gain()
        for _ in range(100):
            gain.took(10_000, 2.0) if harm == "slow" else gain.brought(0.0)
        assert not gain.worth(10_000, 0.5)
        tries = sum(gain.worth(10_000, 0.5) for _ in range(10_000))
        assert tries > 0, "nobody would see that it got better"


@given(st.floats(-2, 3))
def test_the_share_that_ids_save_is_a_share(value: float) -> None:
    gain = Gain()
    for _ in range(200):
        gain.brought(value)
    assert 0.0 <= gain.share <= 1.0


def test_ids_take_the_place_of_texts_once_engines_agreed_often_enough() -> None:
    trust = Trust()
    for _ in range(ENOUGH):
        assert trust.checks()
        trust.judge(True, 0.0)
    later = [trust.checks() for _ in range(10 * CHECKED_EACH)]
    assert sum(later) == 10


def test_one_difference_ends_it_for_ten_minutes_and_trust_is_earned_anew() -> None:
    trust = Trust()
    for _ in range(ENOUGH + 1):
        trust.judge(True, 5.0)
    trust.judge(False, 5.0)
    assert trust.lost(5.0 + DISTRUST_SECONDS - 1)
    assert not trust.lost(5.0 + DISTRUST_SECONDS)
    assert trust.checks()
    trust.judge(False, 6.0)
    trust.renew()
    assert not trust.lost(6.0)


ASK = Ask(8000, 100)
IDLE = Candidate()


def stake(*candidates: Candidate, caches: tuple[int, ...] = ()) -> float:
    return price.at_stake(ASK, candidates, ASSUMED, caches or (1,) * len(candidates))


def test_a_whole_prefill_is_at_stake_among_workers_that_seem_to_hold_nothing() -> None:
    assert stake(IDLE, IDLE) == pytest.approx(ASSUMED.prefill(8000, 0) - ASSUMED.prefill(1, 7999), rel=0.01)


def test_nothing_is_at_stake_where_no_other_could_be_cheaper() -> None:
    assert stake(IDLE) == 0.0
    assert stake(IDLE, Candidate(backlog=60.0)) == 0.0
    assert stake(Candidate(cached=7999, held=7999), IDLE) < 1e-9
    assert stake(IDLE, IDLE, caches=(0, 0)) == 0.0
    assert stake(IDLE, caches=(2,)) > 0.1, "another rank of the same worker may hold it"


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 7999), st.booleans()), min_size=1, max_size=8))
def test_no_more_is_at_stake_than_knowing_everything_could_save(workers: list[tuple[float, int, bool]]) -> None:
    candidates = [Candidate(backlog=backlog, cached=cached, held=cached) for backlog, cached, _ in workers]
    caches = [int(one[2]) for one in workers]
    found = price.at_stake(ASK, candidates, ASSUMED, caches)
    best = [replace(one, cached=7999, held=7999) if yes else one for one, yes in zip(candidates, caches, strict=True)]
    least = min(price.prefill_prices(ASK, candidates, ASSUMED))
    assert 0.0 <= found <= least - min(price.prefill_prices(ASK, best, ASSUMED)) + 1e-9


WORKERS = [Endpoint(f"p{n}", "prefill", "h", 1) for n in range(3)]


def chooser() -> Chooser:
    return Chooser(RouterConfig("p", "n", ("m",), policy="price"), Ledger(0), random.Random(1))


def test_a_choice_is_worth_rendering_only_while_events_are_relied_on_and_there_is_a_choice() -> None:
    ours = chooser()
    request = chat()
    asked = ours.asked(request)
    assert ours.stake(asked, WORKERS) == 0.0
    ours.exact.rely(16, frozenset(worker.id for worker in WORKERS))
    assert ours.stake(asked, WORKERS) > 0.05
    assert ours.stake(asked, WORKERS[:1]) == 0.0
    assert ours.stake(asked, ()) == 0.0
    ours.exact.rely(16, frozenset())
    assert ours.stake(asked, WORKERS) == 0.0


def test_what_ids_saved_is_what_the_estimate_would_have_cost_more() -> None:
    ours = chooser()
    ours.exact.rely(16, frozenset(worker.id for worker in WORKERS))
    request = chat()
    before = ours.asked(request)
    after = ours.rendered(before, list(range(8000)), request)
    assert (after.ask.prompt, len(after.names)) == (8000, 500)
    located = replace(after, held={"p2": Held(500, 500)})
    # The estimate knew of nobody and takes the first of equals.
    assert ours.saved(before, located, WORKERS) == pytest.approx(ours.stake(after, WORKERS), rel=0.05)
    assert ours.saved(before, after, WORKERS) == 0.0
    ours.received(before, WORKERS[2])
    assert ours.saved(before, located, WORKERS) == pytest.approx(0.0, abs=1e-3), "the estimate was right"


def test_of_many_workers_what_ids_saved_is_seen_too() -> None:
    ours = chooser()
    many = [Endpoint(f"p{n}", "prefill", "h", 1) for n in range(64)]
    ours.exact.rely(16, frozenset(worker.id for worker in many))
    request = chat()
    before = ours.asked(request)
    located = replace(ours.rendered(before, list(range(8000)), request), held={"p63": Held(500, 500)})
    assert ours.saved(before, located, many) == pytest.approx(ours.stake(before, many), rel=5)
    assert ours.saved(before, located, many) > 0.1


def test_the_ranks_of_one_worker_are_a_choice_too() -> None:
    ours = chooser()
    worker = Endpoint("p", "prefill", "h", 1, ranks=2)
    ours.ranks.seats = seats_of([worker])
    request = chat()
    before = ours.asked(request)
    ours.exact.rely(16, frozenset({"p#0"}))
    assert ours.stake(before, [worker]) == 0.0
    ours.exact.rely(16, frozenset({"p#0", "p#1"}))
    assert ours.stake(before, [worker]) > 0.05
    ours.received(before, worker)
    assert ours.stake(before, [worker]) > 0.02, "somewhere on the worker, it is thought"
    located = replace(ours.rendered(before, list(range(8000)), request), held={"p#1": Held(500, 500)})
    assert ours.saved(before, located, [worker]) > 0.1


def test_renderers_serve_while_every_worker_is_of_their_revision() -> None:
    renderer = Endpoint("x", "renderer", "h", 1, "r1", admitted=True)
    workers = [Endpoint(f"d{n}", "decode", "h", 1, "r1", admitted=True) for n in range(2)]
    assert directory([renderer, *workers]).renderers == (renderer,)
    assert directory([renderer, *workers]).decode == tuple(workers)
    newer = Endpoint("d2", "decode", "h", 1, "r2", admitted=True)
    assert directory([renderer, *workers, newer]).renderers == ()
    assert directory([renderer]).renderers == ()
