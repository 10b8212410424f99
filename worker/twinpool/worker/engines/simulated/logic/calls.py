"""From a request body to what the engine is asked, or to the refusal that vLLM would give. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from twinpool.worker.engines.simulated.logic import language
from twinpool.worker.engines.simulated.logic.sequence import RemoteKv

if TYPE_CHECKING:
    from twinpool.core.blockhash import Adapter

Body = Mapping[str, Any]
Kind = Literal["chat", "completions"]

#: Limits of OpenAI's interface that bound what one request can cost.
MAX_CHOICES = 128
MAX_STOPS = 4  # vLLM's VLLM_MAX_STOP_STRINGS
_COMPLETION_TOKENS = 16


class Refused(Exception):
    """The request is answered with an error of OpenAI's shape."""

    def __init__(
        self, message: str, status: int = 400, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the body of the answer."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}
        return {"error": error}


@dataclass(frozen=True, slots=True)
class Call:
    """One request: ``n`` answers to each of ``prompts``."""

    kind: Kind
    model: str
    prompts: tuple[tuple[int, ...], ...]
    n: int
    max_tokens: tuple[int, ...]
    min_tokens: int
    stream: bool
    include_usage: bool
    ignore_eos: bool
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]
    token_ids: bool
    salt: str | None
    adapter: Adapter | None
    hand_over: bool
    remote: RemoteKv | None


@dataclass(frozen=True, slots=True)
class Served:
    """What this server serves: model ids (the first is the main one), the longest sequence, whether it hands off."""

    models: tuple[str, ...]
    max_model_len: int
    connector: bool
    #: LoRA adapters by name, with what each was loaded from.
    adapters: Mapping[str, str] = field(default_factory=dict)


def rank_of(header: str | None, ranks: int) -> int | None:
    """Return the data-parallel rank that a client asks for; None when it leaves the choice to the engine.

    Raises
    ------
    Refused
        There is no such rank.
    """
    if header is None:
        return None
    if not (header.isdecimal() and int(header) < ranks):
        raise Refused(f"data_parallel_rank {header[:20]} is out of range [0, {ranks})")
    return int(header)


def parse(kind: Kind, body: object, served: Served) -> Call:
    """Return the call in ``body``.

    Raises
    ------
    Refused
        When vLLM would refuse it: unknown model, a wrong type, limits that contradict each other, a prompt too long.
    """
    if not isinstance(body, dict):
        raise Refused("The body must be a JSON object.")
    model = named_model(body, served)
    limit = served.max_model_len
    prompts = (_given_ids(body) or _chat_prompt(body, limit),) if kind == "chat" else _completion_prompts(body, limit)
    stream = _field(body, "stream", bool, False)
    options = _field(body, "stream_options", dict, None)
    if options is not None and not stream:
        raise Refused("Stream options can only be defined when `stream=True`.", param="stream_options")
    min_tokens = _whole(body, "min_tokens", 0, least=0)
    stops = body.get("stop") or ()
    parameters = _field(body, "kv_transfer_params", dict, None) if served.connector else None
    return Call(
        kind=kind,
        model=model,
        prompts=prompts,
        n=_whole(body, "n", 1, least=1, most=MAX_CHOICES),
        max_tokens=tuple(_max_tokens(kind, body, len(prompt), min_tokens, served.max_model_len) for prompt in prompts),
        min_tokens=min_tokens,
        stream=stream,
        include_usage=bool(options and options.get("include_usage")),
        ignore_eos=_field(body, "ignore_eos", bool, False),
        stops=_stops((stops,) if isinstance(stops, str) else stops),
        stop_token_ids=frozenset(_token_ids(body.get("stop_token_ids") or (), "stop_token_ids")),
        token_ids=_field(body, "return_token_ids", bool, False),
        salt=_field(body, "cache_salt", str, None),
        adapter=(model, served.adapters[model]) if model in served.adapters else None,
        hand_over=bool(parameters and parameters.get("do_remote_decode")),
        remote=_remote(parameters) if parameters and parameters.get("do_remote_prefill") else None,
    )


def named_model(body: Body, served: Served) -> str:
    """Return the model that a body names, or the main one when it names none.

    Raises
    ------
    Refused
        With 404 when it is not served here.
    """
    model = _field(body, "model", str, None) or served.models[0]
    if model not in served.models and model not in served.adapters:
        raise Refused(f"The model `{model}` does not exist.", 404, "NotFoundError", "model")
    return model


