"""The same questions to two engines, and where their answers differ in shape: is the simulated engine a faithful twin?

What is compared is what a client or the router can depend on: status, content type, the names and types of an answer's
fields, the order of a stream's events. Values are not: one engine invents them. Always true: a question that an engine
does not answer at all is a difference, not an error.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Seconds for one answer; the first tokens of a CPU engine compile kernels.
TIMEOUT = 120.0
PROMPT = "one two three four"
_ASK_REMOTE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


@dataclass(frozen=True)
class Question:
    """One request; ``body`` None is a GET."""

    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Sent as it is instead of ``body``.
    raw: bytes | None = None


def _completion(**fields: Any) -> Question:
    return Question("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **fields})


def _chat(**fields: Any) -> Question:
    messages = [{"role": "user", "content": PROMPT}]
    return Question("/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 4, **fields})


#: Every question, by what it asks. ``ignore_eos`` keeps the length, and with it the shape, the same for both engines.
QUESTIONS: dict[str, Question] = {
    "health": Question("/health"),
    "ping": Question("/ping"),
    "version": Question("/version"),
    "load": Question("/load"),
    "models": Question("/v1/models"),
    "no such path": Question("/v1/nothing"),
    "wrong method": Question("/v1/completions"),
    "completion": _completion(ignore_eos=True),
    "completion of token ids": _completion(prompt=[11, 12, 13], ignore_eos=True),
    "completions of a list": _completion(prompt=[PROMPT, "five six"], ignore_eos=True),
    "two samples": _completion(n=2, ignore_eos=True, temperature=1.0),
    "token ids asked for": _completion(return_token_ids=True, ignore_eos=True),
    "completion stream": _completion(stream=True, ignore_eos=True),
    "completion stream with usage": _completion(stream=True, stream_options={"include_usage": True}, ignore_eos=True),
    "chat": _chat(ignore_eos=True),
    "chat stream": _chat(stream=True, ignore_eos=True),
    "chat stream with usage": _chat(stream=True, stream_options={"include_usage": True}, ignore_eos=True),
    "stops at a string": _completion(stop=["e", "a", "i", " "], max_tokens=64),
    "too many strings to stop at": _completion(stop=["a", "b", "c", "d", "e"]),
    "token ids asked for in chat": _chat(return_token_ids=True, ignore_eos=True),
    "handed over": _completion(max_tokens=1, kv_transfer_params=_ASK_REMOTE),
    "handed over in chat": _chat(max_tokens=1, kv_transfer_params=_ASK_REMOTE),
    "unknown model": _completion(model="nobody"),
    "no prompt": Question("/v1/completions", {"model": "tiny", "max_tokens": 1}),
    "no messages": Question("/v1/chat/completions", {"model": "tiny", "max_tokens": 1}),
    "not JSON": Question("/v1/completions", raw=b'{"model": '),
    "too long a prompt": _completion(prompt=[11] * 5000),
    "too many tokens asked for": _completion(max_tokens=100_000),
    "tokens below 1": _completion(max_tokens=-1),
    "min above max": _completion(min_tokens=9),
    "stream options without a stream": _completion(stream_options={"include_usage": True}),
    "wrong type": _completion(max_tokens="many"),
    "a rank that is not there": Question(
        "/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}, {"X-data-parallel-rank": "7"}
    ),
    "tokenize": Question("/tokenize", {"model": "tiny", "prompt": PROMPT}),
    "detokenize": Question("/detokenize", {"model": "tiny", "tokens": [11, 12, 13]}),
}


@dataclass(frozen=True)
class Answer:
    """What can be depended on in an answer."""

    status: int
    content_type: str
    shape: Any


def ask(host: str, port: int, question: Question) -> Answer:
    """Ask and return what can be depended on; status 0 when the engine closes the connection."""
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT)
    body = question.raw if question.raw is not None else None
    if question.body is not None:
        body = json.dumps(question.body).encode()
    headers = {**({"Content-Type": "application/json"} if body else {}), **question.headers}
    try:
        connection.request("POST" if body else "GET", question.path, body=body, headers=headers)
        response = connection.getresponse()
        content_type = (response.getheader("Content-Type") or "").partition(";")[0]
        return Answer(response.status, content_type, shape_of(response.read(), content_type))
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, "", type(error).__name__)
    finally:
        connection.close()


def shape_of(body: bytes, content_type: str) -> Any:
    """Return the names and types of an answer; of a stream, its events in order, equal neighbours once."""
    if content_type != "text/event-stream":
        try:
            return _shape(json.loads(body))
        except ValueError:
            return "text" if body else "empty"
    events: list[Any] = []
    for line in body.splitlines():
        if not line.startswith(b"data: "):
            continue
        data = line.removeprefix(b"data: ")
        shape = "[DONE]" if data == b"[DONE]" else _shape(json.loads(data))
        if not events or events[-1] != shape:
            events.append(shape)
    return events


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shape(entry) for key, entry in sorted(value.items())}
    if isinstance(value, list):
        shapes: list[Any] = []
        for entry in value:
            shape = _shape(entry)
            if shape not in shapes:
                shapes.append(shape)
        return shapes
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def differences(one: Answer, other: Answer) -> list[str]:
    """Return, in words, where two answers differ: status and content type first, then fields by their path."""
    found = []
    for name in ("status", "content_type"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            found.append(f"{name}: {mine!r} and {theirs!r}")
    return found or _compare("", one.shape, other.shape)


def _compare(path: str, one: Any, other: Any) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        lines = []
        for key in sorted(one.keys() | other.keys()):
            where = f"{path}.{key}"
            if key not in one or key not in other:
                lines.append(f"{where}: only in the {'second' if key not in one else 'first'}")
            else:
                lines += _compare(where, one[key], other[key])
        return lines
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            line
            for index, pair in enumerate(zip(one, other, strict=True))
            for line in _compare(f"{path}[{index}]", *pair)
        ]
    return [] if one == other else [f"{path}: {_short(one)} and {_short(other)}"]


def _short(shape: Any) -> str:
    text = json.dumps(shape)
    return text if len(text) <= 120 else text[:117] + "..."
