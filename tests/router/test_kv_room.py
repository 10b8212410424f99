import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.router.logic.kv_room import kv_tokens

LINE = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="1000",x="{\'a\': 1}"} 1.0'


def test_room_is_blocks_times_their_size() -> None:
    assert kv_tokens(f"# TYPE vllm:cache_config_info gauge\n{LINE}\nvllm:num_requests_running 0.0\n") == 16000


def test_data_parallel_engines_each_tell_the_blocks_of_all() -> None:
    second = LINE.replace('engine="0"', 'engine="1"')
    assert kv_tokens(f"{LINE}\n{second}\n") == 16000


@pytest.mark.parametrize(
    "text",
    [
        "",
        "vllm:num_requests_running 0.0\n",
        LINE.replace('"1000"', '"None"'),
        LINE.replace('block_size="16",', ""),
        LINE.replace('"1000"', '"99999999999999"'),
        LINE.replace('"1000"', '"\u0661"'),
    ],
)
def test_what_is_not_said_or_not_to_be_believed_is_not_known(text: str) -> None:
    assert kv_tokens(text) == 0


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    assert 0 <= kv_tokens(f"vllm:cache_config_info{{{text}}} 1") <= 10**12
