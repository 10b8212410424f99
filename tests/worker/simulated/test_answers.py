"""Text with stop strings, however the tokens cut them."""

from hypothesis import given
from hypothesis import strategies as st

from twinpool.worker.engines.simulated.logic import calls, language
from twinpool.worker.engines.simulated.logic.answers import Choice, Reply, permission
from twinpool.worker.engines.simulated.logic.sequence import Handover, Token


@given(text=st.text("abc", min_size=1, max_size=30), stops=st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_what_is_shown_ends_before_the_first_stop_string(text, stops):
    choice, shown = Choice(tuple(stops)), ""
    ids = [ord(letter) for letter in text]
    for index, token in enumerate(ids):
        shown += choice.feed(Token("x", token, index, 0, "length" if index == len(ids) - 1 else None))
        if choice.finish is not None:
            break
    assert shown == choice.text
    # A token at a time: the answer ends with the first token that completes any stop string.
    ends = [end for end in range(len(text) + 1) if any(stop in text[:end] for stop in stops)]
    if ends:
        heard = text[: ends[0]]
        assert choice.finish == "stop"
        assert shown == heard[: min(heard.find(stop) for stop in stops if stop in heard)]
    else:
        assert (shown, choice.finish) == (text, "length")


def test_text_that_was_held_back_is_shown_at_an_early_end():
    choice = Choice(("garden wall",))
    (token,) = language.encode(" garden")
    assert choice.feed(Token("x", token, 0, 0)) == ""
    assert choice.end("abort") == " garden"


def call(kind, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}]} if kind == "chat" else {"prompt": "hi"}
    return calls.parse(kind, {"model": "m", **body, **fields}, calls.Served(("m",), 100, connector=True))


def reply(kind, **fields):
    return Reply(call(kind, **fields), "id", 7, "127.0.0.1", 5600, "engine")


def finished(handover=None):
    choice = Choice(())
    choice.feed(Token("x", ord("a"), 0, 2, "length", handover))
    return choice


def test_a_whole_answer_has_the_fields_of_vllm():
    body = reply("chat").whole([finished()])
    assert (body["id"], body["object"], body["created"], body["model"]) == ("chatcmpl-id", "chat.completion", 7, "m")
    message = body["choices"][0]["message"]
    assert (message.pop("role"), message.pop("content")) == ("assistant", "a")
    assert set(message.values()) == {None}
    assert body["kv_transfer_params"] is None
    assert body["prompt_token_ids"] is None
    assert reply("chat", return_token_ids=True).whole([finished()])["prompt_token_ids"]
    body = reply("completions", return_token_ids=True, n=2).whole([finished(), finished()])
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [
        (0, "a", "length"),
        (1, "a", "length"),
    ]
    assert body["choices"][1]["token_ids"] == [ord("a")]
    assert body["choices"][1]["prompt_token_ids"] == language.encode("hi")
    assert body["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "total_tokens": 3,
        "completion_tokens_details": None,
        "prompt_tokens_details": {"cached_tokens": 2, "created_cache_tokens": None, "multimodal_tokens": None},
    }


def test_only_the_first_answer_of_a_list_hands_its_kv_over():
    first, second = Handover("a", (1, 2), 20, 4), Handover("b", (3,), 5, 0)
    assert reply("completions", prompt=["a", "b"]).whole([finished(first), finished(second)])["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2]],
        "remote_engine_id": "engine",
        "remote_request_id": "a",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 20,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 4,
    }


def test_chunks_have_the_fields_of_vllm():
    chat = reply("chat")
    assert chat.opening(1)["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "stop_reason" not in chat.piece(0, "a", Choice(()), [1])["choices"][0]
    assert chat.piece(0, "a", Choice(()), [1])["object"] == "chat.completion.chunk"
    assert chat.closing([finished()])["choices"] == []
    assert "completion_tokens_details" not in chat.closing([finished()])["usage"]
    text, choice = reply("completions", return_token_ids=True), Choice(("b", "a"))
    choice.feed(Token("x", ord("a"), 0, 2))
    chunk = text.piece(0, "", choice, [1])
    assert chunk["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "token_ids": [1],
        "stop_reason": "a",
        "prompt_token_ids": list(language.encode("hi")),
    }
    assert chunk["system_fingerprint"]
    choice.feed(Token("x", ord("a"), 1, 2))
    assert text.piece(0, "", choice, [1])["choices"][0]["prompt_token_ids"] is None  # with the first tokens only
    assert text.closing([finished()])["object"] == "text_completion"


def test_a_model_may_be_sampled_and_no_more():
    assert {key for key, value in permission(7).items() if value is True} == {
        "allow_sampling",
        "allow_logprobs",
        "allow_view",
    }
