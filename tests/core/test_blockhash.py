"""Names of KV blocks: equal to vLLM's, and chained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.core.blockhash import ROOT, chain, following, short

#: One id for each length of CBOR's integers.
TOKENS = [0, 1, 23, 24, 255, 256, 65535, 65536, 151935, 2**32 - 1, 7, 8, 9, 10, 11, 12]


def test_names_are_those_of_vllm() -> None:
    # By vllm.utils.hashing.sha256_cbor of vLLM 0.32 over (parent, tokens, extra), beginning with that of "0".
    assert ROOT.hex() == "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e"
    assert chain([*TOKENS, *TOKENS], 16, 9) == [1009268261897099879, 8853165754798732255]
    assert chain(TOKENS, 16, 9, "team-a") == [1509625261404028280]
    # By vllm.v1.core.kv_cache_utils.hash_block_tokens with the keys that its _gen_lora_extra_hash_keys gives.
    adapter, twice = ("sql", "/models/adapters/sql"), [*TOKENS, *TOKENS]
    assert chain(twice, 16, 9, adapter=adapter) == [8675963024342596877, 7431980310130911426]
    assert chain(twice, 16, 9, "team-a", adapter) == [10047341352390017756, 16927479838267211033]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 8), st.integers(0, 6))
def test_a_chain_names_full_blocks_each_with_all_before_it(tokens: list[int], size: int, most: int) -> None:
    names = chain(tokens, size, most)
    assert len(names) == min(len(tokens) // size, most)
    assert chain(tokens[:-1], size, most) == names[: min((len(tokens) - 1) // size, most) if tokens else 0]
    assert not names or names[0] == short(following(ROOT, tokens[:size]))
    assert not names or chain([tokens[0] + 1, *tokens[1:]], size, most)[-1] != names[-1]


@pytest.mark.parametrize("token", [-1, 2**64])
def test_what_is_no_token_id_has_no_name(token: int) -> None:
    with pytest.raises(ValueError, match="is no token id"):
        chain([token], 1, 1)
