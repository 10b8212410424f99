"""The router of a pool: its Deployment, its Service, and the right to watch the pods of its namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.protocol import RouterConfig
from twinpool.core.units import parse_cpu, parse_duration
from twinpool.operator.logic import names
from twinpool.operator.logic.engine_limits import adapter_slots, sequences
from twinpool.operator.logic.merge import merge
from twinpool.operator.logic.pod_defaults import with_defaults
from twinpool.operator.logic.pods import downward_env, enforced, place, probe
from twinpool.operator.logic.renderer_objects import wanted as renderers
from twinpool.operator.logic.timing import router_drain, router_grace

if TYPE_CHECKING:
    from twinpool.core.spec import InferencePool
    from twinpool.operator.logic.settings import Settings

Body = dict[str, Any]

#: An unprivileged user without an entry in any image.
_USER = 65532
_HTTPS_PORT = 443


def router_objects(pool: InferencePool, settings: Settings, last_serial: int) -> list[Body]:
    """Return the objects of the router, those first that others need."""
    return [
        _object(pool, "v1", "ServiceAccount", {"automountServiceAccountToken": False}),
        _role(pool),
        _role_binding(pool),
        _service(pool, last_serial),
        _deployment(pool, settings),
    ]


def router_config(pool: InferencePool) -> RouterConfig:
    """Return what the routers are told."""
    disaggregated = pool.spec.prefill is not None
    queue, ttft = pool.spec.routing.queue, pool.spec.objectives.ttft
    return RouterConfig(
        pool=pool.metadata.name,
        namespace=pool.metadata.namespace,
        models=(pool.spec.model.name, *pool.spec.model.aliases),
        adapters=tuple(adapter.name for adapter in pool.spec.model.adapters),
        adapter_sources=tuple(place(adapter.source) for adapter in pool.spec.model.adapters),
        adapter_slots=adapter_slots(pool),
        renders=renderers(pool) > 0,
        disaggregated=disaggregated,
        connector=pool.spec.handoff.connector if disaggregated else None,
        on_prefill_failure=pool.spec.handoff.on_prefill_failure,
        policy=pool.spec.routing.policy,
        conditional=pool.spec.handoff.conditional,
        continuation=pool.spec.routing.continuation,
        drain_timeout=float(router_drain(pool)),
        queue_concurrency=queue.concurrency,
        sequences=(sequences(pool) or 0) * pool.spec.decode.parallelism.data,
        queue_max=queue.max,
        queue_timeout=parse_duration(queue.timeout),
        queue_hold=parse_duration(queue.hold) if queue.hold else 0.0,
        queue_priorities=queue.priorities,
        ttft=None if ttft is None else parse_duration(ttft),
        processes=max(1, int(parse_cpu(pool.spec.routing.resources.cpu))),
        access_log=pool.spec.routing.access_log.percent / 100,
        auth=pool.spec.routing.auth is not None,
        **_key_limits(pool),
        tls=pool.spec.routing.tls is not None,
        tracing_url=pool.spec.tracing.url if pool.spec.tracing else "",
        tracing_sampling=pool.spec.tracing.sampling if pool.spec.tracing else 0.0,
    )


def _key_limits(pool: InferencePool) -> dict[str, int]:
    if pool.spec.routing.auth is None:
        return {}
    limit = pool.spec.routing.auth.limit
    return {"key_requests": limit.requests_per_minute or 0, "key_tokens": limit.tokens_per_minute or 0}


def endpoint(pool: InferencePool) -> str:
    """Return the pool's URL inside the cluster."""
    port = pool.spec.routing.service.port
    scheme, usual = ("http", protocol.SERVICE_PORT) if pool.spec.routing.tls is None else ("https", _HTTPS_PORT)
    suffix = "" if port == usual else f":{port}"
    return f"{scheme}://{names.child_name(pool, names.ROUTER)}.{pool.metadata.namespace}.svc{suffix}"


def _object(pool: InferencePool, api_version: str, kind: str, content: Body) -> Body:
    name = names.child_name(pool, names.ROUTER)
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": names.metadata(pool, name, names.ROUTER),
        **content,
    }


