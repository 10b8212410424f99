"""Reading and rewriting bodies: what is kept to the byte, what is taken out, what may be split."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinpool.router.logic.errors import Refused
from twinpool.router.logic.request import GUARDED, Route, decode_body, params_of, prefill_body, read

PARAMS = b'{"do_remote_prefill":true,"x":1}'

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(scalars | texts, lambda v: st.lists(v, max_size=3) | st.dictionaries(texts, v, max_size=3))
names = st.sampled_from(
    ["model", "prompt", "stream", "max_tokens", "max_completion_tokens", "min_tokens", "stream_options", "n", *GUARDED]
)
bodies = st.dictionaries(names | texts, values, max_size=8)


def legal(body: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k != "model" or v is None or isinstance(v, str)}


@settings(deadline=None)
@given(bodies.map(legal), st.booleans(), st.booleans())
def test_rewriting_is_exactly_the_edits_listed(body: dict[str, Any], ascii_only: bool, spaced: bool) -> None:
    raw = json.dumps(body, ensure_ascii=ascii_only, indent=2 if spaced else None).encode()
    request = read(Route.CHAT, raw)
    kept = {k: v for k, v in body.items() if k not in GUARDED}
    if isinstance(kept.get("vllm_xargs"), dict):
        kept["vllm_xargs"] = {k: v for k, v in kept["vllm_xargs"].items() if k not in GUARDED}
    assert json.loads(decode_body(request, None)) == kept
    assert list(json.loads(decode_body(request, PARAMS)).items()) == [
        *kept.items(),
        ("kv_transfer_params", json.loads(PARAMS)),
    ]
    prefill = json.loads(prefill_body(request))
    gone = {"max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options"}
    edits = {k: prefill.pop(k) for k in ("max_tokens", "max_completion_tokens", "stream", "kv_transfer_params")}
    assert prefill == {k: v for k, v in kept.items() if k not in gone}
    assert edits["kv_transfer_params"]["do_remote_decode"] is True
    assert (edits["max_tokens"], edits["max_completion_tokens"], edits["stream"]) == (1, 1, False)
    if not body.keys() & set(GUARDED) and "vllm_xargs" not in body:
        assert request.body is raw


@pytest.mark.parametrize(
    "raw",
    [
        b'{"kv_transfer_params":{"a":1},"model":"m","kv_transfer_params":{"b":1}}',
        b'{"kv\\u005ftransfer_params":1,"kv_transfer_params":2,"model":"m"}',
        b'{"ec_transfer_params":{},"model":"m"}',
        b'{"model":"m","vllm_xargs":{"kv_transfer_params":{"a":1},"k":1}}',
        b'{"model":"m","vllm_xargs":{"kv_transfer_params":1},"vllm_xargs":{"kv_transfer_params":2}}',
    ],
)
def test_a_guarded_field_is_gone_however_it_is_spelt(raw: bytes) -> None:
    request = read(Route.CHAT, raw)
    for body in (request.body, prefill_body(request).replace(b'"kv_transfer_params":{"do_remote_decode"', b"")):
        assert b"transfer_params" not in body
        assert b'"model":"m"' in body


def test_everything_else_keeps_its_bytes() -> None:
    raw = b' {"temperature" : 1.0e-0,\n "seed":12345678901234567890123,"x":"\\u00e9","prompt":"a"} \r\n'
    request = read(Route.COMPLETIONS, raw)
    assert request.body is raw
    spliced = raw.replace(b"} \r\n", b',"kv_transfer_params":' + PARAMS + b"} \r\n")
    assert decode_body(request, PARAMS) == spliced
    assert decode_body(read(Route.CHAT, b"{ }"), PARAMS) == b'{ "kv_transfer_params":' + PARAMS + b"}"
    assert b'"temperature":1.0e-0,"seed":12345678901234567890123' in prefill_body(request)


@pytest.mark.parametrize("xargs", [b"[1]", b"7", b"null", b'"kv_transfer_params"', b'{"k":1}'])
def test_extra_arguments_without_a_guarded_name_are_left_alone(xargs: bytes) -> None:
    raw = b'{"vllm_xargs":' + xargs + b"}"
    assert read(Route.CHAT, raw).body is raw


@pytest.mark.parametrize(
    ("body", "splittable"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": ["a"]}, True),
        ({"prompt": [[1, 2]]}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"prompt": "a", "n": 1, "best_of": None, "echo": False, "prompt_logprobs": None}, True),
        ({"prompt": ["a", "b"]}, False),
        ({"prompt": [[1], [2]]}, False),
        ({"prompt": []}, False),
        ({"prompt": [{"prompt": "x"}]}, False),
        ({"prompt": None}, False),
        ({}, False),
        ({"prompt": "a", "n": 2}, False),
        ({"prompt": "a", "n": 1.0}, False),
        ({"prompt": "a", "best_of": 2}, False),
        ({"prompt": "a", "use_beam_search": True}, False),
        ({"prompt": "a", "echo": True}, False),
        ({"prompt": "a", "prompt_logprobs": 0}, False),
        ({"prompt": "a", "prompt_embeds": "AA"}, False),
    ],
)
def test_only_one_prompt_with_one_answer_is_split(body: dict[str, Any], splittable: bool) -> None:
    assert read(Route.COMPLETIONS, json.dumps(body).encode()).splittable is splittable


def test_chat_has_one_prompt_and_other_routes_are_never_split() -> None:
    assert read(Route.CHAT, b'{"messages":[]}').splittable
    request = read(Route.TOKENIZE, b'{"prompt":"a"}')
    assert (request.splittable, request.output_tokens) == (False, 0)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"a":1}x', "not valid JSON"),
        (b'{"\xff":1}', "not valid JSON"),
        ('{"a":1}'.encode("utf-16"), "not valid JSON"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"model":5}', "'model' must be a string"),
        (b'{"model":"\xff"}', "'model' must be a string"),
    ],
)
def test_a_bad_body_is_refused_with_its_reason(raw: bytes, words: str) -> None:
    with pytest.raises(Refused) as caught:
        read(Route.CHAT, raw)
    assert caught.value.refusal.status == 400
    assert words in caught.value.refusal.message


def test_the_model_and_the_estimates() -> None:
    request = read(Route.CHAT, b'{"model":"m\\u00e9","max_tokens":7,"max_completion_tokens":9}')
    assert (request.model, request.output_tokens) == ("mé", 9)
    assert read(Route.CHAT, b'{"model":null,"max_tokens":7}').output_tokens == 7
    assert read(Route.CHAT, b'{"max_tokens":"many"}').output_tokens == 256
    assert read(Route.CHAT, b"{}").model is None
    priorities = {b"-3": -3, b"12": 12, b"null": 0, b'"5"': 0, b"1.5": 0, b"9999999999": 0, b"--1": 0}
    for text, priority in priorities.items():
        assert read(Route.CHAT, b'{"priority":' + text + b"}" if text != b"--1" else b"{}").priority == priority
    assert read(Route.RESPONSES, b'{"max_output_tokens":9}').output_tokens == 9
    assert read(Route.MESSAGES, b'{"max_tokens":8}').output_tokens == 8


@pytest.mark.parametrize(
    ("answer", "params"),
    [
        (b'{"id":1,"kv_transfer_params":{"do_remote_prefill":true,"x":1},"z":2}', PARAMS),
        (b'{"kv_transfer_params":null}', None),
        (b'{"kv_transfer_params":{"do_remote_prefill":false}}', None),
        (b'{"kv_transfer_params":{}}', None),
        (b'{"kv_transfer_params":[1]}', None),
        (b"{}", None),
        (b"[]", None),
        (b"oops", None),
    ],
)
def test_parameters_of_a_prefill_answer(answer: bytes, params: bytes | None) -> None:
    assert params_of(answer) == params


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_no_mutation_smuggles_a_guarded_field_past_a_python_engine(data: st.DataObject) -> None:
    base = bytearray(b'{"model":"m","a":{"kv_transfer_params":1},"kv\\u005ftransfer_params":{"b":[1,"x"]},"c":"\\"}"}')
    for _ in range(data.draw(st.integers(1, 4))):
        where = data.draw(st.integers(0, len(base) - 1))
        base[where : where + data.draw(st.integers(0, 1))] = data.draw(st.binary(max_size=2))
    try:
        request = read(Route.CHAT, bytes(base))
        seen = json.loads(request.body)
    except (Refused, ValueError):
        return
    assert not set(GUARDED) & seen.keys()
