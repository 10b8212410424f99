"""Reading a request's JSON body once, and writing the bodies of its legs.

The body is never parsed into a tree: only the top level is split, every value stays the bytes that the client sent, so
unknown fields, the order of fields and the spelling of numbers survive. What a client must not say to an engine
(:data:`GUARDED`) is gone from every body that this module returns, however it was spelt or repeated.
"""

from __future__ import annotations

import json
from enum import Enum
from functools import lru_cache
from typing import Annotated, Final

import msgspec
from msgspec.structs import replace

from twinpool.router.logic import media
from twinpool.router.logic.errors import Refusal, Refused

Fields = dict[str, msgspec.Raw]

#: Fields by which a decode worker is told to fetch KV or embeddings from an address. A client's copy would make it dial
#: any address, so only the router writes them.
GUARDED: Final = ("kv_transfer_params", "ec_transfer_params")
#: A field whose entries engines merge with the guarded ones.
_NESTED: Final = "vllm_xargs"

_PREFILL_PARAMS: Final = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,'
    b'"remote_block_ids":null,"remote_host":null,"remote_port":null}'
)
_PREFILL_OVERRIDES: Final = (
    b'"max_tokens":1,"max_completion_tokens":1,"stream":false,"kv_transfer_params":' + _PREFILL_PARAMS
)
_RETURN_IDS: Final = b'"return_token_ids":'
#: Left out of the prefill leg: they contradict one token without streaming, and engines refuse the contradiction.
_NOT_FOR_PREFILL: Final = frozenset({"max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options"})

#: Assumed answer length where the client gives no limit, in tokens; only books and prices use it.
_DEFAULT_OUTPUT: Final = 256
_OUTPUT_LIMITS: Final = ("max_completion_tokens", "max_tokens", "max_output_tokens")
#: Bytes of JSON that make a token, about; only books and prices use it.
BYTES_PER_TOKEN: Final = 4
#: Longer names are not kept: no client is to fill this process's memory with them.
_LONGEST_NAME: Final = 256
_FALSY: Final = (b"null", b"false")
_QUOTE: Final = ord('"')
_ONE_OR_NULL: Final = (b"null", b"1")
#: Fields that need a closer look, whatever the route; nearly all requests have none of them.
_NEEDS_WHOLE: Final = ("use_beam_search", "echo", "prompt_logprobs", "prompt_embeds")
_RARE: Final = frozenset({*GUARDED, _NESTED, "n", "best_of", *_NEEDS_WHOLE})

_text = msgspec.json.Decoder(str).decode
_split = msgspec.json.Decoder(Fields).decode
_split_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Route(Enum):
    """The paths that reach a worker."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"
    EMBEDDINGS = "/v1/embeddings"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"

    def __init__(self, path: str) -> None:
        #: What numbers are labelled with; Enum's own ``value`` is a call.
        self.label = (path,)


#: Routes that write tokens but are served whole: their bodies have no place for the parameters of a handoff.
_GENERATING: Final = frozenset({Route.RESPONSES, Route.MESSAGES})


class Request(msgspec.Struct, frozen=True):
    """A body that may be sent on."""

    #: The client's bytes; written anew only when something had to be taken out.
    body: bytes
    fields: Fields
    #: None when the client names no model.
    model: str | None
    #: Whether prefill and decode may be split over two workers.
    splittable: bool
    #: Estimates for the ledger.
    prompt_tokens: int
    output_tokens: int
    #: The answer comes as events.
    stream: bool = False
    #: vLLM's: a smaller one goes first.
    priority: int = 0
    #: The model is this LoRA adapter, whose KV is its own.
    adapter: str = ""
    #: The messages with stand-ins for images and recordings, where there are some.
    shrunk: bytes = b""
    #: Token ids of a chat (JSON), by which engines need not read its messages.
    ids: bytes = b""
    #: The prefill leg asks for the token ids that its engine reads.
    compared: bool = False


def read(route: Route, body: bytes) -> Request:
    """Read a client's body.

    Raises
    ------
    Refused
        When the body is not a JSON object in UTF-8, its ``model`` is not a string, or it wants a stored response.
    """
    try:
        fields = _split(body)
    except msgspec.ValidationError:
        raise Refused(Refusal(400, "invalid_json", "The request body must be a JSON object.")) from None
    except (msgspec.DecodeError, RecursionError) as error:
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        message = f"The request body is not valid JSON: {detail}."
        raise Refused(Refusal(400, "invalid_json", message)) from None
    rare = not _RARE.isdisjoint(fields)
    if rare and _strip(fields):
        body = join(fields)
    if route is Route.RESPONSES:
        _refuse_stored(fields)
    split_by_route = route is Route.CHAT or route is Route.COMPLETIONS
    size, shrunk = len(body), b""
    if size > media.STRIDE and "messages" in fields and media.likely(body):
        messages = bytes(fields["messages"])
        shrunk = media.shrunk(messages)
        size -= len(messages) - len(shrunk) if shrunk else 0
    return Request(
        body=body,
        fields=fields,
        model=_model(fields),
        splittable=(
            split_by_route and (not rare or _one_sequence(fields)) and (route is Route.CHAT or _one_prompt(fields))
        ),
        prompt_tokens=size // BYTES_PER_TOKEN + 1,
        output_tokens=_output_tokens(fields) if split_by_route or route in _GENERATING else 0,
        stream="stream" in fields and bytes(fields["stream"]) == b"true",
        priority=_priority(fields) if "priority" in fields else 0,
        shrunk=shrunk,
    )


def with_model(request: Request, model: str) -> Request:
    """Return the request for another model id than the client's."""
    fields = {**request.fields, "model": msgspec.Raw(json.dumps(model).encode())}
    return replace(request, body=join(fields), fields=fields, model=model)


