"""The churn soak, short: the long one is ``make soak``."""

from __future__ import annotations

import os

from bench.router.soak import Outcome, memory_mib, soak


def test_a_short_soak() -> None:
    outcome = soak(5.0)
    assert outcome.answered > 100
    assert outcome.left > 10
    assert outcome.failed == 0
    assert outcome.in_flight == 0
    assert outcome.late_mib < outcome.early_mib + 20, "five seconds show a leak of every request's body, no smaller one"


def test_what_passes() -> None:
    assert Outcome(answered=1, early_mib=50, late_mib=56).passed
    assert not Outcome(answered=1, early_mib=50, late_mib=57).passed
    assert not Outcome(answered=0, early_mib=50, late_mib=50).passed
    assert not Outcome(answered=1, failed=1, early_mib=50, late_mib=50).passed
    assert not Outcome(answered=1, in_flight=1, early_mib=50, late_mib=50).passed


def test_memory_of_a_process_tree() -> None:
    assert 5 < memory_mib(os.getpid()) < 2000
    assert memory_mib(2**22 + 1) == 0