def prompt_of(body: Body) -> tuple[int, ...]:
    """Return the tokens of a ``/tokenize`` body: ``prompt`` (text) or ``messages``."""
    if "messages" in body:
        return _chat_prompt(body)
    text = body.get("prompt")
    if not isinstance(text, str):
        raise Refused("prompt must be a string.", param="prompt")
    return tuple(language.encode(text))


def tokens_of(body: Body) -> tuple[int, ...]:
    """Return the tokens of a ``/detokenize`` body."""
    return _token_ids(body.get("tokens"), "tokens")


def _given_ids(body: Body) -> tuple[int, ...]:
    """Return the tokens of a chat that somebody rendered before; none where nobody did."""
    parameters = body.get("kv_transfer_params")
    ids = parameters.get("prompt_token_ids") if isinstance(parameters, dict) else None
    return () if ids is None else _token_ids(ids, "kv_transfer_params.prompt_token_ids")


def _chat_prompt(body: Body, limit: int | None = None) -> tuple[int, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list of at least one message.", param="messages")
    text = "".join(_message(message) for message in messages)
    return tuple(language.encode(f"{text}<|im_start|>assistant\n", limit))


def _message(message: object) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused("each message must be an object with a role.", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Refused("this model takes content parts of type text only.", param="messages")
        content = "".join(map(str, parts))
    if content is not None and not isinstance(content, str):
        raise Refused("the content of a message must be text.", param="messages")
    return f"<|im_start|>{message['role']}\n{content or ''}<|im_end|>\n"


def _completion_prompts(body: Body, limit: int) -> tuple[tuple[int, ...], ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = tuple(_completion_prompt(one, limit) for one in prompt)
        if len(prompts) > MAX_CHOICES:
            raise Refused(f"prompt may hold at most {MAX_CHOICES} prompts.", param="prompt")
        return prompts
    return (_completion_prompt(prompt, limit),)


def _completion_prompt(prompt: object, limit: int) -> tuple[int, ...]:
    ids = tuple(language.encode(prompt, limit)) if isinstance(prompt, str) else _token_ids(prompt, "prompt")
    if not ids:
        raise Refused("Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
    return ids


def _token_ids(value: object, name: str) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(token) is int for token in value):
        raise Refused(f"{name} must be a list of token ids.", param=name)
    for token in value:
        if not 0 <= token < language.VOCABULARY_SIZE:
            raise Refused(f"Token id {token} is out of vocabulary", param=name)
    return tuple(value)


def _max_tokens(kind: Kind, body: Body, prompt: int, min_tokens: int, max_model_len: int) -> int:
    room = max_model_len - prompt
    name = "max_completion_tokens" if kind == "chat" and body.get("max_completion_tokens") is not None else "max_tokens"
    default = room if kind == "chat" else min(_COMPLETION_TOKENS, room)
    wanted = _whole(body, name, max(default, 1), least=1)
    if wanted > room:
        raise Refused(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {wanted} output "
            f"tokens and your prompt contains at least {prompt} input tokens, for a total of at least "
            f"{wanted + prompt} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    if min_tokens > wanted:
        raise Refused(f"min_tokens must be less than or equal to max_tokens={wanted}, got {min_tokens}.")
    return wanted


def _field(body: Body, name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise Refused(f"{name} must be of type {kind.__name__}.", param=name)
    return value


def _whole(body: Body, name: str, default: int, least: int, most: int | None = None) -> int:
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise Refused(f"{name} must be a whole number of {limits}, got {value!r}.", param=name)
    return value


def _stops(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_STOPS:
        raise Refused(f"stop must be a string or a list of at most {MAX_STOPS} strings.", param="stop")
    if not all(isinstance(stop, str) and stop for stop in value):
        raise Refused("stop must not hold anything but strings that are not empty.", param="stop")
    return tuple(value)


def _remote(parameters: Body) -> RemoteKv | None:
    """Read the parameters that a prefill worker answered; incomplete ones are ignored, as vLLM does with a warning."""
    names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")
    if any(parameters.get(name) is None for name in names):
        return None
    engine_id, request_id, host, port, blocks = (parameters[name] for name in names)
    if type(port) is not int or not 0 < port < 65536:
        raise Refused("kv_transfer_params.remote_port must be a port.", param="kv_transfer_params")
    if not all(isinstance(text, str) for text in (engine_id, request_id, host)) or not isinstance(blocks, list):
        raise Refused("kv_transfer_params must be those of a prefill answer.", param="kv_transfer_params")
    return RemoteKv(engine_id, request_id, host, port, _whole(parameters, "remote_prefill_cached_tokens", 0, least=0))
