"""The data sheets against each other: what vendors print of whole machines is what their GPUs have together."""

import pytest

from twinpool.core.accelerators import ACCELERATORS
from twinpool.core.timing import free_batch


@pytest.mark.parametrize(
    ("name", "gpus", "fp8_sparse", "memory", "bandwidth", "links"),
    [
        # Printed of the machine: PFLOP/s of FP8 with sparsity, bytes, bytes/s of memory, bytes/s of links both ways.
        ("h100", 8, 32e15, 640e9, 26.8e12, 7.2e12),  # DGX H100
        ("h200", 8, 32e15, 1128e9, 38.4e12, 7.2e12),  # DGX H200
        ("b200", 8, 72e15, 1440e9, 64e12, 14.4e12),  # DGX B200
        ("gb200", 72, 720e15, 13.4e12, 576e12, 130e12),  # GB200 NVL72
        ("mi300x", 8, 41.8e15, 1.5e12, 42.4e12, 7.168e12),  # MI300X platform
    ],
)
def test_the_gpus_of_a_machine_have_what_is_printed_of_it(name, gpus, fp8_sparse, memory, bandwidth, links):
    gpu = ACCELERATORS[name]
    assert gpus * gpu.fp8 * 2 == pytest.approx(fp8_sparse, rel=0.02)
    assert gpus * gpu.memory == pytest.approx(memory, rel=0.03)
    assert gpus * gpu.bandwidth == pytest.approx(bandwidth, rel=0.01)
    assert gpus * gpu.inside * 2 == pytest.approx(links, rel=0.01)


@pytest.mark.parametrize(
    ("name", "tokens"),
    # FLOP/s over bytes/s for two-byte weights, worked out from the sheets: Hopper's known 295, H200's 206.
    [("a100", 153), ("h100", 295), ("h200", 206), ("b200", 281), ("l4", 403), ("l40s", 419), ("mi300x", 247)],
)
def test_the_batch_at_which_weights_stop_being_free(name, tokens):
    assert free_batch(ACCELERATORS[name]) == pytest.approx(tokens, abs=1)


def test_one_byte_weights_double_arithmetic_only_where_there_is_fp8():
    assert ACCELERATORS["h100"].peak(1) == 1979e12
    assert ACCELERATORS["h100"].peak(2) == 989e12
    assert ACCELERATORS["a100"].peak(1) == ACCELERATORS["a100"].peak(2) == 312e12
    ratios = [gpu.fp8 / gpu.flops for gpu in ACCELERATORS.values() if gpu.fp8]
    assert ratios == pytest.approx([2.0] * len(ratios), rel=0.02)


def test_a_socket_has_the_arithmetic_of_its_cores():
    assert ACCELERATORS["cpu"].flops == pytest.approx(114.7e12, rel=0.001)
    assert ACCELERATORS["cpu"].bandwidth == pytest.approx(307.2e9)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_figure_is_there_and_has_a_source(name):
    gpu = ACCELERATORS[name]
    assert gpu.name == name
    assert min(gpu.flops, gpu.bandwidth, gpu.memory, gpu.inside, gpu.across) > 0
    assert gpu.across <= gpu.inside
    assert gpu.source.startswith("https://")