def with_adapter(request: Request) -> Request:
    """Return the request as one for the LoRA adapter that it names."""
    return replace(request, adapter=request.model or "")


def with_ids(request: Request, ids: bytes, *, chat: bool) -> Request:
    """Return the request with the token ids of its prompt (JSON), so that engines need not make them again.

    Those of a chat go beside its messages, as vLLM takes them (``kv_transfer_params.prompt_token_ids``, from 0.32 on;
    one that does not know them reads the messages). Those of a text take its place.
    """
    if chat:
        return replace(request, ids=ids)
    fields = {**request.fields, "prompt": msgspec.Raw(ids)}
    return replace(request, body=join(fields), fields=fields)


def with_comparison(request: Request) -> Request:
    """Return the request with a prefill leg that asks for the token ids that its engine reads."""
    return replace(request, compared=True)


def _refuse_stored(fields: Fields) -> None:
    """Refuse what needs an answer that was kept: each worker keeps its own, and the next request may go to another."""
    for name in ("previous_response_id", "conversation", "background", "store"):
        if name in fields and bytes(fields[name]) not in _FALSY:
            message = f"This pool keeps no responses: send all of the input, and no {name!r}."
            raise Refused(Refusal(400, "stateless", message, param=name))


def prefill_body(request: Request) -> bytes:
    """Return the body of the prefill leg: one token, no stream, KV kept for whoever decodes."""
    members = [_member(name, value) for name, value in request.fields.items() if name not in _NOT_FOR_PREFILL]
    members.append(_PREFILL_OVERRIDES if not request.ids else _PREFILL_OVERRIDES[:-1] + _ids_member(request.ids))
    if request.compared:
        members = [member for member in members if not member.startswith(_RETURN_IDS)] + [_RETURN_IDS + b"true"]
    return b"{" + b",".join(members) + b"}"


def decode_body(request: Request, params: bytes | None) -> bytes:
    """Return the body of the decode leg: the client's bytes, with ``params`` (JSON) spliced in at the end."""
    if request.ids:
        params = (params or b"{}").rstrip()[:-1] + _ids_member(request.ids, first=params is None)
    if params is None:
        return request.body
    end = request.body.rindex(b"}")
    comma = b"," if request.fields else b""
    return b"".join((request.body[:end], comma, b'"kv_transfer_params":', params, request.body[end:]))


def _ids_member(ids: bytes, *, first: bool = False) -> bytes:
    """Return the end of an object of handoff parameters that has token ids as its last, or ``first``, member."""
    return (b"" if first else b",") + b'"prompt_token_ids":' + ids + b"}"


#: Reads a JSON list of token ids, which are as large as engines take them.
token_ids = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]).decode
_ids_of_one = msgspec.json.Decoder(tuple[list[Annotated[int, msgspec.Meta(ge=0, lt=2**32)]]]).decode


def prompt_ids(fields: Fields) -> list[int] | None:
    """Return the token ids of a prompt that was given as such (also as the only one of a list), else None."""
    prompt = bytes(fields["prompt"]) if "prompt" in fields else b""
    if prompt[:1] != b"[":
        return None
    try:
        return _ids_of_one(prompt)[0] if prompt[1:].lstrip(b" \t\r\n")[:1] == b"[" else token_ids(prompt)
    except msgspec.DecodeError:
        return None


