"""The ``parallelism`` and ``resources`` blocks of a role: how one replica is split over GPUs, and what one pod gets."""

from __future__ import annotations

from pydantic import Field

from twinpool.core.fields import ByteSize, CpuCores, Part


class Parallelism(Part):
    """How one model replica is split over GPUs."""

    tensor: int = Field(1, ge=1, le=64, description="GPUs that share every layer (tensor parallel).")
    pipeline: int = Field(1, ge=1, le=64, description="Stages that the layers are split into (pipeline parallel).")
    data: int = Field(
        1,
        ge=1,
        le=64,
        description="Copies of the layers behind one endpoint, each with its own KV cache (data parallel); they live "
        "and die together, so for a dense model more replicas are better.",
    )
    expert: bool = Field(
        False,
        description="Spread whole experts of a mixture over the tensor x data GPUs of a stage, instead of cutting each "
        "(expert parallel).",
    )


class Gpu(Part):
    """The accelerators of a node."""

    resource: str = Field(
        "nvidia.com/gpu",
        min_length=3,
        max_length=253,
        description="Name of the extended resource that stands for one GPU.",
    )
    per_node: int = Field(8, ge=0, le=64, description="GPUs of one node; 0 runs the engine on the CPU.")


class Resources(Part):
    """What one pod of the role gets. GPUs per pod follow from the parallelism."""

    gpu: Gpu = Field(default_factory=Gpu, description="Accelerators.")
    cpu: CpuCores | None = Field(None, description="CPU cores requested, as a string.")
    memory: ByteSize | None = Field(None, description="Memory requested, which is also the limit.")
    shm: ByteSize = Field("8Gi", description="Size of /dev/shm, over which tensor-parallel ranks talk.")
