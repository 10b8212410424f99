"""The rollout planner: from any mix of groups to the newest revision, never over a bound, and always to an end."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from twinpool.core.rollout import Rollout, resolved
from twinpool.operator.logic.rollout import Bounds, Health, State, Step, Unit, step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

READY, WAITING, FAILED, LOST, LEAVING = Health.READY, Health.WAITING, Health.FAILED, Health.LOST, Health.LEAVING
NEW = "new"
ROLES = ("prefill", "decode")


def serving(units: Iterable[Unit], bounds: dict[str, Bounds]) -> Counter[str]:
    """Return the groups that answer, by role: those of revisions with both stages, or old ones with decode alone."""
    total: Counter[str] = Counter()
    units = [unit for unit in units if unit.health is not LEAVING]
    for revision in {unit.revision for unit in units}:
        mine = [unit for unit in units if unit.revision == revision]
        ready = Counter(unit.role for unit in mine if unit.health is READY)
        live = Counter(unit.role for unit in mine)
        if revision == NEW:
            able = all(ready[role] for role, limits in bounds.items() if limits.wanted)
        else:
            able = bool(ready["decode"]) and (bool(ready["prefill"]) or not live["prefill"])
        total += ready if able else Counter()
    return total


def lean(counts: Counter[str], bounds: dict[str, Bounds]) -> int:
    """Return how far what is needed of the counts is from the wanted ratio; a group is the other role's number."""
    prefill, decode = (min(counts[role], bounds[role].wanted) for role in ROLES)
    wanted = [bounds[role].wanted for role in ROLES]
    return abs(prefill * wanted[1] - decode * wanted[0]) if all(wanted) else 0


@dataclass
class Fleet:
    """Groups that become ready, end and fail when the test says so, and a planner that is asked between."""

    bounds: dict[str, Bounds]
    units: list[Unit] = field(default_factory=list)
    paused: bool = False
    made: int = 0
    steps: list[Step] = field(default_factory=list)

    def add(self, role: str, count: int, revision: str = "old", health: Health = READY) -> Fleet:
        for _ in range(count):
            self.made += 1
            self.units.append(Unit(f"g{self.made}", role, revision, health))
        return self

    def step(self) -> Step:
        order = sorted(self.units, key=lambda unit: (unit.health is READY, -int(unit.name[1:])))
        state = State(tuple(order), self.bounds, NEW, self.paused)
        todo = step(state)
        assert todo == step(state), "the same input gives the same step"
        before = list(self.units)
        for role, count in todo.create.items():
            held = sum(unit.role == role and unit.holds for unit in before)
            limits = self.bounds[role]
            assert held + count <= max(held, limits.wanted + limits.surge), f"over the budget: {todo}"
            self.add(role, count, todo.revision, WAITING)
        self.units = [
            dataclasses.replace(unit, health=LEAVING) if unit.name in todo.retire else unit for unit in self.units
        ]
        self._check(before, todo)
        self.steps.append(todo)
        return todo

    def _check(self, before: list[Unit], todo: Step) -> None:
        had, has = serving(before, self.bounds), serving(self.units, self.bounds)
        for role, limits in self.bounds.items():
            if todo.gave_up != "floor":
                assert has[role] >= min(had[role], limits.floor), f"under the floor: {todo}"
        if not todo.gave_up and any(has[role] < had[role] for role in ROLES):
            one = max(limits.wanted for limits in self.bounds.values())
            assert lean(has, self.bounds) <= max(lean(had, self.bounds), one), f"out of ratio: {todo}"
        for revision in {unit.revision for unit in before} - {NEW}:
            was, now = (
                {unit.role for unit in units if unit.revision == revision and unit.health is READY}
                for units in (before, self.units)
            )
            assert len(was) < 2 or len(now) != 1 or self.paused, f"one stage alone: {todo}"

    def happens(self, become: Callable[[Unit], bool] = lambda _: True) -> None:
        """Let what starts become ready and what ends be gone, for the units that ``become`` picks."""
        kept = []
        for unit in self.units:
            if unit.health is LEAVING and become(unit):
                continue
            started = unit.health is WAITING and unit.revision == NEW and become(unit)
            kept.append(dataclasses.replace(unit, health=READY) if started else unit)
        self.units = kept

    def count(self, role: str, revision: str | None = None, health: Health | None = None) -> int:
        return sum(
            unit.role == role
            and (revision is None or unit.revision == revision)
            and (health is None or unit.health is health)
            for unit in self.units
        )

    def busy(self) -> bool:
        moving = any(unit.health is LEAVING or (unit.health, unit.revision) == (WAITING, NEW) for unit in self.units)
        return moving or bool(self.steps and self.steps[-1])

    def finish(self, *orders: Callable[[Unit], bool]) -> Fleet:
        """Go on until nothing happens any more; in turn only what each of ``orders`` picks happens."""
        turns = itertools.cycle(orders or (lambda _: True,))
        limit = len(self.steps) + 20 + 12 * (len(self.units) + sum(limits.wanted for limits in self.bounds.values()))
        self.step()
        while self.busy():
            assert len(self.steps) < limit, "it does not end"
            self.happens(next(turns))
            self.step()
        return self

    def complete(self) -> bool:
        found = Counter((unit.role, unit.revision, unit.health) for unit in self.units)
        return found == {(role, NEW, READY): limits.wanted for role, limits in self.bounds.items() if limits.wanted}

    def gave_up(self) -> set[str]:
        return {todo.gave_up for todo in self.steps} - {""}


