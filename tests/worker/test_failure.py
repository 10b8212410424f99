"""Why an engine ended, found in what vLLM 0.32 really printed (``samples/``)."""

import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.worker.logic import failure

SAMPLES = Path(__file__).parent / "samples"


@pytest.mark.parametrize(
    ("sample", "code", "cause", "advice"),
    [
        ("model_absent", 1, "'/models/absent'", "check model.source"),
        ("unknown_flag", 2, "unrecognized arguments: --no-such-flag 3", "correct engine.args"),
        ("kv_memory", 1, "is less than requested memory for kv (838.19 GiB)", "lower --kv-cache-memory-bytes"),
        ("port_taken", 1, "OSError: [Errno 98] Address already in use", "another process has the port"),
        ("max_model_len", 1, "User-specified max_model_len (100000000) is greater", "lower model.maxModelLen"),
        ("weights_broken", 1, "SafetensorError: Error while deserializing header", "fetch them again"),
    ],
)
def test_real_failures_name_the_cause_and_what_to_do(sample, code, cause, advice):
    lines = (SAMPLES / f"{sample}.txt").read_text(encoding="utf-8").splitlines()
    reason = failure.failure_reason(lines[-400:], code)
    assert cause in reason
    assert advice in reason
    assert f"exit code {code}" in reason
    assert "See root cause" not in reason
    assert len(reason) <= failure.MAX_REASON


@pytest.mark.parametrize("code", [-9, 137])
def test_a_kill_points_at_memory(code):
    assert "raise resources.memory" in failure.failure_reason(["loading"], code)


@pytest.mark.parametrize(
    ("code", "text"),
    [(-11, "SIGSEGV"), (139, "SIGSEGV"), (-4, "SIGILL"), (-10, "signal 10"), (3, "exit code 3"), (0, "exit code 0")],
)
def test_without_a_cause_the_way_it_ended_is_said(code, text):
    assert text in failure.failure_reason([], code)


def test_only_generic_lines_are_better_than_nothing():
    lines = ["RuntimeError: Engine core initialization failed. See root cause above.", "EngineDeadError: gone"]
    assert failure.failure_reason(lines, 1).startswith("EngineDeadError")


def test_an_unknown_cause_has_no_advice():
    assert failure.failure_reason(["ValueError: odd"], 1) == "ValueError: odd (the engine ended with exit code 1)"


def test_clean_drops_colours_prefixes_and_control_characters():
    line = "\x1b[31m(EngineCore_DP0 pid=12) ERROR 11-30 10:49:13 [core.py:1510] KeyError: 'a\x00b'\x1b[0m  "
    assert failure.clean(line) == "KeyError: 'a b'"


def test_termination_message_keeps_the_newest_lines_without_code():
    lines = [
        "old " + "x" * 3000,
        *(f"line {i} " + "y" * 200 for i in range(12)),
        "",
        '  File "a.py", line 3',
        "    ^^^^",
    ]
    message = failure.termination_message("it broke", lines)
    assert message.startswith("it broke\nlast lines of the engine:\n")
    assert "line 11" in message
    assert "old" not in message
    assert "a.py" not in message
    assert len(message.encode()) <= failure.MAX_TERMINATION_MESSAGE


def test_termination_message_without_lines_is_the_reason():
    assert failure.termination_message("it broke", []) == "it broke"


@given(st.lists(st.text(alphabet=string.printable + "é\x1b日", max_size=400), max_size=40), st.integers(-64, 255))
def test_any_output_gives_a_bounded_printable_reason(lines, code):
    reason = failure.failure_reason(lines, code)
    assert 0 < len(reason) <= failure.MAX_REASON
    assert reason.isprintable()
    assert len(failure.termination_message(reason, lines).encode()) <= failure.MAX_TERMINATION_MESSAGE
