"""Request bodies: what is asked, and the refusals that vLLM gives."""

import pytest

from twinpool.worker.engines.simulated.logic import calls, language
from twinpool.worker.engines.simulated.logic.calls import Refused, Served

SERVED = Served(("m", "alias"), 100, connector=True)
HELLO = [{"role": "user", "content": "hello"}]
REMOTE = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[1]],
}


def completion(**fields):
    return calls.parse("completions", {"model": "m", "prompt": "hi", **fields}, SERVED)


def chat(**fields):
    return calls.parse("chat", {"model": "m", "messages": HELLO, **fields}, SERVED)


def test_defaults_are_those_of_openai():
    call = completion()
    assert (call.n, call.max_tokens, call.stream, call.remote, call.hand_over) == (1, (16,), False, None, False)
    assert chat().max_tokens == (100 - len(chat().prompts[0]),)


def test_text_and_its_token_ids_are_the_same_prompt():
    assert completion(prompt=language.encode("hi")).prompts == completion().prompts
    assert completion(prompt=["hi", "there"]).prompts[0] == completion().prompts[0]
    assert completion(prompt=[language.encode("hi")]).prompts == completion().prompts


def test_content_parts_of_text_are_joined():
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    assert chat(messages=parts).prompts == chat().prompts
    assert chat(messages=[{"role": "user"}]).prompts[0]


def test_max_completion_tokens_beats_max_tokens_in_a_chat_alone():
    assert chat(max_tokens=1, max_completion_tokens=7).max_tokens == (7,)
    assert completion(max_tokens=1, max_completion_tokens=7).max_tokens == (1,)


def test_options_arrive():
    call = completion(
        model="alias",
        stream=True,
        stream_options={"include_usage": True},
        stop="x",
        stop_token_ids=[1],
        ignore_eos=True,
        min_tokens=2,
        return_token_ids=True,
        cache_salt="a",
    )
    assert (call.model, call.stream, call.include_usage, call.stops) == ("alias", True, True, ("x",))
    assert (call.stop_token_ids, call.ignore_eos, call.min_tokens, call.token_ids) == (frozenset({1}), True, 2, True)
    assert (call.salt, completion().salt) == ("a", None)


def test_an_adapter_is_a_model_with_a_source():
    served = Served(("m",), 100, connector=True, adapters={"sql": "org/sql"})

    def adapter(model):
        return calls.parse("completions", {"prompt": "hi", "model": model}, served).adapter

    assert adapter("m") is None
    assert adapter("sql") == ("sql", "org/sql")


def test_handoff_parameters_are_read():
    assert completion(kv_transfer_params={"do_remote_decode": True}).hand_over
    call = completion(kv_transfer_params={**REMOTE, "remote_prefill_cached_tokens": 5})
    assert (call.remote.request_id, call.remote.port, call.remote.cached) == ("r", 5600, 5)
    assert completion(kv_transfer_params={"do_remote_prefill": True}).remote is None


def test_without_a_connector_handoff_parameters_are_ignored():
    served = Served(("m",), 100, connector=False)
    assert calls.parse("completions", {"prompt": "hi", "kv_transfer_params": REMOTE}, served).remote is None


@pytest.mark.parametrize(
    ("fields", "status", "says"),
    [
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"model": 3}, 400, "model must be of type str"),
        ({"prompt": ""}, 400, "must be provided"),
        ({"prompt": None}, 400, "prompt must be a list"),
        ({"prompt": [1, "a"]}, 400, "prompt must be a list of token ids"),
        ({"prompt": [True]}, 400, "prompt must be a list of token ids"),
        ({"prompt": [-1]}, 400, "out of vocabulary"),
        ({"prompt": ["a"] * 129}, 400, "at most 128 prompts"),
        ({"prompt": "x" * 400}, 400, "maximum context length is 100 tokens"),
        ({"max_tokens": 100}, 400, "maximum context length is 100 tokens"),
        ({"max_tokens": 0}, 400, "max_tokens must be a whole number of at least 1"),
        ({"max_tokens": 1.5}, 400, "max_tokens must be a whole number"),
        ({"min_tokens": 5, "max_tokens": 1}, 400, "less than or equal to max_tokens=1, got 5"),
        ({"n": 129}, 400, "between 1 and 128"),
        ({"stream_options": {}}, 400, "only be defined when `stream=True`"),
        ({"stream": "yes"}, 400, "stream must be of type bool"),
        ({"stop": 3}, 400, "stop must be a string"),
        ({"stop": ["", "a"]}, 400, "stop must not hold"),
        ({"stop": ["a"] * 5}, 400, "at most 4"),
        ({"stop_token_ids": "a"}, 400, "stop_token_ids must be a list"),
        ({"kv_transfer_params": {**REMOTE, "remote_port": 0}}, 400, "remote_port must be a port"),
        ({"kv_transfer_params": {**REMOTE, "remote_host": 3}}, 400, "those of a prefill answer"),
        ({"kv_transfer_params": {**REMOTE, "remote_block_ids": 3}}, 400, "those of a prefill answer"),
    ],
)
def test_a_completion_is_refused_as_vllm_does(fields, status, says):
    with pytest.raises(Refused) as refused:
        completion(**fields)
    assert refused.value.status == status == refused.value.body()["error"]["code"]
    assert says in refused.value.body()["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (None, "at least one message"),
        ([], "at least one message"),
        (["hi"], "an object with a role"),
        ([{"content": "hi"}], "an object with a role"),
        ([{"role": "user", "content": 3}], "must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "type text only"),
        ([{"role": "user", "content": ["hi"]}], "type text only"),
    ],
)
def test_a_chat_is_refused_as_vllm_does(messages, says):
    with pytest.raises(Refused, match=says):
        chat(messages=messages)


def test_a_body_must_be_an_object():
    with pytest.raises(Refused, match="JSON object"):
        calls.parse("chat", [1], SERVED)


def test_tokenizing_takes_text_or_messages():
    assert calls.prompt_of({"prompt": "hi"}) == completion().prompts[0]
    assert calls.prompt_of({"messages": HELLO}) == chat().prompts[0]
    assert calls.tokens_of({"tokens": [1]}) == (1,)
    with pytest.raises(Refused, match="must be a string"):
        calls.prompt_of({"prompt": 3})


@pytest.mark.parametrize("header", ["1", "-1", "x", ""])
def test_a_rank_that_is_not_there_is_refused(header):
    assert calls.rank_of(None, 1) is None
    assert calls.rank_of("0", 1) == 0
    assert calls.rank_of("1", 2) == 1
    with pytest.raises(calls.Refused, match=r"out of range \[0, 1\)"):
        calls.rank_of(header, 1)