def fleet(prefill: tuple[int, int, int], decode: tuple[int, int, int]) -> Fleet:
    return Fleet({"prefill": Bounds(*prefill), "decode": Bounds(*decode)})


def running(prefill: tuple[int, int, int], decode: tuple[int, int, int]) -> Fleet:
    """Return a fleet that serves with an older revision as it should."""
    return fleet(prefill, decode).add("prefill", prefill[0]).add("decode", decode[0])


ORDERS: dict[str, tuple[Callable[[Unit], bool], ...]] = {
    "all at once": (lambda _: True,),
    "prefill first": (lambda unit: unit.role == "prefill", lambda unit: unit.role == "decode"),
    "decode first": (lambda unit: unit.role == "decode", lambda unit: unit.role == "prefill"),
    "starts before ends": (lambda unit: unit.health is WAITING, lambda unit: unit.health is LEAVING),
    "ends before starts": (lambda unit: unit.health is LEAVING, lambda unit: unit.health is WAITING),
}


@pytest.mark.parametrize("order", ORDERS)
def test_every_small_pool_reaches_the_newest_revision(order: str) -> None:
    amounts = [(1, 0), (0, 1), (1, 1), (0, 2), (3, 2)]
    for prefill, decode in itertools.product(range(1, 5), repeat=2):
        for mine, theirs in itertools.product(amounts, repeat=2):
            ran = running((prefill, *mine), (decode, *theirs)).finish(*ORDERS[order])
            assert ran.complete(), (prefill, decode, mine, theirs)
            if mine[0] and theirs[0]:
                assert "floor" not in ran.gave_up(), "one group more of each role is enough to keep the floor"


#: Numbers of groups of a role: all of them where new examples are looked for, which takes half an hour.
NUMBERS = range(1, 65) if "TWINPOOL_EXPLORE" in os.environ else (1, 7, 33, 64)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("amounts", [(1, 0), (0, 1), (2, 1), ("25%", "25%"), (0, "50%"), ("100%", 0)], ids=str)
def test_every_pair_of_numbers_reaches_the_newest_revision(amounts: tuple[int | str, int | str]) -> None:
    rollout = Rollout(max_surge=amounts[0], max_unavailable=amounts[1])
    orders = itertools.cycle(ORDERS.values())
    for prefill, decode in itertools.product(NUMBERS, repeat=2):
        limits = [(count, *rollout.bounds("decode", count)) for count in (prefill, decode)]
        ran = running(limits[0], limits[1]).finish(*next(orders))
        assert ran.complete(), (prefill, decode)
        assert "floor" not in ran.gave_up() or not all(surge for _, surge, _ in limits), (prefill, decode)


