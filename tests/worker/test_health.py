"""Whether a ready engine serves: every way to lose one by example, and by property that load is none of them."""

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.worker.logic import causes, health
from twinpool.worker.logic.causes import CAUSES, LASTING, cause_of
from twinpool.worker.logic.events import ProbeEnded, Seen
from twinpool.worker.logic.load import Work
from twinpool.worker.logic.machine import FindingName

STALL = 90.0


def seen(*ranks, ok=True, disk=""):
    """Return a look at ranks of (running, mark)."""
    work = tuple(Work(str(number), running, (running, mark)) for number, (running, mark) in enumerate(ranks))
    return Seen(1, ok, work, disk)


def watched(*looks, watch=None):
    """Apply (look or probe's end, time) pairs."""
    watch = watch or health.begin(0.0)
    for event, now in looks:
        looks = isinstance(event, Seen)
        watch = health.look(watch, event, now, STALL) if looks else health.answered(watch, event, now)
    return watch


def cause(watch, now):
    verdict = health.judge(watch, now, STALL)
    return verdict and verdict.cause


def steadily(look, start, end, watch=None):
    return watched(*((look, float(now)) for now in range(start, end + 1, 5)), watch=watch)


def test_a_rank_whose_requests_run_must_move():
    watch = steadily(seen((2, 7)), 5, 90)
    assert cause(watch, 94.0) is None
    assert cause(watch, 95.0) == "Stuck"
    assert cause(watched((seen((2, 8)), 95.0), watch=watch), 95.0) is None


def test_each_rank_must_move_for_itself():
    watch = health.begin(0.0)
    for now in range(5, 100, 5):
        watch = health.look(watch, seen((1, now), (1, 3)), float(now), STALL)
    verdict = health.judge(watch, 95.0, STALL)
    assert verdict is not None
    assert verdict.reason.endswith("(rank 1)")


def test_requests_that_only_wait_are_no_work_of_this_engine():
    """A decode worker waits for KV from a prefill worker that is lost: ending it would mend nothing."""
    watch = steadily(seen((0, 7)), 5, 500)
    assert cause(watch, 500.0) is None
    assert health.wants_probe(watch, 500.0, STALL)


def test_an_idle_engine_is_probed_and_a_busy_one_is_not():
    assert not health.wants_probe(health.begin(0.0), 1000.0, STALL), "without counters nobody knows whether it is idle"
    idle = watched((seen((0, 1)), 5.0))
    assert not health.wants_probe(idle, 29.9, STALL)
    assert health.wants_probe(idle, 30.0, STALL)
    assert not health.wants_probe(dataclasses.replace(idle, probe_since=20.0), 30.0, STALL)
    assert not health.wants_probe(watched((seen((1, 1)), 5.0)), 30.0, STALL)
    assert not health.wants_probe(watched((seen((0, 1)), 5.0), (seen((0, 2)), 20.0)), 30.0, STALL)
    failed = watched((ProbeEnded(1, False, "HTTP 500"), 31.0), watch=idle)
    assert health.wants_probe(failed, 36.0, STALL), "a failure is looked into soon"


def test_a_token_that_does_not_come_to_an_idle_engine():
    watch = dataclasses.replace(steadily(seen((0, 1)), 5, 30), probe_since=30.0)
    watch = steadily(seen((0, 1)), 35, 115, watch)
    assert cause(watch, 119.9) is None
    assert cause(watch, 120.0) == "Wedged"
    assert cause(watched((seen((0, 2)), 118.0), watch=watch), 120.0) is None, "others are served meanwhile"
    late = watched((ProbeEnded(1, False, "no answer", late=True), 121.0), watch=watch)
    assert (cause(late, 121.0), late.failed_probes) == (None, 0)


def test_errors_count_in_a_row_only():
    watch = watched((seen((0, 1)), 5.0))
    failed = (ProbeEnded(1, False, "HTTP 500: boom"), 6.0)
    assert cause(watched(failed, failed, watch=watch), 6.0) is None
    verdict = health.judge(watched(failed, failed, failed, watch=watch), 6.0, STALL)
    assert verdict == health.Verdict(
        "Failing", "3 requests for one token failed in a row, the last one: HTTP 500: boom"
    )
    assert cause(watched(failed, failed, (ProbeEnded(1, True), 6.0), failed, watch=watch), 6.0) is None
    assert cause(watched(failed, failed, (seen((0, 2)), 7.0), failed, watch=watch), 7.0) is None
    probing = dataclasses.replace(watched(failed, failed, watch=watch), probe_since=6.0)
    assert cause(watched((seen((0, 2)), 7.0), failed, watch=probing), 7.0) == "Failing"


