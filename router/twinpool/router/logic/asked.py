"""What choices ask and foretell: a request as they see it, the work that it is, and when its first token is due."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.router.logic.index_exact import Held
    from twinpool.router.logic.policy import Ask


class Asked(msgspec.Struct, frozen=True):
    """A request as choices see it: its size, and the keys of its text blocks (none where nothing asks for them).

    A prompt of token ids has ``names``, those of its KV blocks, while KV events are relied on, and ``held``, what was
    found for them.
    """

    ask: Ask
    keys: tuple[int, ...] = ()
    names: tuple[int, ...] = ()
    held: Mapping[str, Held] | None = None
    #: Of a session (0: none), what its last workers hold, and when it came.
    session: int = 0
    returned: Mapping[str, int] | None = None
    came: float = 0.0
    #: The LoRA adapter, where not all of them are at hand everywhere.
    adapter: str = ""


class Work(msgspec.Struct, frozen=True):
    """What a prefill was expected to be when it was sent: by the model alone, in seconds, and tokens thought cached.

    ``before`` is what the worker had to do first; ``sure`` are the tokens that it has by KV events, where they say so.
    """

    seconds: float
    before: float
    cached: int
    sure: int | None = None


class First(msgspec.Struct, frozen=True):
    """When a first token is expected: seconds after its leg is sent.

    ``step`` is the first step's part of it; ``pull``, or else ``prefill`` with the queue before it, are what the bare
    model says of the rest.
    """

    seconds: float
    pull: float = 0.0
    step: float = 0.0
    prefill: float = 0.0