AMOUNT = st.one_of(st.integers(0, 3), st.integers(0, 64), st.integers(0, 100).map("{}%".format))


@st.composite
def limits(draw: st.DrawFn, least: int = 1, most: int = 64) -> tuple[int, int, int]:
    wanted = draw(st.integers(least, most))
    return wanted, *Rollout(max_surge=draw(AMOUNT), max_unavailable=draw(AMOUNT)).bounds("decode", wanted)


@settings(max_examples=50, deadline=None)
@given(prefill=limits(), decode=limits(), order=st.sampled_from(sorted(ORDERS)))
@example(prefill=(64, 1, 0), decode=(1, 1, 0), order="all at once")
@example(prefill=(1, 0, 1), decode=(64, 0, 1), order="decode first")
def test_every_pool_reaches_the_newest_revision(
    prefill: tuple[int, int, int], decode: tuple[int, int, int], order: str
) -> None:
    ran = running(prefill, decode).finish(*ORDERS[order])
    assert ran.complete()
    assert "floor" not in ran.gave_up() or not (prefill[1] and decode[1])


UNIT = st.tuples(
    st.sampled_from(ROLES), st.sampled_from(["a", "b", NEW]), st.sampled_from([*Health, READY, READY]), st.booleans()
)


@settings(max_examples=200, deadline=None)
@given(prefill=limits(0, 6), decode=limits(0, 6), units=st.lists(UNIT, max_size=24), data=st.data())
def test_any_mix_in_any_order_of_events_ends(
    prefill: tuple[int, int, int],
    decode: tuple[int, int, int],
    units: list[tuple[str, str, Health, bool]],
    data: st.DataObject,
) -> None:
    mixed = fleet(prefill, decode)
    for role, revision, health, holds in units:
        mixed.add(role, 1, revision, health)
        mixed.units[-1] = dataclasses.replace(mixed.units[-1], holds=holds or health not in (LOST, LEAVING))
    for _ in range(data.draw(st.integers(0, 12))):
        event = data.draw(st.sampled_from(["start or end", "fail", "lose", "nothing"]))
        picked = {unit.name for unit in mixed.units if data.draw(st.booleans())}
        if event == "start or end":
            mixed.happens(lambda unit, picked=picked: unit.name in picked)  # type: ignore[misc]
        elif event != "nothing":
            hit = {"fail": data.draw(st.sampled_from([WAITING, FAILED])), "lose": LOST}[event]
            mixed.units = [
                dataclasses.replace(unit, health=hit) if unit.name in picked and unit.health is not LEAVING else unit
                for unit in mixed.units
            ]
        mixed.step()
    # The events end: engines that crashed come up again, and dead nodes are taken away.
    mixed.units = [
        dataclasses.replace(unit, health=WAITING) if (unit.revision, unit.health) == (NEW, FAILED) else unit
        for unit in mixed.units
    ]
    mixed.finish()
    assert mixed.complete()


def test_the_steps_of_a_small_pool() -> None:
    ran = running((2, 1, 0), (3, 1, 0)).finish()
    assert [(dict(todo.create), len(todo.retire)) for todo in ran.steps if todo] == [
        ({"prefill": 1, "decode": 1}, 0),
        ({"prefill": 0, "decode": 0}, 2),
        ({"prefill": 1, "decode": 1}, 0),
        ({"prefill": 0, "decode": 0}, 1),
        ({"prefill": 0, "decode": 1}, 0),
        ({"prefill": 0, "decode": 0}, 2),
    ]