@pytest.mark.parametrize(
    ("reason", "disk", "expected"),
    [
        ("HTTP 500: CUDA error: an illegal memory access was encountered", "", "DeviceError"),
        ("HTTP 500: [Errno 28] No space left on device", "", "DiskFull"),
        ("HTTP 500: boom", "/tmp has 0.0 MiB left", "DiskFull"),
        ("HTTP 500: boom", "", "Failing"),
    ],
)
def test_what_errors_speak_of_is_the_cause(reason, disk, expected):
    failed = (ProbeEnded(1, False, reason), 6.0)
    watch = watched((seen((0, 1), disk=disk), 5.0), failed, failed, failed)
    assert cause(watch, 6.0) == expected
    assert watch.warnings == ((disk,) if disk else ())


def test_abort_with_status_200_is_believed_at_once():
    assert cause(watched((ProbeEnded(1, False, "abort", aborted=True), 6.0)), 6.0) == "Aborting"


def test_what_the_http_server_says_of_itself_is_believed_when_it_is_bad():
    dead = (seen((0, 1), ok=False), 5.0)
    assert cause(watched(dead), 5.0) is None
    assert cause(watched(dead, dead), 5.0) == "EngineDead"
    assert cause(watched(dead, (seen((0, 1)), 6.0), dead), 6.0) is None


def test_a_server_that_does_not_answer():
    silent = Seen(1, None)
    watch = steadily(silent, 5, 85)
    assert cause(watch, 89.9) is None
    assert cause(watch, 90.0) == "Silent"
    assert cause(watched((seen((1, 2), ok=None), 89.0), watch=watch), 90.0) is None, "its counters came"


def test_an_engine_without_counters_is_judged_by_its_word_and_says_so():
    watch = steadily(seen(), 5, 500)
    assert cause(watch, 500.0) is None
    assert "prints no counters" in watch.warnings[0]
    assert not health.begin(0.0).warnings


def test_a_launcher_that_was_frozen_blames_nobody():
    watch = dataclasses.replace(steadily(seen((1, 7)), 5, 10), probe_since=6.0)
    watch = watched((seen((1, 7)), 1000.0), watch=watch)
    assert cause(watch, 1000.0) is None
    assert cause(steadily(seen((1, 7)), 1005, 1090, watch), 1090.0) == "Stuck"
    assert cause(watched((Seen(1, None), 1000.0), watch=steadily(seen((0, 1)), 5, 10)), 1000.0) is None


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 64), st.booleans(), st.booleans()), max_size=80))
def test_load_never_loses_an_engine(script):
    """Whatever runs, however late or badly probes end under load: counters that move within the limit are enough."""
    watch, now = health.begin(0.0), 0.0
    for step, (pause, running, late, fails) in enumerate(script):
        now += pause
        watch = health.look(watch, seen((running, step)), now, STALL)
        if fails and watch.failed_probes < health.FAILED_PROBES - 1:
            watch = health.answered(watch, ProbeEnded(1, False, "HTTP 503: queue full", late=late), now)
        assert cause(watch, now) is None


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 5.0, 44.0]), st.integers(0, 2), st.integers(0, 2)), max_size=60),
    st.integers(0, 2),
)
def test_an_engine_that_stands_still_is_always_lost(script, mark):
    watch, now = health.begin(0.0), 0.0
    for pause, running, moved in script:
        now += pause
        watch = health.look(watch, seen((running, moved)), now, STALL)
    since = now
    while cause(watch, now) is None:
        assert now - since < 2.2 * STALL
        now += 5.0
        watch = health.look(watch, seen((1, 9)), now, STALL)
    assert cause(watch, now) == "Stuck"


def test_the_guide_names_every_cause():
    guide = (Path(__file__).parents[2] / "docs" / "worker-health.md").read_text()
    parts = guide.split("## Before the engine")
    causes_told, findings_told = (
        {line.split("`")[1] for line in part.splitlines() if line.startswith("| `")} for part in parts
    )
    assert causes_told == CAUSES.keys()
    assert findings_told == set(get_args(FindingName))


def test_every_cause_is_explained_and_every_pattern_has_an_example():
    assert set(causes._PATTERNS) <= CAUSES.keys()
    assert set(CAUSES) >= LASTING
    examples = {
        "torch.OutOfMemoryError: CUDA out of memory": "OutOfMemory",
        "the engine was killed (SIGKILL), most often for want of memory": "OutOfMemory",
        "the engine was ended by SIGSEGV": "Killed",
        "RuntimeError: NCCL error: unhandled system error": "DeviceError",
        "NVMLError_GpuIsLost: GPU is lost": "DeviceLost",
        "OSError: [Errno 28] No space left on device: '/dev/shm/x'": "DiskFull",
        "ValueError: no": "Crashed",
    }
    assert {text: cause_of(text) for text in examples} == examples
    assert set(examples.values()) == {*causes._PATTERNS, "Crashed"}
