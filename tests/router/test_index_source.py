"""Whether an engine's KV events can be relied on: names, block size, answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from twinpool.core.blockhash import chain
from twinpool.router.logic.index_events import Event
from twinpool.router.logic.index_source import _SAMPLED, _SURE, Source, common_size

TOKENS = [5, 6, 7, 8]


def root(names: list[int] | None = None, **changes: Any) -> Event:
    tokens = msgspec.Raw(msgspec.msgpack.encode(changes.pop("tokens", TOKENS)))
    found = chain(TOKENS, 4, 1) if names is None else names
    return Event("BlockStored", list(found), "GPU", token_ids=tokens, **{"block_size": 4, **changes})


def test_an_engine_whose_names_are_right_is_relied_on_while_it_answers() -> None:
    source = Source()
    assert "does not answer" in source.trouble(0)
    source.answers = True
    assert not source.trouble(16), "it has nothing yet"
    source.check((root(), Event("BlockRemoved", [1]), root(names=[3], group_idx=1)))
    source.check((root(names=[9, 10], parent_block_hash=8), root(names=[9], lora_id=2)))
    assert (source.right, source.wrong, source.size) == (1, 0, 4)
    assert not source.trouble(4)
    assert source.trouble(16) == "its blocks have 4 tokens, those of most engines 16"


@pytest.mark.parametrize(
    "event",
    [
        root(names=[1]),
        root(names=[]),
        root(tokens=[5, 6, 7, 9]),
        root(tokens=[-1, 6, 7, 8]),
        root(tokens="none"),
        root(block_size=0),
        root(extra_keys=[["salt"]]),
    ],
)
def test_another_name_is_found_out(event: Event) -> None:
    source = Source(answers=True)
    source.check((event,))
    assert (source.right, source.wrong) == (0, 1)
    assert "names blocks in another way" in source.trouble(4)


def test_salts_are_part_of_names_and_what_cannot_be_computed_is_not_judged() -> None:
    source = Source()
    source.check((root(chain(TOKENS, 4, 1, "team"), extra_keys=[["team"], None]), root(extra_keys=[])))
    assert (source.right, source.wrong) == (2, 0)
    source.check(
        (root([1], extra_keys=[[["image", 0]]]), root([1], extra_keys=[["a", "b"]]), root([1], extra_keys=[7]))
    )
    assert (source.right, source.wrong) == (2, 0)


def test_checks_become_rare() -> None:
    source = Source()
    source.check((root(),) * (_SURE + 3 * _SAMPLED))
    assert source.right == _SURE + 3


def test_the_block_size_of_most_counts() -> None:
    assert common_size([]) == common_size([Source()]) == 0
    assert common_size([Source(size=32), Source(size=16), Source(size=32), Source()]) == 32
    assert common_size([Source(size=32), Source(size=16)]) == 16