def test_what_cannot_be_ready_goes_first_and_does_not_block_the_fix() -> None:
    bad = fleet((2, 1, 0), (2, 1, 0)).add("prefill", 2).add("decode", 2)
    bad.add("prefill", 1, "bad", FAILED).add("decode", 1, "bad", FAILED)
    todo = bad.step()
    assert set(todo.retire) == {"g5", "g6"}, "the broken ones, at once"
    assert bad.finish().complete()


def test_a_pool_that_is_broken_throughout_is_replaced_within_the_budget() -> None:
    bad = fleet((2, 0, 1), (2, 0, 1)).add("prefill", 2, health=FAILED).add("decode", 2, health=FAILED)
    assert len(bad.step().retire) == 4, "nobody is served by waiting"
    assert bad.finish().complete()


def test_what_may_come_back_is_not_counted_as_spare_while_the_new_one_starts() -> None:
    shaken = running((1, 1, 0), (4, 1, 0))
    shaken.units[-1] = dataclasses.replace(shaken.units[-1], health=WAITING)
    assert shaken.step().retire == ()
    assert shaken.step().retire == (), "one is starting, one may come back"
    shaken.happens()
    assert shaken.units[4].name in shaken.step().retire


def test_the_last_group_of_a_stage_is_kept_while_the_new_revision_does_not_serve() -> None:
    pair = fleet((1, 1, 0), (1, 1, 0)).add("prefill", 1).add("decode", 1, health=FAILED)
    assert pair.step().retire == (), "the engine may come back before the new one has loaded"
    assert pair.finish().complete()


def test_the_last_group_of_a_stage_goes_when_it_keeps_the_new_one_out() -> None:
    pair = fleet((1, 1, 0), (1, 0, 1)).add("prefill", 1).add("decode", 1, health=FAILED)
    assert pair.step().retire == ("g2", "g1"), "and with it what is of no use alone"
    assert pair.finish().complete()


def test_prefill_that_lost_all_decode_of_its_revision_serves_nobody_and_goes() -> None:
    lonely = fleet((2, 1, 0), (1, 1, 0)).add("prefill", 2)
    assert set(lonely.step().retire) == {"g1", "g2"}


def test_a_newer_spec_in_the_middle_counts_all_generations_in_one_budget() -> None:
    three = fleet((2, 1, 0), (4, 1, 0)).add("prefill", 1).add("decode", 3)
    three.add("prefill", 1, "second").add("decode", 1, "second").add("prefill", 1, "second", WAITING)
    three.add("decode", 1, "second", WAITING)
    todo = three.step()
    assert set(todo.retire) == {"g7", "g8"}, "what is only starting makes room"
    assert sum(todo.create.values()) == 0, "the budget is full until it has ended"
    assert three.finish().complete()
    assert not three.gave_up()


def test_a_revert_in_the_middle_ends_quickly() -> None:
    back = fleet((2, 1, 0), (3, 1, 0)).add("prefill", 2, NEW).add("decode", 3, NEW)
    back.add("prefill", 1, "bad", WAITING).add("decode", 1, "bad", WAITING)
    todo = back.step()
    assert set(todo.retire) == {"g6", "g7"}
    assert not any(todo.create.values())
    assert back.finish().complete()
    assert len([todo for todo in back.steps if todo]) == 1


@pytest.mark.parametrize(("amounts", "floor"), [((1, 0), 1), ((0, 1), 0), ((1, 1), 1)])
def test_a_pool_with_one_group_of_each_stage_moves(amounts: tuple[int, int], floor: int) -> None:
    pair = running((1, *amounts), (1, *amounts))
    lowest = 1
    while not pair.complete():
        pair.step()
        lowest = min(lowest, *(serving(pair.units, pair.bounds)[role] for role in ROLES))
        pair.happens()
    assert lowest == floor
    assert not pair.gave_up()


