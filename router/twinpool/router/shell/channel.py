"""What the control process and the data processes say to each other: length-prefixed msgpack over a socket pair.

Endpoints go down whole at every change, numbers come up whole every second, so a lost process or a late message is
repaired by the next one. The exact KV index is asked over it too: one question for a prompt of token ids, answered in
well under a millisecond, in place of a table in shared memory whose every entry would have to check itself.
"""

import asyncio
from typing import Any, Final

import msgspec

from twinpool.router.logic.arrivals import Arrivals
from twinpool.router.logic.copies import Others
from twinpool.router.logic.decisions import Decision
from twinpool.router.logic.endpoints import Endpoint
from twinpool.router.logic.index_exact import Held
from twinpool.router.logic.ledger import Load
from twinpool.router.logic.metrics import Numbers
from twinpool.router.settings import Settings

_MAX_MESSAGE: Final = 64 * 2**20


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The first message to a data process."""

    settings: Settings
    #: Names and digests of the API keys; None where nobody needs one.
    keys: tuple[tuple[str, bytes], ...] | None = None


class Keys(msgspec.Struct, tag=True, frozen=True):
    """The API keys from now on."""

    keys: tuple[tuple[str, bytes], ...]


class Endpoints(msgspec.Struct, tag=True, frozen=True):
    """All endpoints of the pool, admitted or not."""

    endpoints: tuple[Endpoint, ...]


class Shed(msgspec.Struct, tag=True, frozen=True):
    """Close so many connections, each after its next answer: other data processes have less to do."""

    connections: int


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Report at once."""

    number: int


class Look(msgspec.Struct, tag=True, frozen=True):
    """Somebody looks at ``/debug``: answer with :class:`State`, and keep choices for a while when ``decisions``."""

    number: int
    decisions: bool = False


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Take no more connections after ``lame_duck`` seconds, and end when nothing runs or after ``timeout`` seconds."""

    lame_duck: float
    timeout: float


class Relied(msgspec.Struct, tag=True, frozen=True):
    """The endpoints whose KV events routing may rely on, all with blocks of ``size`` tokens."""

    size: int
    endpoints: frozenset[str]


class Emptied(msgspec.Struct, tag=True, frozen=True):
    """An endpoint holds nothing of what it held, by its events."""

    endpoint: str


class Elsewhere(msgspec.Struct, tag=True, frozen=True):
    """The work of all other processes; answered with :class:`Here`."""

    others: Others


class Located(msgspec.Struct, tag=True, frozen=True):
    """The answer to :class:`Locate`: which endpoints hold how much of the prompt."""

    number: int
    held: list[tuple[str, Held]]


class Locate(msgspec.Struct, tag=True, frozen=True):
    """Asks which endpoints hold the leading blocks of a prompt."""

    number: int
    names: tuple[int, ...]


class Sent(msgspec.Struct, tag=True, frozen=True):
    """A prompt of these blocks was sent to an endpoint, where it is expected to be read in so many seconds."""

    endpoint: str
    names: tuple[int, ...]
    wait: float = 0.0


class Here(msgspec.Struct, tag=True, frozen=True):
    """The ledger of a data process by endpoint id, for the others."""

    loads: list[tuple[str, Load]]


class Report(msgspec.Struct, tag=True, frozen=True):
    """What a data process has counted, and its ledger by endpoint id; ``number`` is that of the question."""

    number: int
    numbers: Numbers
    loads: list[tuple[str, Load]]
    #: Cached prompt tokens that were of use lately, by endpoint id.
    warmth: dict[str, int] = {}
    #: Open connections, and CPU seconds used since the start.
    clients: int = 0
    cpu: float = 0.0
    arrivals: Arrivals = msgspec.field(default_factory=Arrivals)
    #: What was learnt of predictions: factor and samples, by what they are of.
    foresight: dict[str, tuple[float, int]] = {}
    #: Engines read other tokens than the renderers make.
    distrusts: bool = False


class State(msgspec.Struct, tag=True, frozen=True):
    """The answer to :class:`Look`: what a data process is at, and its choices if it kept some (None: it began now)."""

    number: int
    state: dict[str, Any]
    decisions: list[Decision] | None = None


Down = Hello | Endpoints | Keys | Shed | Ask | Look | Drain | Relied | Emptied | Located | Elsewhere
Up = Report | Locate | Sent | Here | State

_encode = msgspec.msgpack.Encoder().encode
decode_down = msgspec.msgpack.Decoder(Down).decode
decode_up = msgspec.msgpack.Decoder(Up).decode


def send(writer: asyncio.StreamWriter, message: Down | Up) -> None:
    """Queue a message; a closed channel swallows it, and its reader notices."""
    if not writer.is_closing():
        data = _encode(message)
        writer.write(len(data).to_bytes(4, "big") + data)


async def receive(reader: asyncio.StreamReader) -> bytes | None:
    """Return the next message, or None when the other side is gone."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > _MAX_MESSAGE:
            return None
        return await reader.readexactly(size)
    except (asyncio.IncompleteReadError, OSError):
        return None
