"""What data sheets promise of each kind of accelerator: arithmetic, memory, links. Peaks; what is reached is a share.

One table for planner, simulator and advice, so that they cannot disagree about the hardware. All figures are per GPU,
dense (vendors print twice as much "with sparsity") and, for links, in one direction (vendors add up both).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One kind of GPU.

    Parameters
    ----------
    flops:
        Dense bfloat16 FLOP/s of the data sheet.
    bandwidth:
        Bytes/s of its memory.
    flops_share, bandwidth_share:
        What an engine reaches of the two (MFU and MBU).
    overhead:
        Seconds that every step costs regardless of its size (scheduling, launches).
    memory:
        Bytes of its memory; 0 when that does not matter.
    fp8:
        Dense FP8 FLOP/s; 0 where the hardware has no FP8.
    inside, across:
        Bytes/s to GPUs of the same node or NVLink domain, and over its share of the node's network adapters; 0 unknown.
    domain:
        GPUs of an NVLink domain that is larger than a node; 0: a node is all of it.
    source:
        Where the figures are published.
    """

    name: str
    flops: float
    bandwidth: float
    flops_share: float = 0.5
    bandwidth_share: float = 0.6
    overhead: float = 0.001
    memory: float = 0.0
    fp8: float = 0.0
    inside: float = 0.0
    across: float = 0.0
    domain: int = 0
    source: str = ""

    def peak(self, weight_bytes: float) -> float:
        """Return the FLOP/s for weights of that size: one-byte weights use FP8 where the hardware has it."""
        return self.fp8 if weight_bytes == 1 and self.fp8 else self.flops


#: By name. Links: NVLink counts half of the printed total; PCIe 4.0 x16 is 32 GB/s in one direction; a 400 Gbit/s
#: adapter is 50 GB/s. The network is that of the system named beside it; other machines have other adapters.
ACCELERATORS: dict[str, Accelerator] = {
    gpu.name: gpu
    for gpu in (
        # SXM, 80 GB. Network: DGX A100, one 200 Gbit/s ConnectX-6 for each GPU.
        Accelerator(
            "a100",
            flops=312e12,
            bandwidth=2.039e12,
            memory=80e9,
            inside=300e9,
            across=25e9,
            source="https://www.nvidia.com/en-us/data-center/a100/ https://www.nvidia.com/en-us/data-center/dgx-a100/",
        ),
        # SXM. Network: DGX H100, one 400 Gbit/s ConnectX-7 for each GPU.
        Accelerator(
            "h100",
            flops=989e12,
            bandwidth=3.35e12,
            memory=80e9,
            fp8=1979e12,
            inside=450e9,
            across=50e9,
            source="https://www.nvidia.com/en-us/data-center/h100/ https://www.nvidia.com/en-us/data-center/dgx-h100/",
        ),
        # SXM. Network: DGX H200, as DGX H100.
        Accelerator(
            "h200",
            flops=989e12,
            bandwidth=4.8e12,
            memory=141e9,
            fp8=1979e12,
            inside=450e9,
            across=50e9,
            source="https://www.nvidia.com/en-us/data-center/h200/ https://www.nvidia.com/en-us/data-center/dgx-h200/",
        ),
        # An eighth of a DGX B200: 1,440 GB, 64 TB/s, 72 PFLOP/s of FP8 with sparsity; 400 Gbit/s for each GPU.
        Accelerator(
            "b200",
            flops=2250e12,
            bandwidth=8e12,
            memory=180e9,
            fp8=4500e12,
            inside=900e9,
            across=50e9,
            source="https://www.nvidia.com/en-us/data-center/dgx-b200/ https://www.nvidia.com/en-us/data-center/hgx/",
        ),
        # Half a superchip: 372 GB, 16 TB/s, 20 PFLOP/s of FP8 with sparsity; `inside` is the whole rack.
        Accelerator(
            "gb200",
            flops=2500e12,
            bandwidth=8e12,
            memory=186e9,
            fp8=5000e12,
            inside=900e9,
            across=50e9,
            domain=72,
            source="https://www.nvidia.com/en-us/data-center/gb200-nvl72/",
        ),
        # PCIe 4.0. Network: an eighth of an EC2 g6.48xlarge's 100 Gbit/s.
        Accelerator(
            "l4",
            flops=121e12,
            bandwidth=300e9,
            memory=24e9,
            fp8=242.5e12,
            inside=32e9,
            across=1.5625e9,
            source="https://www.nvidia.com/en-us/data-center/l4/ https://aws.amazon.com/ec2/instance-types/g6/",
        ),
        # PCIe 4.0. Network: an eighth of an EC2 g6e.48xlarge's 400 Gbit/s.
        Accelerator(
            "l40s",
            flops=362e12,
            bandwidth=864e9,
            memory=48e9,
            fp8=733e12,
            inside=32e9,
            across=6.25e9,
            source="https://www.nvidia.com/en-us/data-center/l40s/ https://aws.amazon.com/ec2/instance-types/g6e/",
        ),
        # Seven Infinity Fabric links of 64 GB/s, one to each other GPU. Network: Azure ND MI300X v5, 400 Gbit/s each.
        Accelerator(
            "mi300x",
            flops=1307.4e12,
            bandwidth=5.3e12,
            memory=192e9,
            fp8=2614.9e12,
            inside=448e9,
            across=50e9,
            source="https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html "
            "https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/nd-mi300x-v5-series",
        ),
        # One Xeon Platinum 8480+: 56 cores at 2.0 GHz with AMX (1,024 bfloat16 operations per cycle and core), eight
        # channels of DDR5-4800, four UPI links of 16 GT/s at two bytes. Memory (eight modules of 64 GB) and network
        # (100 Gbit/s) are a usual machine's: no data sheet fixes them.
        Accelerator(
            "cpu",
            flops=56 * 2.0e9 * 1024,
            bandwidth=8 * 38.4e9,
            memory=512e9,
            inside=128e9,
            across=12.5e9,
            source="https://www.intel.com/content/www/us/en/products/sku/231746/specifications.html "
            "https://www.intel.com/content/www/us/en/products/docs/accelerator-engines/advanced-matrix-extensions/"
            "overview.html",
        ),
    )
}
