"""The KV index: its table against a plain model of the truth, its memory, and what it learns and forgets."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic import index_text
from twinpool.router.logic.index_approximate import ApproximateIndex, Trust, judged
from twinpool.router.logic.index_table import ENTRY_BYTES, BlockTable, runs
from twinpool.router.logic.request import Route, read

keys = st.integers(1, 30)
bits = st.integers(1, 15)
changes = st.lists(st.tuples(st.sampled_from(["add", "remove", "forget"]), keys, bits), max_size=80)


@given(changes)
def test_the_table_says_what_a_dict_of_sets_says(steps: list[tuple[str, int, int]]) -> None:
    table, truth = BlockTable(1024), dict[int, int]()
    for step, key, mask in steps:
        before = truth.get(key, 0)
        if step == "add":
            assert table.add(key, mask) == mask & ~before
            truth[key] = before | mask
        elif step == "remove":
            assert table.remove(key, mask) == before & mask
            truth[key] = before & ~mask
        else:
            table.forget(mask)
            truth = {one: held & ~mask for one, held in truth.items()}
    assert [table.holders(key) for key in range(1, 31)] == [truth.get(key, 0) for key in range(1, 31)]
    distinct = {held for held in truth.values() if held}
    assert distinct <= {mask for mask in table.sets.masks if mask}
    for key in range(1, 31):
        table.remove(key, 15)
    assert len(table.sets) == table.entries == 0


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "forget"]), st.lists(st.integers(0, 30)), bits)))
def test_many_blocks_at_a_time_are_as_many_single_ones(steps: list[tuple[str, list[int], int]]) -> None:
    lost: tuple[list[int], list[int]] = ([], [])
    many, single = BlockTable(16, lost[0].append), BlockTable(16, lost[1].append)
    for step, some, mask in steps:
        if step == "add":
            assert many.add_all(some, mask) == sum(bool(single.add(key, mask)) for key in some)
        elif step == "remove":
            assert many.remove_all(some, mask) == sum(bool(single.remove(key, mask)) for key in some)
        else:
            many.forget(mask)
            single.forget(mask)
        many.tick()
        single.tick()
    assert [many.holders(key) for key in range(31)] == [single.holders(key) for key in range(31)]
    assert (many.entries, lost[0]) == (single.entries, lost[1])


def test_a_look_up_serves_the_choice_and_what_follows_until_something_changes() -> None:
    index = ApproximateIndex(1024)
    prompt, longer = (1, 2, 3), (1, 2, 3, 4)
    index.learn(prompt, "a")
    assert index.depths(longer, ["a"]) == {"a": 3}
    index.learn(longer, "a")
    assert index.depths(longer, ["a", "b"]) == {"a": 4}
    index.learn(longer, "b")
    assert index.depths(longer, ["a", "b"]) == {"a": 4, "b": 4}
    index.forget("a")
    assert index.depths(longer, ["a", "b"]) == {"b": 4}
    index.keep({"a"})
    assert index.depths(longer, ["a", "b"]) == {}


def test_holders_come_with_those_that_hold_the_most_first_and_equals_in_turn() -> None:
    index = ApproximateIndex(1024)
    assert list(index.holders((1, 2), 0)) == []
    for worker, keys in (("a", [1]), ("b", [1, 2]), ("c", [1, 2]), ("d", [1, 2, 3]), ("e", [9])):
        index.learn(keys, worker)
    orders = {tuple(index.holders((1, 2, 3), turn)) for turn in range(8)}
    assert orders == {("d", "b", "c", "a"), ("d", "c", "b", "a")}
    index.keep({"a", "b"})
    index.learn((1, 2), "f")
    assert set(index.holders((1, 2), 0)) == {"a", "b", "f"}, "the place of one that is gone is another's"


def test_blocks_of_long_prompts_are_an_eighth_of_what_stands_before_them() -> None:
    ends = [index_text.bytes_of(blocks) for blocks in range(60)]
    assert ends[:17] == [512 * blocks for blocks in range(17)]
    assert ends[24] == 2 * ends[16]
    for before, after in pairwise(ends[16:]):
        assert before / 16 <= after - before <= before / 8
    assert len(index_text.chain(b"x" * 2**22)) < 80, "what is beyond a mebibyte is not looked at"


def test_an_entry_takes_sixteen_bytes_and_the_oldest_goes_first() -> None:
    gone: list[int] = []
    table = BlockTable(8, gone.append)
    assert table.table_bytes == 8 * ENTRY_BYTES + 1
    assert ENTRY_BYTES <= 24
    for key in range(1, 10):
        table.tick()
        table.add(key, key)
        table.holders(1)
    assert table.entries == table.capacity == 8
    assert gone == [2]
    assert table.holders(1) == 1
    assert BlockTable(0).capacity == 8
    assert table.add(0, 1) == 0, "0 stands for no entry"


def test_keys_in_a_row_fill_the_table_before_any_has_to_go() -> None:
    gone: list[int] = []
    table = BlockTable(64, gone.append)
    assert table.add_all(range(1, 65), 1) == 64
    assert (gone, table.entries) == ([], 64)


def test_keys_of_one_home_are_all_found_and_leave_no_trace() -> None:
    table = BlockTable(8)
    keys = [8, 16, 24, 3]
    assert table.add_all(keys, 1) == 4
    assert table.masks(keys) == [1, 1, 1, 1]
    assert table.masks([8, 32]) == [1]
    assert table.remove_all([16, 3, 40], 1) == 2
    assert [table.holders(key) for key in keys] == [1, 0, 1, 0]
    assert table.remove_all(keys, 1) == 2
    assert len(table.sets) == table.entries == 0


def test_an_entry_that_nobody_holds_makes_room_before_one_that_somebody_holds() -> None:
    gone: list[int] = []
    table = BlockTable(8, gone.append)
    for key in range(1, 9):
        table.add(key, 1 if key == 5 else 2)
    table.forget(1)
    table.add(9, 2)
    assert (gone, table.holders(5), table.holders(9), table.entries) == ([], 0, 2, 8)


@given(st.lists(st.integers(1, 63), max_size=6))
def test_runs_are_leading_runs(masks: list[int]) -> None:
    found = {bit: depth for held, depth in runs(masks) for bit in range(6) if held >> bit & 1}
    for bit in range(6):
        depth = next((place for place, mask in enumerate(masks) if not mask >> bit & 1), len(masks))
        assert found.get(bit, 0) == depth


def test_prompts_that_begin_alike_have_the_same_first_keys() -> None:
    def keys_of(content: str, adapter: str = "", **more: object) -> tuple[int, ...]:
        body = {"model": "m", "messages": [{"role": "user", "content": content}], **more}
        return index_text.chain(index_text.text_of(read(Route.CHAT, json.dumps(body).encode()).fields, adapter))

    begin = "x" * 2000
    first, second = keys_of(begin + "a" * 600), keys_of(begin + "b" * 600)
    assert len(first) == len(second) == 5
    assert first[:3] == second[:3]
    assert first[4] != second[4]
    assert keys_of(begin, tools=[1])[0] != first[0]
    assert keys_of("short") == ()
    adapters = [keys_of(begin, adapter)[0] for adapter in ("", "sql", "legal", "sql")]
    assert len(set(adapters)) == 3, "KV of an adapter is of no use to another one"
    assert adapters[1] == adapters[3]
    assert keys_of(begin, temperature=0.5) == keys_of(begin, temperature=0.7), "sampling does not decide the KV"


def test_the_approximate_index_learns_discounts_and_forgets() -> None:
    index = ApproximateIndex(1024)
    index.learn([1, 2, 3], "a")
    index.learn([1, 9], "b")
    assert index.leading([1, 2, 3, 4], ["a", "b", "c"]) == {"a": 3, "b": 1}
    assert index.leading([7], ["a"]) == {}
    for _ in range(5):
        index.report("a", 100, 0)
    index.report("nobody", 100, 0)
    assert index.leading([1, 2, 3], ["a"])["a"] == pytest.approx(3 * 0.9**5)
    index.keep({"b"})
    assert index.leading([1, 2], ["a", "b"]) == {"b": 1}
    assert set(index.trust) == set()
    index.learn([5], "c")
    assert index.leading([5], ["b", "c"]) == {"c": 1}, "the place of one that is gone is given away, not its blocks"
    index.keep({"b", "c"})
    for key in range(100, 2000):
        index.learn([key], "c")
    assert index.table.entries == index.table.capacity == 1024


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 200)), max_size=60))
def test_trust_stays_a_share_and_can_be_won_back(reports: list[tuple[int, int]]) -> None:
    trust = Trust()
    for foretold, reported in reports:
        trust = judged(trust, foretold, reported)
    assert 0.05 <= trust.share <= 1
    for _ in range(60):
        trust = judged(trust, 10, 12)
    assert trust.share > 0.99
    assert judged(trust, 0, 5) is trust
