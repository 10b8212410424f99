"""Going on with a stream at another decode worker when its own is lost. Off by default (``routing.continuation``).

Only where the rest is the same whoever writes it: greedy ``/v1/completions`` with one answer and nothing that depends
on what came before but the tokens themselves. Engines are asked for the ids of tokens, which the client does not get
to see; the rest of an answer is then the answer to a prompt of ids. Always true: only whole events are passed on, and
what was passed on is exactly what the next worker is told of, so no token is missing and none comes twice.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from msgspec.structs import replace

from twinpool.router.logic.request import Fields, Request, Route, join, prompt_ids

_FALSY: Final = (b"null", b"false")
_ZERO: Final = (b"null", b"0", b"0.0")
_ONE: Final = (b"null", b"1", b"1.0")
#: Fields that may be there with any value: greedy decoding does not depend on them, or they go on to the next worker.
_ANY: Final = frozenset(
    {"model", "prompt", "max_tokens", "seed", "top_p", "top_k", "min_p", "user", "ignore_eos", "priority", "cache_salt"}
)
#: Fields that may be there with these values only. Whatever is not listed is not continued.
_ONLY: Final = {
    "stream": (b"true",),
    "temperature": (b"0", b"0.0"),
    "n": _ONE,
    "best_of": _ONE,
    "echo": _FALSY,
    "stop": (b"null", b"[]"),
    "logprobs": (b"null",),
    "presence_penalty": _ZERO,
    "frequency_penalty": _ZERO,
    "repetition_penalty": _ONE,
    "return_token_ids": _FALSY,
}
_NEEDED: Final = ("prompt", "max_tokens", "stream", "temperature")
#: Ends of answers that are none: the engine stopped, or gave up.
_BROKEN: Final = ("abort", "error")


class _Options(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None


_options = msgspec.json.Decoder(_Options | None).decode
_event = msgspec.json.Decoder(_Event).decode
_members = msgspec.json.Decoder(Fields).decode
_choices = msgspec.json.Decoder(list[Fields]).decode
_encode = msgspec.json.Encoder().encode


def possible(route: Route, request: Request) -> bool:
    """Whether another worker could go on with the answer to ``request``."""
    fields = request.fields
    if route is not Route.COMPLETIONS or not request.splittable or not all(name in fields for name in _NEEDED):
        return False
    for name, value in fields.items():
        if name == "stream_options":
            if _usage_wanted(fields) is None:
                return False
        elif name not in _ANY and bytes(value) not in _ONLY.get(name, ()):
            return False
    limit = bytes(fields["max_tokens"])
    return limit.isdigit() and 0 < int(limit) < 2**31


def _usage_wanted(fields: Fields) -> bool | None:
    """Whether the stream ends with its usage; None when the client wants something else of it."""
    try:
        options = _options(fields["stream_options"]) if "stream_options" in fields else None
    except msgspec.DecodeError:
        return None
    if options is None:
        return False
    return None if options.continuous_usage_stats else bool(options.include_usage)


def with_token_ids(request: Request) -> Request:
    """Return the request whose answer says the ids of its tokens; its prefill leg, which has none, is not asked."""
    body = join({**request.fields, "return_token_ids": msgspec.Raw(b"true")})
    return replace(request, body=body)


class Stream:
    """One answer over all the workers that write it. Events go in as engines write them, and out as one engine's."""

    __slots__ = ("_buffer", "_chunks", "_exact", "_head", "_held", "_ids", "_legs", "_prompt", "_request", "_usage_due",
                 "broken", "done", "finished")  # fmt: skip

    def __init__(self, request: Request) -> None:
        #: The client's own request.
        self._request = request
        self._chunks = Chunks()
        self._buffer = b""
        #: Events without text, and their ids: half a character, most likely. Passed on with the text that follows.
        self._held: list[tuple[bytes, list[int]]] = []
        #: The prompt's ids, once known, and those of all that was passed on.
        self._prompt = prompt_ids(request.fields)
        self._ids: list[int] = []
        #: Whether every event came with its ids.
        self._exact = True
        #: Members of the first event that all others have in common with it.
        self._head: Fields = {}
        self._legs = 1
        self._usage_due = bool(_usage_wanted(request.fields))
        #: The last token is there; the stream is complete.
        self.finished = False
        self.done = False
        #: The engine said that this answer will not be completed.
        self.broken = False

    def feed(self, data: bytes) -> bytes:
        """Take a piece of a chunked answer, and return the events (without framing) that the client gets now."""
        *events, self._buffer = (self._buffer + self._chunks.feed(data)).split(b"\n\n")
        passed = []
        for event in events:
            if self.broken:
                break
            passed.append(self._take(event))
        return b"".join(passed)

    def _take(self, line: bytes) -> bytes:
        if not line.startswith(b"data:"):  # a comment
            return line + b"\n\n"
        payload = line[5:].strip()
        if payload == b"[DONE]":
            self.done = self.finished
            self.broken = not self.finished
            return b"" if self.broken else line + b"\n\n"
        try:
            event = _event(payload)
        except msgspec.DecodeError:
            self._exact = False
            return line + b"\n\n"
        if not event.choices:
            return self._without_choice(line, payload, event)
        choice = event.choices[0]
        if choice.finish_reason in _BROKEN:
            self.broken = True
            return b""
        return self._with_choice(line, payload, choice)

    def _without_choice(self, line: bytes, payload: bytes, event: _Event) -> bytes:
        if event.error is not None:
            self.broken = True
            return b""
        if event.usage is None:
            return line + b"\n\n"
        self._usage_due = False
        if self._legs == 1:
            return line + b"\n\n"
        details = event.usage.get("prompt_tokens_details")
        if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
            # Of the whole prompt no more can have been cached than it has.
            details["cached_tokens"] = min(details["cached_tokens"], len(self._prompt or ()))
        usage = {**event.usage, **self._usage()}
        return _line({**_members(payload), **self._common(), "usage": msgspec.Raw(_encode(usage))})

    def _with_choice(self, line: bytes, payload: bytes, choice: _Choice) -> bytes:
        if choice.token_ids is None:
            self._exact = False
        members = _members(payload)
        if not self._head:
            self._head = {name: members[name] for name in ("id", "object", "created", "model") if name in members}
            if self._prompt is None:
                self._prompt = choice.prompt_token_ids
        if choice.token_ids is not None or self._legs > 1:
            choices = _choices(members["choices"])
            for name in ("token_ids", "prompt_token_ids"):
                if name in choices[0]:
                    choices[0][name] = msgspec.Raw(b"null")
            members["choices"] = msgspec.Raw(b"[" + b",".join(map(join, choices)) + b"]")
            line = _line({**members, **self._common()})[:-2]
        ids = choice.token_ids or []
        if not choice.text and choice.finish_reason is None:
            self._held.append((line, ids))
            return b""
        self.finished = choice.finish_reason is not None
        passed = [*self._held, (line, ids)]
        self._held = []
        for _, those in passed:
            self._ids += those
        return b"".join(event + b"\n\n" for event, _ in passed)

    def _common(self) -> Fields:
        """What an event of a later worker has of the first one's."""
        return self._head if self._legs > 1 else {}

    def _usage(self) -> dict[str, int]:
        prompt, answer = len(self._prompt or ()), len(self._ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + answer, "completion_tokens": answer}

    def ending(self) -> bytes | None:
        """The worker is lost: return what is missing of the stream when that is no token (maybe nothing), else None."""
        if self.done:
            return b""
        if not self.finished or (self._usage_due and self._prompt is None):
            return None
        usage = b""
        if self._usage_due:
            usage = _line({**self._head, "choices": msgspec.Raw(b"[]"), "usage": msgspec.Raw(_encode(self._usage()))})
        self.done = True
        return usage + b"data: [DONE]\n\n"

    def rest(self) -> Request | None:
        """The worker is lost: return what the next one is asked, or None when nobody can go on."""
        left = int(bytes(self._request.fields["max_tokens"])) - len(self._ids)
        self._chunks, self._buffer, self._held, self.broken = Chunks(), b"", [], False
        self._legs += 1
        if not self._ids and self._exact:
            return with_token_ids(self._request)
        if not self._exact or self._prompt is None or left <= 0 or self.finished:
            return None
        ids = [*self._prompt, *self._ids]
        changed = {"prompt": msgspec.Raw(_encode(ids)), "max_tokens": msgspec.Raw(b"%d" % left)}
        fields = {**self._request.fields, **changed}
        request = replace(self._request, fields=fields, prompt_tokens=len(ids), output_tokens=left)
        return with_token_ids(request)


def _line(members: Fields) -> bytes:
    return b"data: " + join(members) + b"\n\n"


class Chunks:
    """Takes the framing off a chunked body that arrives in pieces and whose framing was found right."""

    __slots__ = ("_ended", "_left", "_line", "_skip")

    def __init__(self) -> None:
        self._left = self._skip = 0
        self._line = b""
        self._ended = False

    def feed(self, data: bytes) -> bytes:
        """Return the payload in ``data``."""
        payload = []
        position, size = 0, len(data)
        while position < size and not self._ended:
            if self._left:
                piece = data[position : position + self._left]
                payload.append(piece)
                position += len(piece)
                self._left -= len(piece)
                self._skip = 0 if self._left else 2
            elif self._skip:
                step = min(self._skip, size - position)
                position += step
                self._skip -= step
            else:
                newline = data.find(b"\n", position)
                if newline < 0:
                    self._line += data[position:]
                    break
                line, self._line = self._line + data[position:newline], b""
                position = newline + 1
                self._left = int(line.partition(b";")[0], 16)
                self._ended = not self._left
        return b"".join(payload)


def framed(payload: bytes) -> bytes:
    """Return ``payload``, which must not be empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)
