"""The exact KV index: events by rank and tier, gaps, replays, restarts and coverage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic import index_exact
from twinpool.router.logic.index_events import _HELD_BACK, Event, Events, Feed, Take, events_of
from twinpool.router.logic.index_exact import EXPECT_SECONDS, ExactIndex, Held

if TYPE_CHECKING:
    import pytest


def stored(*hashes: int, medium: str | None = "GPU") -> Event:
    return Event("BlockStored", list(hashes), medium)


def removed(*hashes: int, medium: str | None = "GPU") -> Event:
    return Event("BlockRemoved", list(hashes), medium)


A, B = "a", "b#3"


def test_the_exact_index_follows_events_by_rank_and_tier() -> None:
    index = ExactIndex(1024)
    index.apply(A, (stored(1, 2, 3), Event("SomethingNew", [9])))
    index.apply(B, (stored(1, 2), stored(2, medium="CPU"), removed(2)))
    index.apply(B, (stored(3, medium="DISK"), stored(4, medium="NVME")))
    assert index.leading([1, 2, 3, 4, 5]) == {A: Held(3, 3, 3), B: Held(1, 4, 1)}
    index.apply(A, (Event("AllBlocksCleared"), stored(1)))
    assert index.leading([1, 2]) == {A: Held(1, 1, 1), B: Held(1, 2, 1)}
    index.apply(A, (Event("BlockRemoved", [1], "GPU", group_idx=1),))
    index.reset(B)
    index.reset("unknown")
    assert index.leading([1, 2]) == {A: Held(1, 1, 1)}
    assert (index.blocks(A), index.blocks("unknown")) == (1, 0)
    index.keep({B})
    assert index.leading([1]) == {}
    index.apply("c", (stored(7),))
    assert index.leading([7]) == {"c": Held(1, 1, 1)}
    assert index.leading([1]) == {}


def test_what_was_sent_is_expected_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    index = ExactIndex(1024)
    index.apply(A, (stored(1),))
    index.expect(A, (1, 2, 3), now=0.0)
    index.expect(B, (1, 2), now=5.0)
    assert index.leading([1, 2, 3]) == {A: Held(1, 1, 3), B: Held(0, 0, 2)}
    assert index.coverage(A) == 1.0
    index.expire(EXPECT_SECONDS)
    assert index.leading([1, 2, 3]) == {A: Held(1, 1, 1), B: Held(0, 0, 2)}
    index.apply(B, (stored(1, 2),))
    index.expire(5.0 + EXPECT_SECONDS)
    assert index.leading([1, 2, 3]) == {A: Held(1, 1, 1), B: Held(2, 2, 2)}
    monkeypatch.setattr(index_exact, "_MOST_EXPECTED", 3)
    index.expect(A, (11, 12), now=20.0)
    index.expect(A, (13, 14), now=20.0)
    assert index.leading([11]) == {}, "the oldest gave way"
    assert index.leading([13, 14]) == {A: Held(0, 0, 2)}


def test_blocks_that_did_not_fit_lower_the_coverage_of_their_holders() -> None:
    index = ExactIndex(8)
    assert index.coverage(A) == 1.0
    index.apply(A, (stored(*range(1, 9)), stored(1, medium="CPU")))
    assert index.coverage(A) == 1.0
    index.apply(B, (stored(*range(11, 15)),))
    assert index.coverage(A) < 0.7
    assert index.coverage(B) == 1.0
    index.apply(A, (removed(*range(1, 9)), removed(1, medium="CPU"), removed(1, medium="CPU")))
    assert index.coverage(A) == 1.0


class Engine:
    """Publishes numbered messages, each storing one block of its number, and replays the last ones."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.published: list[Events] = []

    def publish(self) -> tuple[int, Events]:
        self.published.append((stored(len(self.published) + 1),))
        return len(self.published) - 1, self.published[-1]

    def replay(self, first: int) -> list[tuple[int, Events]]:
        oldest = max(first, len(self.published) - self.kept)
        return list(enumerate(self.published))[oldest:]


@given(st.lists(st.sampled_from(["heard", "lost", "restart"]), max_size=40), st.integers(0, 12))
def test_an_index_never_names_a_block_of_a_gap_and_is_whole_when_replays_reach_back(
    steps: list[str], kept: int
) -> None:
    engine, feed, known = Engine(kept), Feed(), set[int]()

    def take(result: Take) -> None:
        if result.reset:
            known.clear()
        known.update(key for events in result.batches for event in events for key in event.block_hashes)
        if result.replay is not None:
            replay(result.replay)

    def replay(first: int) -> None:
        for number, events in engine.replay(first):
            take(feed.replayed(number, events))
        take(feed.replay_ended())

    for step in steps:
        if step == "restart":
            engine = Engine(kept)
        message = engine.publish()
        if step != "lost":
            take(feed.receive(*message))
            if step == "restart":
                assert known == {1}
    assert not feed.waiting
    replay(feed.wanted)
    assert known <= set(range(1, len(engine.published) + 1)) or "restart" in steps
    if "restart" not in steps and kept >= len(steps):
        assert known == set(range(1, len(steps) + 1)), "also what was lost last"


