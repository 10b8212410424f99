"""A request inside the engine, and what the engine says about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from twinpool.core.blockhash import ROOT, Adapter, following, short
from twinpool.worker.engines.simulated.logic import language
from twinpool.worker.engines.simulated.logic.tiers import NOTHING


class Phase(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    PULLING = "pulling"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


#: vLLM's finish reasons. ``abort``: the client left or the engine is going away. ``error``: the KV did not come.
FinishReason = Literal["length", "stop", "abort", "error"]


@dataclass(frozen=True, slots=True)
class RemoteKv:
    """The prefill worker that holds a prompt's KV, as its answer said."""

    engine_id: str
    request_id: str
    host: str
    port: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """What a client asks of the engine: one prompt, one answer.

    ``hand_over`` keeps the KV for a decode worker when the answer ends; ``remote`` pulls it from a prefill worker.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    hand_over: bool = False
    remote: RemoteKv | None = None
    salt: str | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Handover:
    """KV that waits for a decode worker, under the order's id."""

    request_id: str
    blocks: tuple[int, ...]
    tokens: int
    cached: int


@dataclass(frozen=True, slots=True)
class Token:
    """Token ``index`` of an answer came out; ``cached`` are the prompt tokens that came from the prefix cache."""

    id: str
    token: int
    index: int
    cached: int
    finish: FinishReason | None = None
    handover: Handover | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence ended without its answer."""

    id: str
    reason: FinishReason
    problem: str


@dataclass(frozen=True, slots=True)
class Pull:
    """The shell should fetch a prompt's KV; blocks for it are held. ``missing`` blocks are moved."""

    id: str
    remote: RemoteKv
    missing: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """The shell should wait for as long as a load from slower tiers takes, and then say that it is done."""

    id: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Discard:
    """The shell should tell the prefill worker that its KV is not wanted."""

    id: str
    remote: RemoteKv


Event = Token | Failed | Pull | Fetch | Discard


class Sequence:
    """The engine's record of one order.

    ``computed`` of the ``tokens`` have KV in ``blocks``; ``content`` is what that KV holds; ``hashes`` name the full
    blocks by the tokens alone, so that a wrong KV is stored under the name of the right one, as in a real engine.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "cached",
        "chain",
        "computed",
        "content",
        "drafted",
        "external",
        "hashes",
        "last_token",
        "load",
        "order",
        "phase",
        "remote",
        "running_since",
        "scheduled",
        "size",
        "started",
        "stored",
        "tokens",
    )

    def __init__(self, order: Order, arrived: float, size: int) -> None:
        self.order = order
        self.arrived = arrived
        self.size = size
        self.phase = Phase.WAITING
        self.tokens: list[int] = []
        self.content = language.Content.of(order.prompt)
        #: Digest of the last full block.
        self.chain = ROOT
        self.hashes: list[int] = []
        self.blocks: list[int] = []
        #: KV that is still to be pulled; None once it came, or when there is none.
        self.remote = order.remote
        self.computed = self.stored = self.scheduled = self.cached = self.external = 0
        #: What is to be loaded from slower tiers before it can run.
        self.load = NOTHING
        #: Tokens that the step checks beside the scheduled ones.
        self.drafted = 0
        self.started: float | None = None
        self.running_since: float | None = None
        self.last_token: float | None = None
        self._name(order.prompt)

    @property
    def id(self) -> str:
        """Id of the order."""
        return self.order.id

    @property
    def generated(self) -> int:
        """Number of tokens that came out so far."""
        return len(self.tokens) - len(self.order.prompt)

    @property
    def found(self) -> int:
        """Number of prompt tokens that were cached here, on the accelerator or behind it."""
        return self.cached + (self.external if self.order.remote is None else 0)

    @property
    def pending(self) -> int:
        """Number of tokens whose KV must be computed before the next one can come out."""
        return len(self.tokens) - self.computed

    def append(self, token: int) -> None:
        """Take one token that came out."""
        self.content = self.content.after(token)
        self._name((token,))

    def restart(self) -> None:
        """Forget all KV: it will be computed anew from the tokens."""
        self.blocks = []
        self.load = NOTHING
        self.computed = self.stored = self.scheduled = self.drafted = 0
        self.content = language.Content.of(self.tokens)

    def _name(self, tokens: tuple[int, ...]) -> None:
        start = 0
        while start < len(tokens):
            room = self.size - len(self.tokens) % self.size
            part = tokens[start : start + room]
            self.tokens += part
            if len(part) == room:
                salt = None if self.hashes else self.order.salt
                self.chain = following(self.chain, self.tokens[-self.size :], salt, self.order.adapter)
                self.hashes.append(short(self.chain))
            start += room
