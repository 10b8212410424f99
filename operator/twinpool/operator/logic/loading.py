"""How far the weights of starting groups are: what their launchers say, in the pool's status and in words.

A download of a hundred gigabytes looks like an engine that hangs to whoever sees only pods that are not ready.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinpool.core.protocol import launcher_settings
from twinpool.core.status import MAX_LOADING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed, PodView

#: Parts of the whole that are news.
_STEPS = 20
#: What launchers say is done, and what that is called.
_STAGES = {"waiting": "waits for weights", "downloading": "downloads weights", "checking": "checks weights"}


@dataclass(frozen=True, slots=True)
class Weights:
    """What a launcher says of its model's files, in bytes."""

    stage: str
    done: int = 0
    total: int = 0

    @property
    def step(self) -> tuple[str, int]:
        """Return what is worth telling again when it changes."""
        return self.stage, _STEPS * self.done // max(1, self.total)


def read_weights(document: Any) -> Weights | None:
    """Return what a launcher's ``/status`` says of weights; None when it says nothing."""
    found = document.get("weights") if isinstance(document, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    done, total = (value if isinstance(value, int) and value > 0 else 0 for value in map(found.get, ("bytes", "total")))
    return Weights(str(found.get("stage"))[:32], done, total)


def to_ask(groups: Iterable[Group]) -> list[PodView]:
    """Return the pods whose launchers are asked: they run, never served, and have weights fetched or checked."""
    return [pod for group in groups if not group.retired and _loads(group) for pod in group.pods if _starts(pod)]


def _loads(group: Group) -> bool:
    config = launcher_settings(group.child.content.get("spec", {}).get("template", {}))
    if config is None or config.engine != "vllm":
        return False
    places = (config.model_path, config.draft_model, *config.adapter_paths)
    from_hub = [path for path in places if path and not path.startswith("/")]
    return bool(from_hub) or config.model_checksum is not None


def _starts(pod: PodView) -> bool:
    here = pod.phase == "Running" and bool(pod.address) and pod.deadline is None
    return here and not pod.has_served and not pod.containers_ready


def loading(observed: Observed, groups: Iterable[Group]) -> list[dict[str, Any]]:
    """Return what the status says: of each group the pod that has most to do, the slowest groups first."""
    found: dict[str, Weights] = {}
    for group in groups:
        told = [weights for pod in group.pods if _starts(pod) and (weights := observed.weights.get(pod.uid))]
        busy = [weights for weights in told if weights.stage in _STAGES]
        if busy and not group.retired:
            found[group.name] = max(busy, key=lambda weights: weights.total - weights.done)
    slowest = sorted(found.items(), key=lambda item: (item[1].done - item[1].total, item[0]))[:MAX_LOADING]
    return [
        {"group": name, "stage": weights.stage, "bytes": weights.done, "total": weights.total}
        for name, weights in slowest
    ]


def words(found: list[dict[str, Any]]) -> str:
    """Return what to say of the slowest group, empty when none loads; gigabytes are 10^9 bytes."""
    if not found:
        return ""
    first, more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    share = f": {first['bytes'] / 1e9:.1f} of {first['total'] / 1e9:.1f} GB" if first["total"] else ""
    return f"group {first['group']} {_STAGES[first['stage']]}{share}{more}"
