"""Faults on request: what may go wrong with the engine or with one of its answers. Pure.

``--fault NAME[=VALUE]`` makes one for the whole engine, the header ``x-twinpool-fault`` for one request.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinpool.core.errors import InvalidValue

HEADER = "x-twinpool-fault"

#: Faults of the start, which take no value, and what each does.
AT_START = {
    "crash-at-start": "a traceback, then exit code 1",
    "oom-at-load": "vLLM's out-of-memory lines, then death by SIGKILL (exit code 137)",
    "model-missing": "the lines of a model that cannot be found, then exit code 1",
}
#: Faults of an answer: whether each takes a number, and what it does.
OF_ANSWER = {
    "status": (True, "answer with this HTTP status and an error body"),
    "slow": (True, "wait this many seconds before starting"),
    "hang": (False, "take the request and never answer"),
    "reset": (False, "reset the connection instead of answering"),
    "reset-mid-stream": (True, "reset the connection after this many tokens"),
    "die-mid-stream": (True, "kill the whole engine after this many tokens"),
    "stall-mid-stream": (True, "let the whole engine stand still after this many tokens; its HTTP server goes on"),
}
#: Faults of the whole engine's KV events.
OF_EVENTS = {"lose-events": (True, "publish no message of KV events whose turn it is, each Nth; replays have it")}
#: Where the number of a fault of another name goes.
_FIELDS = {
    "reset-mid-stream": "reset_after",
    "die-mid-stream": "die_after",
    "stall-mid-stream": "stall_after",
    "lose-events": "lose_events",
}
#: Faults that may take a number, and whether they do.
_VALUED = {**OF_ANSWER, **OF_EVENTS}


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of an engine or of one request; numbers as in :data:`OF_ANSWER`."""

    at_start: str | None = None
    status: int | None = None
    slow: float = 0.0
    hang: bool = False
    reset: bool = False
    reset_after: int | None = None
    die_after: int | None = None
    stall_after: int | None = None
    lose_events: int | None = None


def parse(entries: list[str], base: Faults | None = None) -> Faults:
    """Return the faults in ``entries``; what they do not name is taken from ``base``.

    Raises
    ------
    InvalidValue
        When a name is unknown, or a number is missing or out of range.
    """
    base = base or Faults()
    values = {name: getattr(base, name) for name in Faults.__slots__}
    for entry in entries:
        name, given, number = entry.strip().partition("=")
        if name in AT_START and not given:
            values["at_start"] = name
        elif name in _VALUED and bool(given) == _VALUED[name][0]:
            values.update(_value(name, number))
        else:
            known = [*AT_START, *(f"{name}=N" if valued else name for name, (valued, _) in _VALUED.items())]
            raise InvalidValue(f"{entry!r} is not a fault", f"choose one of: {', '.join(known)}")
    return Faults(**values)


def _value(name: str, number: str) -> dict[str, object]:
    if name in ("hang", "reset"):
        return {name: True}
    try:
        value = float(number) if name == "slow" else int(number)
    except ValueError:
        raise InvalidValue(f"{name}={number}: {number!r} is not a number", f"write {name}=3, for example") from None
    if not 0 <= value <= 3600 or (name == "status" and not 400 <= value <= 599):
        raise InvalidValue(f"{name}={number} is out of range", "a status is 400 to 599, all else 0 to 3600")
    return {_FIELDS.get(name, name): value}
