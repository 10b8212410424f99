"""How many tokens' KV an engine can hold, by what its metrics say of its cache. Pure."""

from __future__ import annotations

import re

#: vLLM's settings of the KV cache as labels; one series for each data parallel engine, all with the blocks of all.
KV_CACHE = "vllm:cache_config_info"
_INFO = re.compile(rf"^{KV_CACHE}\{{([^\n]*)\}} ", re.MULTILINE)
_MOST = 10**12


def kv_tokens(metrics: str) -> int:
    """Return the tokens that the KV cache of an engine has room for, 0 where its ``/metrics`` do not say it.

    With several data parallel engines vLLM (0.32) writes the sum of their blocks into each series. For models that mix
    kinds of attention a block is that of the scheduler, and the product an estimate.
    """
    found = _INFO.search(metrics)
    if found is None:
        return 0
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found[1]))
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    if not (blocks.isascii() and blocks.isdigit() and size.isascii() and size.isdigit()):
        return 0
    room = int(blocks[:15]) * int(size[:15])
    return room if room <= _MOST else 0
