"""Slow links of a pool: what is said of those that its groups run over, and what is remembered for groups that come.

A group that is replaced takes its note with it, so flagged links stand in the pool's status for a day, or until a
later measurement between the same nodes finds them as they should be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.operator.logic.interconnect import measures, noted
from twinpool.operator.logic.observed import seconds, timestamp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.interconnect import Link, Note
    from twinpool.operator.logic.placement.model import SlowLinks

#: Seconds for which a link that nobody measures again is avoided, and how many are remembered.
REMEMBERED, MOST = 86_400.0, 16

Entry = dict[str, Any]
#: Status, reason and message of a condition.
Said = tuple[str, str, str]


def remembered(pool: InferencePool, groups: Iterable[Group], now: float) -> list[Entry]:
    """Return ``status.slowLinks``: those of the groups that are there, and earlier ones that nothing contradicts."""
    notes = [note for group in groups if (note := noted(group)) is not None]
    found: dict[frozenset[str], Entry] = {}
    for item in pool.status.slow_links or ():
        at = seconds(item.since) or 0.0
        if now - at < REMEMBERED and not any(_clears(note, set(item.nodes), at) for note in notes):
            found[frozenset(item.nodes)] = item.model_dump(by_alias=True, mode="json")
    for note in sorted(notes, key=lambda note: note.at):
        # The worst of a pair comes first and stays.
        found |= {frozenset(link.nodes): _entry(link, note) for link in reversed(note.slow)}
    newest = sorted(found.values(), key=lambda entry: (entry["since"], entry["nodes"]), reverse=True)[:MOST]
    return sorted(newest, key=lambda entry: list(entry["nodes"]))


def _clears(note: Note, nodes: set[str], at: float) -> bool:
    """Return whether a later preflight measured all links between these nodes (one alone tells of its own GPUs)."""
    return note.outcome == "passed" and note.at > at and nodes <= set(note.nodes) and (len(nodes) == 2 or note.inside)


def _entry(link: Link, note: Note) -> Entry:
    return {
        "nodes": sorted(set(link.nodes)),
        "level": link.level,
        "measured": link.measured,
        "promised": link.promised,
        "since": timestamp(note.at),
    }


def known(pools: Iterable[InferencePool]) -> SlowLinks:
    """Return the links that new groups of any pool avoid."""
    return frozenset(frozenset(item.nodes) for pool in pools for item in pool.status.slow_links or ())


def verified(groups: Sequence[Group]) -> Said | None:
    """Return what the condition ``InterconnectVerified`` says; None for a pool without links that are measured."""
    measured = [(group, noted(group)) for group in groups if measures(group)]
    if not measured:
        return None
    slow = [(group, link) for group, note in measured if note for link in note.slow]
    if slow:
        group, link = min(slow, key=lambda item: item[1].share)
        more = f" ({len(slow) - 1} more slow links)" if len(slow) > 1 else ""
        help_ = "look at cables and adapters there, or tell the operator what the level carries (--links)"
        return "False", "SlowLink", f"group {group.name}: {link.words}{more} - {help_}"
    for group, note in measured:
        if note is None:
            return "Unknown", "NotMeasured", f"the links of group {group.name} have not been measured yet"
        if note.outcome != "passed":
            why = note.problem or "see /preflight of its leader's launcher"
            return "Unknown", f"Preflight{note.outcome.capitalize()}", f"group {group.name}: {why}"
    worst = min((note.worst for _, note in measured if note and note.worst), key=lambda link: link.share, default=None)
    if worst is None or not worst.promised:
        text = f"the slowest link carries {worst.words}" if worst else "no link was measured"
        return "Unknown", "NothingPromised", f"{text}; without reading nodes the operator cannot know their level"
    return "True", "AsPromised", f"the worst link of {len(measured)} groups carries {worst.words}"
