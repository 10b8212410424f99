"""Events tell transitions: once, with the right weight, and counted when they come again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.operator.logic.notes import Note, event, transitions
from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.recorder import MOST, Recorder

if TYPE_CHECKING:
    import pytest

KEY = ("team", "demo")


def status(*conditions: tuple[str, str, str], revision: str = "r1") -> dict[str, Any]:
    found = [
        {"type": kind, "status": value, "reason": reason, "message": f"{reason} it is"}
        for kind, value, reason in conditions
    ]
    return {"conditions": found, "revision": revision}


def told(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, str]]:
    return [(note.type, note.reason) for note in transitions(before, after)]


def test_nothing_new_is_no_event() -> None:
    same = status(("Ready", "True", "Serving"), ("Progressing", "False", "Complete"))
    assert told(same, same) == []


def test_a_new_pool_and_its_way_to_ready() -> None:
    first = status(("Ready", "False", "RouterNotReady"), ("Progressing", "True", "Waiting"), ("Placed", "Unknown", "x"))
    assert told({}, first) == [("Normal", "RouterNotReady")]
    ready = status(("Ready", "True", "Serving"), ("Progressing", "False", "Complete"), ("Placed", "True", "PodsPlaced"))
    assert told(first, ready) == [("Normal", "Serving"), ("Normal", "Complete"), ("Normal", "PodsPlaced")]


def test_what_was_lost_is_a_warning() -> None:
    before = status(("Ready", "True", "Serving"))
    assert told(before, status(("Ready", "False", "NoDecodeReady"))) == [("Warning", "NoDecodeReady")]
    assert told(before, status(("Ready", "False", "EngineFailed"))) == [("Warning", "EngineFailed")]
    assert told(status(("Progressing", "True", "Waiting")), status(("Progressing", "False", "Refused"))) == [
        ("Warning", "Refused")
    ]


def test_one_cause_in_several_conditions_is_one_event() -> None:
    before = status(
        ("Ready", "True", "Serving"), ("Progressing", "False", "Complete"), ("Routable", "True", "Routable")
    )
    crash = [(kind, "False", "EngineFailed") for kind in ("Ready", "Progressing", "Routable")]
    assert told(before, status(*crash)) == [("Warning", "EngineFailed")]


def test_a_new_revision_is_told() -> None:
    assert told(status(revision="r1"), status(revision="r2")) == [("Normal", "NewRevision")]
    assert told({}, status(revision="r1")) == []


def test_a_pause_is_told() -> None:
    paused = status(("Progressing", "Unknown", "RolloutPaused"))
    assert told(status(("Progressing", "True", "Waiting")), paused) == [("Normal", "RolloutPaused")]


def test_conditions_that_nothing_measures_are_not_told() -> None:
    assert told({}, status(("HandoffWorking", "Unknown", "NotMeasured"), ("Other", "False", "Bad"))) == []


POOL = {"apiVersion": "v", "kind": "k", "namespace": "team", "name": "demo", "uid": "u"}


def test_an_event_is_one_that_the_api_server_takes() -> None:
    note = Note("Warning", "EngineFailed", "x", "Ready")
    first = event(note, POOL, "me", 1, 0.0, 0.0)
    again = event(note, POOL, "me", 2, 0.0, 60.0)
    assert first["metadata"] == again["metadata"], "what comes again is counted, not listed twice"
    assert (again["count"], again["firstTimestamp"], again["lastTimestamp"]) == (
        2,
        "1970-01-01T00:00:00Z",
        "1970-01-01T00:01:00Z",
    )
    assert first["metadata"]["name"].startswith("demo.")
    other = event(note, {**POOL, "uid": "another"}, "me", 1, 0.0, 0.0)
    assert other["metadata"]["name"] != first["metadata"]["name"]
    (long,) = transitions(
        {}, {"conditions": [{**status(("Ready", "False", "A"))["conditions"][0], "message": "m" * 9000}]}
    )
    assert len(long.message) == 1024


class Server:
    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.refuses = False

    async def apply(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.refuses:
            raise ApiRefused(403, "no")
        self.taken.append(body)
        return body


UP = status(("Ready", "True", "Serving"))
DOWN = status(("Ready", "False", "EngineFailed"))


async def test_what_repeats_is_counted_and_a_flapping_pool_is_cut_short() -> None:
    server, now = Server(), [0.0]
    recorder = Recorder(server, "me", lambda: now[0])  # type: ignore[arg-type]
    for _ in range(MOST):
        await recorder.changed(KEY, "u", UP, DOWN)
        await recorder.changed(KEY, "u", DOWN, UP)
        now[0] += 1
    assert len(server.taken) == MOST
    assert len({body["metadata"]["name"] for body in server.taken}) == 2
    assert server.taken[-1]["count"] == MOST // 2
    now[0] += 100
    await recorder.changed(KEY, "u", UP, DOWN)
    assert server.taken[-1]["count"] == MOST // 2 + 1
    assert server.taken[-1]["firstTimestamp"] == "1970-01-01T00:00:00Z"
    recorder.forget(KEY)
    await recorder.changed(KEY, "u", UP, DOWN)
    assert server.taken[-1]["count"] == 1


async def test_a_refusal_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.refuses = True
    recorder = Recorder(server, "me", lambda: 0.0)  # type: ignore[arg-type]
    await recorder.changed(KEY, "u", UP, DOWN)
    await recorder.changed(KEY, "u", DOWN, UP)
    assert caplog.text.count("Events cannot be written") == 1
