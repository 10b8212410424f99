"""Which of the pinned packages are installed for a choice of torch builds."""

from __future__ import annotations

import re

#: With torch's CPU builds nothing links CUDA but NIXL's plugins, which find these two.
_KEPT_ON_CPU = ("nvidia-cuda-runtime", "nvidia-cuda-cupti")
_CUDA = re.compile(r"^(nvidia-[a-z0-9-]+|cuda-toolkit)==")


def select(pinned: str, backend: str) -> str:
    """Return the lines of a pinned requirements file to install; only the backend ``cpu`` leaves any out."""
    if backend != "cpu":
        return pinned
    return "".join(
        line for line in pinned.splitlines(keepends=True) if not _CUDA.match(line) or line.startswith(_KEPT_ON_CPU)
    )


def explain(output: str) -> tuple[str, str]:
    """Turn what uv printed when it failed into a problem and a remedy."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    problem = next((line for line in lines if line.lower().startswith("error")), lines[-1] if lines else "no output")
    text = output.lower()
    if "no space left" in text or "os error 28" in text:
        return "the disk is full", "free some space, or set TWINPOOL_CACHE and UV_CACHE_DIR to folders with room"
    if any(sign in text for sign in ("dns error", "failed to fetch", "connection", "timed out", "network")):
        return (
            f"the package index cannot be reached: {problem}",
            "let this machine reach PyPI, or name a mirror with UV_DEFAULT_INDEX, and run it again",
        )
    if "no matching distribution" in text or "no wheels" in text or "no solution found" in text:
        return problem, "run it on Linux x86-64 or arm64 with glibc 2.28 or newer and Python 3.11 to 3.14"
    return problem, "run it again; when it fails the same way, remove the uv cache with 'uv cache clean'"