def _role(pool: InferencePool) -> Body:
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    return _object(pool, "rbac.authorization.k8s.io/v1", "Role", {"rules": rules})


def _role_binding(pool: InferencePool) -> Body:
    name = names.child_name(pool, names.ROUTER)
    content = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": pool.metadata.namespace}],
    }
    return _object(pool, "rbac.authorization.k8s.io/v1", "RoleBinding", content)


def _service(pool: InferencePool, last_serial: int) -> Body:
    service = pool.spec.routing.service
    port = {
        "name": protocol.ROUTER_PORT_NAME,
        "port": service.port,
        "targetPort": protocol.ROUTER_PORT_NAME,
        "protocol": "TCP",
    }
    spec = {"type": service.type, "selector": names.selector(pool, names.ROUTER), "ports": [port]}
    annotations = {**service.annotations, names.LAST_SERIAL_ANNOTATION: str(last_serial)}
    return merge(_object(pool, "v1", "Service", {"spec": spec}), {"metadata": {"annotations": annotations}})


def _deployment(pool: InferencePool, settings: Settings) -> Body:
    ours = {
        "metadata": {"labels": names.labels(pool, names.ROUTER)},
        "spec": {
            "automountServiceAccountToken": True,
            "containers": [_container(pool, settings)],
            "enableServiceLinks": False,
            "imagePullSecrets": [{"name": secret.name} for secret in pool.spec.engine.image_pull_secrets],
            "restartPolicy": "Always",
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _USER,
                "runAsGroup": _USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "serviceAccountName": names.child_name(pool, names.ROUTER),
            "terminationGracePeriodSeconds": router_grace(pool),
            **({"volumes": volumes} if (volumes := _volumes(pool)) else {}),
        },
    }
    filled = with_defaults(ours, settings.pods, settings.pods.router, protocol.ROUTER_CONTAINER)
    template = enforced(merge(filled, pool.spec.routing.pod_template), ours)
    spec = {
        "replicas": pool.spec.routing.replicas,
        "selector": {"matchLabels": names.selector(pool, names.ROUTER)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": template,
    }
    return _object(pool, "apps/v1", "Deployment", {"spec": spec})


def _secrets(pool: InferencePool) -> list[tuple[str, str, str]]:
    """Return name of the volume, name of the Secret and where it is mounted."""
    routing = pool.spec.routing
    wanted = (
        ("keys", routing.auth, protocol.ROUTER_KEYS_DIRECTORY),
        ("tls", routing.tls, protocol.ROUTER_TLS_DIRECTORY),
    )
    return [(name, block.secret_ref.name, path) for name, block, path in wanted if block is not None]


def _volumes(pool: InferencePool) -> list[Body]:
    return [{"name": name, "secret": {"secretName": secret}} for name, secret, _ in _secrets(pool)]


def _container(pool: InferencePool, settings: Settings) -> Body:
    resources = pool.spec.routing.resources
    mounts = [{"name": name, "mountPath": path, "readOnly": True} for name, _, path in _secrets(pool)]
    return {
        "name": protocol.ROUTER_CONTAINER,
        "image": settings.router_image,
        "command": ["twinpool-router"],
        "env": [
            {"name": protocol.ROUTER_CONFIG_ENV, "value": router_config(pool).to_json()},
            *downward_env(("POD_IP", "POD_NAME", "POD_NAMESPACE")),
        ],
        "ports": [
            {"name": protocol.ROUTER_PORT_NAME, "containerPort": protocol.ROUTER_PORT, "protocol": "TCP"},
            {"name": protocol.ROUTER_ADMIN_PORT_NAME, "containerPort": protocol.ROUTER_ADMIN_PORT, "protocol": "TCP"},
        ],
        "readinessProbe": probe("/ready", protocol.ROUTER_ADMIN_PORT_NAME, period=1, failures=1),
        "livenessProbe": probe("/health", protocol.ROUTER_ADMIN_PORT_NAME, period=10, failures=6),
        "resources": {
            "requests": {"cpu": resources.cpu, "memory": resources.memory},
            "limits": {"memory": resources.memory},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **({"volumeMounts": mounts} if mounts else {}),
    }
