"""The renderers of a pool: pods of the engine's image without GPUs that turn texts and chats into token ids.

Always true: their pods carry the revision that the pool asks for, and routers ask them only while every worker is of
that revision, since two revisions need not agree on a tokenizer. They hold no state and no rights, and a pool serves
without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.resources import Parallelism
from twinpool.core.units import parse_duration
from twinpool.operator.logic import names, weights
from twinpool.operator.logic.conditions import Statement
from twinpool.operator.logic.failures import first_failure
from twinpool.operator.logic.merge import merge
from twinpool.operator.logic.pod_defaults import with_defaults
from twinpool.operator.logic.pods import LAUNCHER_VOLUME, RESTRICTED, enforced, environment, inject_container, probe
from twinpool.operator.logic.worker_objects import headless_service

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Child, Observed
    from twinpool.operator.logic.settings import Settings

Body = dict[str, Any]

RENDERER = protocol.RENDERER_ROLE
#: Seconds between two looks at a renderer that starts.
_STARTUP_PERIOD = 5
#: A render takes milliseconds, so what runs is done soon after SIGTERM.
_GRACE_SECONDS = 15


def wanted(pool: InferencePool) -> int:
    """Return how many renderer pods the pool is to have."""
    renderer = pool.spec.routing.renderer
    return renderer.replicas if renderer else 0


def renderer_objects(pool: InferencePool, settings: Settings, revision: str) -> list[Body]:
    """Return the Service and the Deployment of the pool's renderers; nothing for a pool without any."""
    if not wanted(pool):
        return []
    return [headless_service(pool, RENDERER), _deployment(pool, settings, revision)]


def left_over(pool: InferencePool, children: Mapping[tuple[str, str], Child]) -> list[Child]:
    """Return the objects of renderers that the pool no longer has."""
    if wanted(pool):
        return []
    found = (children.get((kind, names.child_name(pool, RENDERER))) for kind in ("Deployment", "Service"))
    return [child for child in found if child is not None and not child.deleting]


def statement(observed: Observed, live: Iterable[Group], revision: str) -> list[Statement]:
    """Return whether prompts can be rendered, and why not; nothing for a pool without renderers."""
    count = wanted(observed.pool)
    if not count:
        return []
    pods = [pod for pod in observed.pods if pod.role == RENDERER and pod.deadline is None]
    ready = sum(pod.ready for pod in pods)
    if distrusting := _distrusting(observed):
        what = f"{distrusting} saw engines read other tokens than the renderer's; prompts are estimated"
        how = "give engine.args that change the tokenizer or the chat template to the whole pool"
        return [Statement("Rendering", "False", "OtherTokens", f"{what}; {how}")]
    if ready and any(group.revision != revision for group in live):
        return [
            Statement("Rendering", "Unknown", "Rollout", "prompts are estimated until all workers are of one revision")
        ]
    if ready:
        return [Statement("Rendering", "True", "Serving", f"{ready} of {count} renderer pods are ready")]
    if failed := first_failure(pods):
        return [Statement("Rendering", "False", failed.reason, f"{failed.message}; prompts are estimated meanwhile")]
    return [
        Statement("Rendering", "False", "RendererNotReady", "no renderer pod is ready; prompts are estimated meanwhile")
    ]


def _distrusting(observed: Observed) -> str:
    """Return the first router that found the renderers to be wrong, empty when none did."""
    reports = observed.reports or {}
    return next((name for name in sorted(reports) if (report := reports[name]) and report.distrusts), "")


def _deployment(pool: InferencePool, settings: Settings, revision: str) -> Body:
    name = names.child_name(pool, RENDERER)
    labels = {**names.labels(pool, RENDERER), protocol.LABEL_REVISION: revision}
    spec = {
        "replicas": wanted(pool),
        "selector": {"matchLabels": names.selector(pool, RENDERER)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": _template(pool, settings, labels),
    }
    metadata = names.metadata(pool, name, RENDERER)
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}


def _template(pool: InferencePool, settings: Settings, labels: Mapping[str, str]) -> Body:
    engine, renderer = pool.spec.engine, pool.spec.routing.renderer
    assert renderer is not None
    ours: Body = {
        "metadata": {"labels": dict(labels)},
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Always",
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": _GRACE_SECONDS,
            "initContainers": [inject_container(settings)],
            "containers": [_container(pool, settings)],
            "volumes": [{"name": LAUNCHER_VOLUME, "emptyDir": {}}, *weights.volumes(pool)],
            "imagePullSecrets": [{"name": secret.name} for secret in engine.image_pull_secrets],
        },
    }
    # It runs where routers do, and fetches from where engines do.
    defaults = settings.pods.router.model_copy(update={"env": settings.pods.worker.env})
    filled = with_defaults(ours, settings.pods, defaults, RENDERER)
    return enforced(merge(filled, renderer.pod_template), ours)


def _container(pool: InferencePool, settings: Settings) -> Body:
    engine, role = pool.spec.engine, pool.spec.decode
    renderer = pool.spec.routing.renderer
    assert renderer is not None
    default = settings.vllm_image if engine.kind == "vllm" else settings.worker_image
    # One process on one node, whatever the workers are.
    alone = role.model_copy(update={"parallelism": Parallelism(), "kv_cache": None, "expert_balancing": None})
    return {
        "name": RENDERER,
        "image": role.engine.image or engine.image or default,
        "command": [engine.python, protocol.LAUNCHER_ZIPAPP, "render"],
        "env": environment(pool, "decode", alone, settings.version),
        "ports": [{"name": protocol.ENGINE_PORT_NAME, "containerPort": protocol.ENGINE_PORT, "protocol": "TCP"}],
        "startupProbe": probe(
            "/health",
            protocol.ENGINE_PORT_NAME,
            _STARTUP_PERIOD,
            int(parse_duration(role.startup_timeout)) // _STARTUP_PERIOD + 1,
        ),
        "readinessProbe": probe("/health", protocol.ENGINE_PORT_NAME, 2, 1),
        "livenessProbe": probe("/health", protocol.ENGINE_PORT_NAME, 10, 6),
        "resources": {
            "requests": {"cpu": renderer.resources.cpu, "memory": renderer.resources.memory},
            "limits": {"memory": renderer.resources.memory},
        },
        "securityContext": RESTRICTED,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": LAUNCHER_VOLUME, "mountPath": protocol.INJECT_DIRECTORY, "readOnly": True},
            *weights.mounts(pool),
        ],
    }
