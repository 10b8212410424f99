"""What caches have been good for lately."""

from __future__ import annotations

from twinpool.router.logic.warmth import HALF_LIFE, Warmth


def test_what_was_served_adds_up_and_fades() -> None:
    warmth = Warmth()
    warmth.add("a", 100, 0.0)
    warmth.add("a", 100, HALF_LIFE)
    warmth.add("b", 0, 0.0)
    assert warmth.tokens(HALF_LIFE) == {"a": 150}, "a cache that served nothing is not named"
    assert warmth.tokens(2 * HALF_LIFE) == {"a": 75}
    assert warmth.tokens(100 * HALF_LIFE) == {"a": 0}


def test_workers_that_are_gone_are_forgotten() -> None:
    warmth = Warmth()
    warmth.add("a", 100, 0.0)
    warmth.add("b", 50, 0.0)
    warmth.keep({"b"})
    assert warmth.tokens(0.0) == {"b": 50}
