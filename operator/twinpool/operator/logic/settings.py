"""What the operator itself was told: which images it puts into pods that do not name one."""

from __future__ import annotations

from dataclasses import dataclass

#: The vLLM release whose flags, metrics and handoff protocol Twinpool was built against.
VLLM_IMAGE = "vllm/vllm-openai:v0.32.0"


@dataclass(frozen=True, slots=True)
class Settings:
    """Default images of the pods that the operator makes."""

    worker_image: str = "twinpool/worker:dev"
    router_image: str = "twinpool/router:dev"
    vllm_image: str = VLLM_IMAGE
