"""The revision of a pool: a hash over exactly what changes its worker pods.

Prefill and decode share one revision, since a pair hands its KV cache over only when both run the same engine and
model. Replicas, routing and the order of keys do not change it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.operator.logic.drift import digest

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Characters of a revision: short in ``kubectl get``, and 40 bits are far more than a pool's history needs.
LENGTH = 10


def revision(templates: Mapping[str, Any]) -> str:
    """Return the revision of the pod templates by role, which carry no revision yet."""
    return digest(dict(templates))[:LENGTH]
