"""Whether an engine is busy, read from the metrics it prints."""

import pytest

from twinpool.worker.logic import load

IDLE = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a} b"} 0.0
vllm:num_requests_waiting{engine="0",model_name="a"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="a"} 0.0
"""


@pytest.mark.parametrize(
    ("text", "busy"),
    [
        (IDLE, False),
        (IDLE.replace('"a} b"} 0.0', '"a} b"} 2.0'), True),
        (IDLE + 'vllm:num_requests_waiting{engine="1"} 1\n', True),
        ("vllm:num_requests_running 3\n", True),
        ("vllm:num_requests_running NaN\nvllm:num_requests_waiting{ \n", None),
        ("vllm:num_requests_running many", None),
        ("", None),
    ],
)
def test_busy(text, busy):
    assert load.busy(text) is busy


def test_work_is_told_by_rank_and_any_step_changes_it():
    (one,) = load.work(IDLE)
    assert (one.engine, one.running) == ("0", 0.0)
    assert load.work(IDLE.replace('perc{engine="0",model_name="a"} 0.0', 'perc{engine="0"} 0.1')) != (one,)
    two = load.work(IDLE + 'vllm:num_requests_running{model_name="a",engine="1"} 2\nvllm:generation_tokens_total 7\n')
    assert [(rank.engine, rank.running) for rank in two] == [("0", 0.0), ("1", 2.0)]
    assert two[0] != one, "a series without the label is rank 0"
    assert load.work("http_requests_total 3\n") == ()
    assert load.work(IDLE + "http_requests_total 3\n") == (one,), "what the HTTP server counts is no work"


def test_kv_held():
    assert not load.kv_held(IDLE)
    assert load.kv_held('vllm:kv_cache_usage_perc{engine="0"} 0.0215')
    assert not load.kv_held("")
