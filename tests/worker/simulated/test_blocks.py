"""The block pool: events mirror the cache exactly, and eviction follows vLLM's order."""

from hypothesis import given
from hypothesis import strategies as st

from twinpool.worker.engines.simulated.logic.blocks import BlockPool, Cleared, Removed, Stored


def mirror(events, known):
    """Apply events as a router's index would."""
    for event in events:
        match event:
            case Stored():
                assert not known & set(event.hashes), "stored twice"
                known |= set(event.hashes)
            case Removed():
                known.remove(event.hash)
            case Cleared():
                known.clear()
    return known


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=40))
def test_events_tell_exactly_what_is_cached(uses):
    pool, known = BlockPool(6), set()
    for prefix, length in uses:
        hashes = [prefix * 100 + depth for depth in range(length)]
        cached = pool.cached(hashes)
        if not pool.fits(cached, length - len(cached)):
            continue
        pool.hold(cached)
        blocks = cached + pool.take(length - len(cached))
        pool.store(blocks, hashes, None, tuple(range(length * 4)))
        pool.drop(blocks)
        known = mirror(pool.drained(), known)
        assert set(pool.cached(hashes)) == set(blocks)
        assert pool.free == 6
    assert pool.clear()
    assert mirror(pool.drained(), known) == set()


def test_the_last_block_of_a_prompt_goes_first():
    pool = BlockPool(2)
    blocks = pool.take(2)
    pool.store(blocks, [10, 11], None, (1, 2, 3, 4))
    pool.drop(blocks)
    pool.take(1)
    assert pool.drained() == [Stored((10, 11), None, (1, 2, 3, 4)), Removed(11)]


def test_a_shared_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.store(blocks, [10], None, (1,))
    pool.hold(blocks)
    pool.drop(blocks)
    assert pool.free == 1
    assert not pool.clear()
    assert pool.fits(blocks, 1)
    pool.drop(blocks)
    assert not pool.fits(blocks, 2)
    assert pool.free == 2


def test_blocks_that_do_not_follow_each_other_are_stored_apart():
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.store([first], [10], None, (1,))
    pool.store([second], [20], None, (2,))
    assert pool.drained() == [Stored((10,), None, (1,)), Stored((20,), None, (2,))]