def cache_salt(fields: Fields) -> str | None:
    """Return the ``cache_salt``, by which engines keep the caches of clients apart."""
    try:
        return msgspec.json.decode(fields["cache_salt"], type=str | None) if "cache_salt" in fields else None
    except msgspec.DecodeError:
        return None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _PromptDetails | None = None


class _UsageAnswer(msgspec.Struct):
    usage: _Usage | None = None


_usage_answer = msgspec.json.Decoder(_UsageAnswer).decode


def cached_tokens(answer: bytes) -> int | None:
    """Return how many prompt tokens an engine had cached by its own answer's ``usage``, or None if it does not say."""
    try:
        usage = _usage_answer(answer).usage
    except msgspec.DecodeError:
        return None
    details = usage.prompt_tokens_details if usage is not None else None
    return details.cached_tokens if details is not None else None


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Params(msgspec.Struct):
    do_remote_prefill: bool | None = None


_prefill_answer = msgspec.json.Decoder(_PrefillAnswer).decode
_params = msgspec.json.Decoder(_Params).decode


def params_of(answer: bytes) -> bytes | None:
    """Return the handoff parameters (JSON object) in a prefill leg's answer, or None when there are none to use."""
    try:
        params = _prefill_answer(answer).kv_transfer_params
        return bytes(params) if _params(params).do_remote_prefill else None
    except (msgspec.DecodeError, RecursionError):
        return None


def _strip(fields: Fields) -> bool:
    """Take the guarded fields out of ``fields``; return whether there were any."""
    found = False
    for name in GUARDED:
        if name in fields:
            del fields[name]
            found = True
    nested = fields.get(_NESTED)
    if nested is not None:
        # Rewritten whenever it is an object, so that a repeated key cannot hide a second copy.
        try:
            inner = _split(bytes(nested))
        except msgspec.DecodeError:
            return found
        if any(name in inner for name in GUARDED):
            fields[_NESTED] = msgspec.Raw(join({k: v for k, v in inner.items() if k not in GUARDED}))
            found = True
    return found


def join(fields: Fields) -> bytes:
    """Return the JSON object of these members, whose values keep their bytes."""
    return b"{" + b",".join([_member(name, value) for name, value in fields.items()]) + b"}"


def _member(name: str, value: msgspec.Raw) -> bytes:
    # A Raw is a buffer.
    return (_known_quoted(name) if len(name) <= _LONGEST_NAME else _quoted(name)) + value


def _quoted(name: str) -> bytes:
    return json.dumps(name).encode() + b":"


_known_quoted = lru_cache(maxsize=256)(_quoted)  # clients could invent names without end


def _model(fields: Fields) -> str | None:
    raw = fields.get("model")
    if raw is None:
        return None
    name = bytes(raw)
    return _known_model(name) if len(name) <= _LONGEST_NAME else _model_of(name)


def _model_of(raw: bytes) -> str | None:
    if raw == b"null":
        return None
    try:
        return _text(raw)
    except msgspec.DecodeError:
        message = "The field 'model' must be a string."
        raise Refused(Refusal(400, "invalid_model", message, param="model")) from None


_known_model = lru_cache(maxsize=256)(_model_of)  # clients could invent names without end


def _one_sequence(fields: Fields) -> bool:
    """Whether the request wants one answer made of nothing but decoded tokens.

    Of several sequences the prefill answer describes the first alone, and the others would decode from its KV: wrong
    answers with status 200. Prompt log-probabilities and embeddings come from the worker that reads the prompt.
    """
    for name in ("n", "best_of"):
        if name in fields and bytes(fields[name]) not in _ONE_OR_NULL:
            return False
    return all(name not in fields or bytes(fields[name]) in _FALSY for name in _NEEDS_WHOLE)


def _one_prompt(fields: Fields) -> bool:
    """Whether ``prompt`` is one text or one list of token ids, also when wrapped in a list of its own."""
    if "prompt" not in fields:
        return False
    if memoryview(fields["prompt"])[0] == _QUOTE:  # without a copy of what may be long
        return True
    prompt = bytes(fields["prompt"])
    first = prompt[1:].lstrip(b" \t\r\n")[:1]
    if prompt[:1] != b"[" or first not in (b'"', b"["):
        return prompt[:1] == b"[" and first.isdigit()
    return len(_split_list(prompt)) == 1


def _priority(fields: Fields) -> int:
    text = bytes(fields["priority"])
    return int(text) if text.removeprefix(b"-").isdigit() and len(text) < 9 else 0


def _output_tokens(fields: Fields) -> int:
    for name in _OUTPUT_LIMITS:
        if name in fields:
            digits = bytes(fields[name])
            if digits.isdigit() and len(digits) < 9:
                return int(digits)
    return _DEFAULT_OUTPUT
