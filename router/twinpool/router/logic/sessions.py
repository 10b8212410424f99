"""Where a client's session was last: tokens that a worker holds of it, for prompts whose text cannot say.

A session is what a client says is one: the header ``x-session-id``, or else OpenAI's ``prompt_cache_key``. It binds
nothing: its last worker counts as holding the last prompt, which makes it cheaper by the seconds that this saves, and
less so as time passes. Always true: a prompt that by its text blocks is another one than the last counts for nothing;
never more than ``capacity`` sessions are remembered, those that came last.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from twinpool.router.logic.warmth import HALF_LIFE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.router.logic.request import Fields

#: Sessions of one process: about 6 MiB.
CAPACITY: Final = 2**14
#: The field of a body that names a session.
FIELD: Final = "prompt_cache_key"


class Visit(msgspec.Struct, frozen=True):
    """A prompt that went to a worker at ``at`` seconds: ``blocks`` text blocks, of which the last is ``key``."""

    worker: str
    tokens: int
    blocks: int
    key: int
    at: float


def name_of(header: bytes, fields: Fields, client: str) -> int:
    """Return what a session is called here, 0 for none; sessions of two clients are never the same."""
    name = header
    if not name and FIELD in fields:
        name = bytes(fields[FIELD])
        if name in (b"null", b'""'):
            return 0
    return (hash((client, name)) or 1) if name else 0


class Sessions:
    """The last visit of each session to each role."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._visits: OrderedDict[int, dict[str, Visit]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._visits)

    def went(self, session: int, role: str, worker: str, tokens: int, keys: Sequence[int], now: float) -> None:
        """A prompt of ``session`` with these text blocks goes to ``worker``."""
        self._visits.setdefault(session, {})[role] = Visit(worker, tokens, len(keys), keys[-1] if keys else 0, now)
        self._visits.move_to_end(session)
        if len(self._visits) > self._capacity:
            self._visits.popitem(last=False)

    def held(self, session: int, keys: Sequence[int], now: float) -> Mapping[str, int] | None:
        """Return the tokens that workers hold of a prompt with these text blocks, if it continues the last one.

        None of a session that is new.
        """
        visits = self._visits.get(session)
        if visits is None:
            return None
        return {
            visit.worker: int(visit.tokens * 0.5 ** ((now - visit.at) / HALF_LIFE))
            for visit in visits.values()
            if visit.blocks <= len(keys) and (not visit.blocks or keys[visit.blocks - 1] == visit.key)
        }