def test_without_surge_a_single_prefill_group_moves_with_a_gap_and_says_so() -> None:
    ran = running((1, 0, 1), (3, 0, 1)).finish()
    assert ran.complete()
    assert ran.gave_up() == {"floor"}


def test_groups_that_a_lost_node_holds_are_replaced_in_any_revision() -> None:
    lost = fleet((1, 1, 0), (2, 1, 0)).add("prefill", 1, NEW).add("decode", 1, NEW).add("decode", 1, NEW, LOST)
    todo = lost.step()
    assert todo.retire == ("g3",)
    assert todo.create["decode"] == 1, "within the budget"


def test_without_surge_a_lost_group_is_replaced_when_its_pods_do_not_count_any_more() -> None:
    lost = fleet((1, 0, 1), (1, 0, 1)).add("prefill", 1, NEW).add("decode", 1, NEW, LOST)
    assert lost.step().create["decode"] == 0
    lost.units[1] = dataclasses.replace(lost.units[1], holds=False)
    assert lost.step().create["decode"] == 1


def test_scaling_in_during_a_rollout_takes_the_old_ones() -> None:
    shrinking = fleet((1, 1, 0), (2, 1, 0)).add("prefill", 1).add("decode", 3)
    shrinking.add("prefill", 1, NEW).add("decode", 2, NEW)
    assert set(shrinking.step().retire) == {"g1", "g2", "g3", "g4"}


def test_scaling_in_takes_what_is_not_ready_first() -> None:
    shrinking = fleet((0, 1, 0), (1, 1, 0)).add("decode", 1, NEW, WAITING).add("decode", 1, NEW)
    assert shrinking.step().retire == ("g1",)


def test_a_new_pool_is_made_at_once() -> None:
    assert dict(fleet((8, 1, 0), (64, 0, 1)).step().create) == {"prefill": 8, "decode": 64}


def test_an_aggregated_pool_becomes_one_of_twins_without_a_gap() -> None:
    grown = fleet((2, 1, 0), (2, 1, 0)).add("decode", 2)
    lowest = 2
    while not grown.complete():
        grown.step()
        lowest = min(lowest, serving(grown.units, grown.bounds)["decode"])
        grown.happens()
    assert lowest == 2


def test_a_paused_rollout_keeps_revisions_and_follows_numbers() -> None:
    held = fleet((1, 1, 0), (3, 1, 0)).add("prefill", 1).add("decode", 2)
    held.paused = True
    todo = held.step()
    assert (todo.revision, dict(todo.create), todo.retire) == (NEW, {"prefill": 0, "decode": 1}, ())
    known = State(tuple(held.units[:3]), held.bounds, NEW, paused=True, known=frozenset({"old"}))
    assert step(known).revision == "old", "of the revision that most groups have"


def test_a_paused_rollout_scales_in_and_replaces_what_is_lost() -> None:
    held = fleet((1, 1, 0), (1, 1, 0)).add("prefill", 1).add("decode", 3).add("decode", 1, health=LOST)
    held.paused = True
    todo = held.step()
    assert set(todo.retire) == {"g5", "g3", "g4"}
    mixed = fleet((1, 1, 0), (1, 1, 0)).add("prefill", 1).add("decode", 1).add("decode", 1, NEW)
    mixed.paused = True
    assert not mixed.step(), "what a rollout had made before it was paused stays"


def test_percentages_round_up_for_surge_and_down_for_what_may_be_missing() -> None:
    assert [resolved("25%", count, up=True) for count in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [resolved("25%", count, up=False) for count in (0, 1, 4, 7)] == [0, 0, 1, 1]
    rollout = Rollout.model_validate({"maxSurge": "0%", "maxUnavailable": "10%", "decode": {"maxSurge": 2}})
    assert rollout.bounds("prefill", 5) == (0, 1), "what rounds to nothing moves nevertheless"
    assert rollout.bounds("decode", 5) == (2, 0)