def test_a_gap_that_no_replay_fills_resets_and_one_that_is_never_answered_is_given_up() -> None:
    feed = Feed()
    assert feed.receive(0, (stored(1),)) == Take(((stored(1),),))
    assert feed.receive(0, (stored(1),)).reset, "the number 0 again is a new process"
    assert feed.receive(3, (stored(4),)) == Take(replay=1)
    assert feed.receive(4, (stored(5),)) == Take(), "asked once"
    assert feed.replay_ended() == Take(((stored(4),), (stored(5),)), reset=True)
    assert feed.replayed(4, ()) == Take(), "known"
    assert feed.replayed(6, (stored(7),)) == Take(((stored(7),),), reset=True), "5 is lost for good"
    assert feed.receive(6, (stored(7),)) == Take(), "the replay was quicker"
    assert feed.receive(9, ()) == Take(replay=7)
    assert feed.replayed(7, ()) == Take(((),))
    assert feed.replay_ended() == Take(replay=8), "it began before 8 was published"
    assert feed.replayed(8, ()) == Take(((),))
    assert feed.replay_ended() == Take(((),))
    assert feed.wanted == 10
    feed = Feed()
    feed.receive(0, ())
    result = Take()
    for number in range(8, 9 + _HELD_BACK):
        result = feed.receive(number, ())
    assert result.reset
    assert len(result.batches) == _HELD_BACK + 1
    assert not feed.waiting


def test_a_reader_that_comes_late_knows_less_but_nothing_wrong() -> None:
    feed = Feed()
    assert feed.receive(50, (stored(51),)) == Take(replay=0)
    assert [feed.replayed(number, (stored(number + 1),)) for number in (49, 50)] == [
        Take(((stored(50),),)),
        Take(((stored(51),),)),
    ]
    assert feed.replay_ended() == Take()
    assert feed.receive(51, ()) == Take(((),))


def test_a_number_that_came_before_is_another_process() -> None:
    feed = Feed()
    for number in range(9):
        feed.receive(number, ())
    assert feed.receive(3, (stored(4),)) == Take(reset=True, replay=0)
    assert feed.replayed(0, ()) == Take(((),))
    assert feed.replayed(1, ()) == Take(((),))
    assert feed.replay_ended() == Take(replay=2)
    assert feed.replayed(2, ()) == Take(((),))
    assert feed.replay_ended() == Take(((stored(4),),))
    late = Feed()
    late.receive(50, (stored(51),))
    assert late.replay_ended() == Take(((stored(51),),)), "no replay, nothing known before"


def test_messages_are_read_as_vllm_writes_them() -> None:
    event = {"type": "BlockStored", "block_hashes": [7, b"\x01" * 32], "parent_block_hash": None, "medium": "GPU",
             "token_ids": [1, 2], "block_size": 2, "lora_id": None, "extra_keys": [None], "group_idx": 0}  # fmt: skip
    payload = msgspec.msgpack.encode([1.5, [event, {"type": "AllBlocksCleared"}], 0])
    found = events_of(payload)
    assert found is not None
    assert [one.type for one in found] == ["BlockStored", "AllBlocksCleared"]
    assert found[0].block_hashes == [7, 0x0101010101010101]
    assert events_of(b"\xc1") is None
    assert events_of(msgspec.msgpack.encode({"no": "message"})) is None


def test_removals_in_a_row_are_read_as_one_event() -> None:
    def removed(key: int, medium: str = "GPU", group: int = 0) -> dict[str, object]:
        return {"type": "BlockRemoved", "block_hashes": [key], "medium": medium, "group_idx": group}

    stored = {"type": "BlockStored", "block_hashes": [9], "medium": "GPU", "group_idx": 0}
    events = [removed(1), removed(2), removed(3, "CPU"), removed(4, "CPU", 1), stored, removed(5), removed(6), stored]
    found = events_of(msgspec.msgpack.encode([1.5, events, 0]))
    assert found is not None
    assert [(one.type, one.block_hashes, one.medium, one.group_idx) for one in found] == [
        ("BlockRemoved", [1, 2], "GPU", 0),
        ("BlockRemoved", [3], "CPU", 0),
        ("BlockRemoved", [4], "CPU", 1),
        ("BlockStored", [9], "GPU", 0),
        ("BlockRemoved", [5, 6], "GPU", 0),
        ("BlockStored", [9], "GPU", 0),
    ]
