"""From tokens to what a client reads: text, stop strings, finish reasons, the bodies of vLLM's answers. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.worker.engines.simulated.logic import language

if TYPE_CHECKING:
    from twinpool.worker.engines.simulated.logic.calls import Call
    from twinpool.worker.engines.simulated.logic.sequence import FinishReason, Handover, Token

Json = dict[str, Any]


class Choice:
    """One answer that grows. Text that may become a stop string is held back until it is known not to."""

    __slots__ = ("_held", "_sent", "_stops", "cached", "finish", "handover", "stopped_by", "text", "tokens")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._sent = 0
        self.text = ""
        self.tokens: list[int] = []
        self.cached = 0
        self.finish: FinishReason | None = None
        self.handover: Handover | None = None
        #: The stop string that ended the answer.
        self.stopped_by: str | None = None

    def feed(self, token: Token) -> str:
        """Take a token and return the text that may be shown now; ``finish`` tells whether the answer ended."""
        searched = max(0, len(self.text) - self._held)
        self.text += language.decode((token.token,))
        self.tokens.append(token.token)
        self.cached, self.finish, self.handover = token.cached, token.finish, token.handover
        found = [(at, stop) for stop in self._stops if (at := self.text.find(stop, searched)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self.text = self.text[:at]
            self.finish = "stop"
        return self._shown()

    def end(self, reason: FinishReason) -> str:
        """End the answer without a token and return the text that was held back."""
        self.finish = reason
        return self._shown()

    def _shown(self) -> str:
        end = len(self.text) if self.finish else max(self._sent, len(self.text) - self._held)
        shown, self._sent = self.text[self._sent : end], end
        return shown


#: Fields that vLLM 0.32 writes into answers and that stay empty here, so that a strict client finds them.
_EMPTY_ANSWER = dict.fromkeys(("ec_transfer_params", "metrics", "service_tier"))
_EMPTY_CHAT = dict.fromkeys(("prompt_logprobs", "prompt_text", "prompt_token_ids"))
_EMPTY_CHOICE = dict.fromkeys(("prompt_logprobs", "prompt_token_ids", "routed_experts", "token_ids"))
_EMPTY_CHAT_CHOICE = dict.fromkeys(("routed_experts", "token_ids"))
_EMPTY_MESSAGE = dict.fromkeys(("annotations", "audio", "function_call", "reasoning", "refusal"))
FINGERPRINT = "simulated"


def permission(created: int) -> Json:
    """Return what ``/v1/models`` says that a client may do with a model."""
    allowed = {"allow_sampling": True, "allow_logprobs": True, "allow_view": True}
    refused = dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking"), False)
    head = {"id": "modelperm-simulated", "object": "model_permission", "created": created}
    return {**head, **allowed, **refused, "organization": "*", "group": None}


class Reply:
    """Builds the bodies of one call's answer."""

    def __init__(self, call: Call, request_id: str, created: int, host: str, port: int, engine_id: str) -> None:
        prefix, noun = ("chatcmpl", "chat.completion") if call.kind == "chat" else ("cmpl", "text_completion")
        self.id = f"{prefix}-{request_id}"
        self._call = call
        self._noun = noun
        self._created = created
        self._origin = (host, port, engine_id)

    def whole(self, choices: list[Choice]) -> Json:
        """Return the answer of a call that does not stream."""
        return {
            **self._head(self._noun),
            **_EMPTY_ANSWER,
            **(self._of_chat() if self._call.kind == "chat" else {}),
            "system_fingerprint": FINGERPRINT,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self.usage(choices),
            "kv_transfer_params": self.parameters(choices[0].handover),
        }

    def _of_chat(self) -> Json:
        """Return what a chat answer has beside its choices."""
        return {**_EMPTY_CHAT, "prompt_token_ids": list(self._call.prompts[0]) if self._call.token_ids else None}

    def _choice(self, index: int, choice: Choice) -> Json:
        body: Json = {"index": index}
        if self._call.kind == "chat":
            body |= {"message": {"role": "assistant", "content": choice.text, **_EMPTY_MESSAGE}, **_EMPTY_CHAT_CHOICE}
        else:
            body |= {"text": choice.text, **_EMPTY_CHOICE}
        body.update(logprobs=None, finish_reason=choice.finish, stop_reason=choice.stopped_by)
        if self._call.token_ids:
            body["token_ids"] = choice.tokens
            if self._call.kind == "completions":
                body["prompt_token_ids"] = list(self._call.prompts[index // self._call.n])
        return body

    def opening(self, index: int) -> Json:
        """Return the first chunk of a chat answer, which says who speaks."""
        delta = {"role": "assistant", "content": ""}
        chunk = self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        return {**chunk, "prompt_token_ids": None, "prompt_text": None}

    def piece(self, index: int, text: str, choice: Choice, tokens: list[int]) -> Json:
        """Return one chunk of a stream."""
        body: Json = {"index": index, "token_ids": tokens if self._call.token_ids else None}
        if self._call.kind == "chat":
            body["delta"] = {"content": text}
        else:
            # With the first tokens, as vLLM has it.
            first = self._call.token_ids and len(choice.tokens) == len(tokens)
            prompt = list(self._call.prompts[index // self._call.n]) if first else None
            body |= {"text": text, "prompt_token_ids": prompt}
        body.update(logprobs=None, finish_reason=choice.finish)
        if choice.finish is not None or self._call.kind == "completions":
            body["stop_reason"] = choice.stopped_by
        chunk = self._chunk(body)
        # Only the end of a stream says what made it.
        usage_follows = self._call.include_usage
        return chunk if choice.finish is None or usage_follows else {**chunk, "system_fingerprint": FINGERPRINT}

    def closing(self, choices: list[Choice]) -> Json:
        """Return the last chunk, which carries the usage and no choice."""
        noun = "chat.completion.chunk" if self._call.kind == "chat" else self._noun
        usage = {key: value for key, value in self.usage(choices).items() if value is not None}
        details = {key: value for key, value in usage["prompt_tokens_details"].items() if value is not None}
        usage["prompt_tokens_details"] = details
        return {**self._head(noun), "choices": [], "usage": usage, "system_fingerprint": FINGERPRINT}

    def _chunk(self, choice: Json) -> Json:
        noun = "chat.completion.chunk" if self._call.kind == "chat" else self._noun
        return {**self._head(noun), "choices": [choice]}

    def _head(self, noun: str) -> Json:
        return {"id": self.id, "object": noun, "created": self._created, "model": self._call.model}

    def usage(self, choices: list[Choice]) -> Json:
        """Return the token counts of all choices; a prompt counts once however many answers it has."""
        prompt = sum(len(ids) for ids in self._call.prompts)
        generated = sum(len(choice.tokens) for choice in choices)
        cached = sum(choice.cached for choice in choices[:: self._call.n])
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + generated,
            "completion_tokens": generated,
            "completion_tokens_details": None,
            "prompt_tokens_details": {
                "cached_tokens": cached,
                "created_cache_tokens": 0 if self._call.kind == "chat" else None,
                "multimodal_tokens": None,
            },
        }

    def parameters(self, handover: Handover | None) -> Json | None:
        """Return what a decode worker needs to pull the KV, in the fields of vLLM's NIXL connector."""
        if handover is None:
            return None
        host, port, engine_id = self._origin
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(handover.blocks)],
            "remote_engine_id": engine_id,
            "remote_request_id": handover.request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": handover.tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": handover.cached,
        }
