"""Images and recordings in chats: what tells prompts apart, and for how many tokens they count."""

from __future__ import annotations

import base64
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic import media
from twinpool.router.logic.index_text import chain, text_of
from twinpool.router.logic.request import Request, Route, read


def picture(seed: int, size: int = 60_000) -> str:
    return base64.b64encode(random.Random(seed).randbytes(size)).decode()


def part(data: str, kind: str = "image_url") -> dict[str, object]:
    match kind:
        case "input_audio":
            return {"type": kind, kind: {"data": data, "format": "wav"}}
        case "anthropic":
            return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
        case "flat":
            return {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
        case _:
            return {"type": kind, kind: {"url": f"data:image/png;base64,{data}"}}


def chat(*parts: dict[str, object], text: str = "what is this?", **options: object) -> Request:
    content = [*parts, {"type": "text", "text": text}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **options}
    return read(Route.CHAT, json.dumps(body).encode())


def keys(request: Request) -> tuple[int, ...]:
    return chain(text_of(request.fields, request.adapter, request.shrunk))


def shared(one: Request, other: Request) -> int:
    """Return how many leading blocks two prompts share."""
    pairs = zip(keys(one), keys(other), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(keys(one)), len(keys(other))))


KINDS = ["image_url", "video_url", "audio_url", "input_audio", "anthropic", "flat"]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_media_are_a_hit_and_others_are_none_whatever_the_text(kind: str) -> None:
    first = chat(part(picture(1), kind))
    again = chat(part(picture(1), kind), text="and now in French, please")
    other = chat(part(picture(2), kind))
    assert shared(first, again) >= 6, "all but the last blocks"
    assert shared(first, other) == 0
    assert len(keys(first)) == len(keys(other)) <= 12, "an image has the blocks of its tokens"


@pytest.mark.parametrize("kind", KINDS)
def test_media_count_as_what_a_model_reads_of_them(kind: str) -> None:
    bare = chat().prompt_tokens
    assert chat(part(picture(1), kind)).prompt_tokens == pytest.approx(bare + media.TOKENS, abs=40)
    two = chat(part(picture(1), kind), part(picture(2, 3_000_000), kind))
    assert two.prompt_tokens == pytest.approx(bare + 2 * media.TOKENS, abs=80)
    assert json.loads(two.body)["messages"][0]["content"][-1]["text"] == "what is this?", "bodies are not changed"


def test_an_image_after_a_long_text_is_found() -> None:
    text = {"type": "text", "text": "some words " * 1000}
    assert chat(text, part(picture(1))).prompt_tokens < 11_500 // 4 + media.TOKENS
    assert shared(chat(text, part(picture(1))), chat(text, part(picture(2)))) >= 9


def test_order_and_number_of_images_tell_prompts_apart() -> None:
    a, b = part(picture(1)), part(picture(2))
    assert shared(chat(a, b), chat(b, a)) == 0
    assert 6 <= shared(chat(a, b), chat(a)) < len(keys(chat(a, b)))


@pytest.mark.parametrize("place", [0, 40_000, 79_000])
def test_a_byte_at_the_beginning_in_the_middle_or_at_the_end_makes_another_image(place: int) -> None:
    data = picture(1)
    changed = data[:place] + ("A" if data[place] != "A" else "B") + data[place + 1 :]
    assert shared(chat(part(data)), chat(part(changed))) == 0


def test_long_strings_that_engines_read_as_text_are_text() -> None:
    blob = picture(1)
    for request in (
        chat(text=blob),
        chat(text=f"see data:image/png;base64,{blob}"),
        chat(text=f'{{"url": "data:image/png;base64,{blob}"}}'),
        chat({"type": "image_url", "image_url": {"url": blob}}),
        chat(tools=[{"url": f"data:,{blob}"}]),
    ):
        assert request.prompt_tokens > len(blob) // 4, "or a key's limit of tokens would be easy to get around"
        assert request.shrunk == b""


def test_links_and_what_is_short_stay_as_they_are() -> None:
    link = {"type": "image_url", "image_url": {"url": "https://example.com/" + "a" * 600}}
    other = {"type": "image_url", "image_url": {"url": "https://example.com/" + "b" * 600}}
    assert (shared(chat(link), chat(link)), shared(chat(link), chat(other))) == (1, 0)
    assert chat(part(picture(1, 900))).shrunk == b""
    assert read(Route.COMPLETIONS, json.dumps({"prompt": "a" * 20_000}).encode()).shrunk == b""


@given(st.lists(st.one_of(st.text(max_size=40), st.integers(3000, 20_000)), max_size=6))
def test_what_stands_between_media_stays(contents: list[str | int]) -> None:
    parts = [
        {"type": "text", "text": content} if isinstance(content, str) else part("A" * (content // 4 * 4))
        for content in contents
    ]
    text = json.dumps(parts).encode()
    small = media.shrunk(text) or text
    kept = json.loads(small)
    for content, before, after in zip(contents, parts, kept, strict=True):
        if isinstance(content, str):
            assert after == before
        elif content >= 2 * media.STRIDE:
            assert len(after["image_url"]["url"]) == 4 * media.TOKENS
