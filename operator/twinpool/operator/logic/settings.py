"""What the operator itself was told: images of pods that name none, the cluster's network, what it may read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from twinpool.core.pod_defaults import PodDefaults
from twinpool.core.topology import AUTO, Topology, preset

#: The vLLM release whose flags, metrics and handoff protocol Twinpool was built against.
VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"

#: Whether the API server has NVIDIA's ComputeDomains, and the operator may make them.
ComputeDomains = Literal["Served", "NotServed", "NotAllowed"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Default images of the pods that the operator makes, and what placement needs to know."""

    worker_image: str = "twinpool/worker:dev"
    router_image: str = "twinpool/router:dev"
    vllm_image: str = VLLM_IMAGE
    topology: Topology = field(default_factory=lambda: preset(AUTO))
    #: Whether nodes and pods of the whole cluster may be read, without which no node can be chosen.
    sees_nodes: bool = False
    compute_domains: ComputeDomains = "NotServed"
    #: Version of the operator, which launchers compare with their own.
    version: str = ""
    #: What pods of every pool get unless the pool says otherwise.
    pods: PodDefaults = field(default_factory=PodDefaults)
