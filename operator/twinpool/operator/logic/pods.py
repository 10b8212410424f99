"""The pod template of a worker: the engine's container with our launcher as its first process.

What a user's ``podTemplate`` says is merged last, by the merge keys of Kubernetes. Identity labels, the launcher's
command, the ports that others dial, probes and gates stay ours: a pod without them would not be a worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.core.expert_balancing import ExpertBalancing
from twinpool.core.protocol import WorkerConfig
from twinpool.core.units import parse_duration
from twinpool.operator.logic import kv_tiers, names, weights
from twinpool.operator.logic.merge import merge
from twinpool.operator.logic.pod_defaults import with_defaults
from twinpool.operator.logic.timing import worker_grace

if TYPE_CHECKING:
    from twinpool.core.spec import InferencePool, WorkerRole
    from twinpool.operator.logic.settings import Settings

Template = dict[str, Any]

_PORTS = {protocol.ENGINE_PORT_NAME: protocol.ENGINE_PORT, protocol.LAUNCHER_PORT_NAME: protocol.LAUNCHER_PORT}
_EVENT_PORTS = {
    protocol.KV_EVENTS_PORT_NAME: protocol.KV_EVENTS_PORT,
    protocol.KV_REPLAY_PORT_NAME: protocol.KV_REPLAY_PORT,
}
#: The volume into which the launcher is copied.
LAUNCHER_VOLUME = "twinpool"
_POD_VOLUME = "twinpool-pod"
#: What containers may not do.
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_DOWNWARD_ENV = {
    "POD_IP": "status.podIP",
    "POD_NAME": "metadata.name",
    "POD_UID": "metadata.uid",
    "POD_NAMESPACE": "metadata.namespace",
}


def worker_template(pool: InferencePool, name: str, role: WorkerRole, settings: Settings) -> Template:
    """Return the pod template of a role, without what a group and a revision add (:func:`with_revision`)."""
    ours = _base(pool, name, role, settings)
    filled = with_defaults(ours, settings.pods, settings.pods.worker, protocol.ENGINE_CONTAINER)
    return enforced(merge(filled, role.pod_template), ours)


def with_revision(template: Template, revision: str) -> Template:
    """Return the template as the pods of ``revision`` have it: in their labels and in the launcher's settings."""
    spec = template["spec"]
    containers = [
        {**container, "env": [_revised(entry, revision) for entry in container["env"]]}
        if container.get("name") == protocol.ENGINE_CONTAINER
        else container
        for container in spec["containers"]
    ]
    labelled = merge(template["metadata"], {"labels": {protocol.LABEL_REVISION: revision}})
    return {"metadata": labelled, "spec": {**spec, "containers": containers}}


def _revised(entry: Mapping[str, Any], revision: str) -> Mapping[str, Any]:
    if entry.get("name") != protocol.WORKER_CONFIG_ENV:
        return entry
    config = dataclasses.replace(WorkerConfig.from_json(entry["value"]), revision=revision)
    return {**entry, "value": config.to_json()}


def worker_config(pool: InferencePool, name: str, role: WorkerRole, version: str = "") -> WorkerConfig:
    """Return what the launcher is told; the revision is filled in by :func:`with_revision`."""
    model, engine, drafting = pool.spec.model, pool.spec.engine, pool.spec.speculation
    tokens = role.speculation.tokens if role.speculation else "auto"
    disaggregated = pool.spec.prefill is not None
    tiers, balancing = kv_tiers.tiers(role), role.expert_balancing or ExpertBalancing()
    store = tiers.store
    return WorkerConfig(
        pool=pool.metadata.name,
        namespace=pool.metadata.namespace,
        role="aggregated" if not disaggregated else "prefill" if name == "prefill" else "decode",
        revision="",
        engine=engine.kind,
        model=model.name,
        model_path=weights.model_path(pool),
        python=engine.python,
        preflight=engine.preflight,
        kv_events=engine.kv_events,
        tracing_url=pool.spec.tracing.url if pool.spec.tracing else "",
        model_revision=model.revision,
        model_checksum=model.checksum,
        max_model_len=model.max_model_len,
        tensor=role.parallelism.tensor,
        pipeline=role.parallelism.pipeline,
        data=role.parallelism.data,
        expert=role.parallelism.expert,
        nodes=role.nodes,
        gpus=gpus(pool, role),
        connector=pool.spec.handoff.connector if disaggregated else None,
        args=engine.args + role.engine.args,
        startup_timeout=parse_duration(role.startup_timeout),
        drain_timeout=parse_duration(role.drain_timeout),
        speculation=drafting.method if drafting else None,
        draft_model=drafting.model if drafting else None,
        draft_tokens=0 if not drafting or tokens == "auto" else tokens,
        host_kv_bytes=tiers.bytes("host"),
        disk_kv_bytes=tiers.bytes("disk"),
        shared_kv_bytes=tiers.bytes("shared"),
        kv_store=store.kind if store else None,
        kv_store_address=store.address if store else "",
        kv_store_bytes=kv_tiers.store_bytes(role),
        kv_store_metadata=(store.metadata or "") if store else "",
        kv_store_protocol=store.protocol if store else "rdma",
        plain_kv=any(kv_tiers.plain(each) for each in names.roles(pool).values()),
        expert_balancing=role.expert_balancing is not None,
        redundant_experts=balancing.redundant_experts,
        expert_interval=balancing.interval,
        expert_window=balancing.window,
        operator_version=version,
        adapters=tuple(f"{item.name}={place(item.source)}" for item in model.adapters),
    )


def gpus(pool: InferencePool, role: WorkerRole) -> int:
    """Return the GPUs of one pod; none on the CPU, and none for the simulated engine."""
    on_cpu = role.resources.gpu.per_node == 0 or pool.spec.engine.kind == "simulated"
    return 0 if on_cpu else role.ranks // role.nodes


def nodes_of(template: Mapping[str, Any]) -> int:
    """Return how many pods a group of this template has; 1 when the template is no longer one of ours."""
    found = protocol.launcher_settings(template)
    return found.nodes if found else 1


def place(source: str) -> str:
    """Return what the engine loads an adapter from: an id of the Hugging Face hub or a path in the container."""
    return source.partition("://")[2]


def _base(pool: InferencePool, name: str, role: WorkerRole, settings: Settings) -> Template:
    engine, scheduling = pool.spec.engine, role.scheduling
    spec: Template = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "readinessGates": [{"conditionType": protocol.ROUTABLE_GATE}],
        "terminationGracePeriodSeconds": worker_grace(role),
        "initContainers": [inject_container(settings)],
        "containers": [_engine_container(pool, name, role, settings)],
        "volumes": _volumes(pool, role),
    }
    optional = {
        "serviceAccountName": role.service_account_name,
        "nodeSelector": dict(scheduling.node_selector),
        "tolerations": [item.model_dump(by_alias=True, exclude_none=True) for item in scheduling.tolerations],
        "priorityClassName": scheduling.priority_class_name,
        "schedulerName": scheduling.scheduler_name,
        "runtimeClassName": scheduling.runtime_class_name,
        "imagePullSecrets": [{"name": secret.name} for secret in engine.image_pull_secrets],
    }
    spec.update({key: value for key, value in optional.items() if value})
    return {"metadata": _metadata(pool, name), "spec": spec}


def _metadata(pool: InferencePool, name: str) -> Template:
    """Return the pods' metadata; a restart that somebody asked for is in it, so that it makes other pods."""
    labels = {"labels": names.labels(pool, name)}
    restart = pool.metadata.annotations.get(protocol.ANNOTATION_RESTART)
    return {**labels, "annotations": {protocol.ANNOTATION_RESTART: restart}} if restart else labels


def inject_container(settings: Settings) -> Template:
    """Return the init container that copies the launcher into the pod."""
    return {
        "name": protocol.INJECT_CONTAINER,
        "image": settings.worker_image,
        "command": ["twinpool-worker", "inject", protocol.INJECT_DIRECTORY],
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": LAUNCHER_VOLUME, "mountPath": protocol.INJECT_DIRECTORY}],
    }


def _engine_container(pool: InferencePool, name: str, role: WorkerRole, settings: Settings) -> Template:
    default = settings.vllm_image if pool.spec.engine.kind == "vllm" else settings.worker_image
    return {
        "name": protocol.ENGINE_CONTAINER,
        "image": role.engine.image or pool.spec.engine.image or default,
        "command": [pool.spec.engine.python, protocol.LAUNCHER_ZIPAPP, "run"],
        "env": environment(pool, name, role, settings.version),
        "ports": [
            {"name": port, "containerPort": number, "protocol": "TCP"}
            for port, number in (_PORTS | _EVENT_PORTS if pool.spec.engine.kv_events else _PORTS).items()
        ],
        "readinessProbe": probe("/readyz", protocol.LAUNCHER_PORT_NAME, period=1, failures=1),
        "livenessProbe": probe("/healthz", protocol.LAUNCHER_PORT_NAME, period=10, failures=6),
        "resources": _resources(pool, role),
        "securityContext": RESTRICTED,
        "terminationMessagePath": "/dev/termination-log",
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": LAUNCHER_VOLUME, "mountPath": protocol.INJECT_DIRECTORY, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - the container's own shared memory
            *weights.mounts(pool),
            *([{"name": _POD_VOLUME, "mountPath": protocol.POD_INFO_DIRECTORY}] if role.nodes > 1 else []),
            *kv_tiers.mounts(role),
        ],
    }


def probe(path: str, port: str, period: int, failures: int) -> Template:
    """Return a probe over HTTP at the port of this name, each ``period`` seconds."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def environment(pool: InferencePool, name: str, role: WorkerRole, version: str) -> list[Template]:
    """Return the variables of the engine's container: what the launcher is told, who the pod is, and the user's."""
    told = worker_config(pool, name, role, version).to_json()
    env = [{"name": protocol.WORKER_CONFIG_ENV, "value": told}, *downward_env()]
    if role.nodes > 1:
        rank = {"fieldPath": f"metadata.labels['{protocol.LABEL_POD_INDEX}']"}
        env.append({"name": protocol.NODE_RANK_ENV, "valueFrom": {"fieldRef": rank}})
    if pool.spec.model.secret_ref is not None:
        secret = {"name": pool.spec.model.secret_ref.name, "key": "HF_TOKEN"}
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": secret}})
    given = [*pool.spec.engine.env, *role.engine.env]
    by_name = {entry.name: entry.model_dump(by_alias=True, exclude_none=True) for entry in given}
    env += weights.environment(pool, by_name)
    ours = {entry["name"] for entry in env}
    return env + [entry for key, entry in by_name.items() if key not in ours]


def downward_env(wanted: tuple[str, ...] = tuple(_DOWNWARD_ENV)) -> list[Template]:
    """Return the variables that tell a pod who it is."""
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": _DOWNWARD_ENV[name]}}} for name in wanted]


def _resources(pool: InferencePool, role: WorkerRole) -> Template:
    resources, count = role.resources, gpus(pool, role)
    requests, limits = kv_tiers.resources(role)
    if resources.cpu:
        requests["cpu"] = resources.cpu
    if count:
        limits[resources.gpu.resource] = str(count)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(pool: InferencePool, role: WorkerRole) -> list[Template]:
    volumes: list[Template] = [
        {"name": LAUNCHER_VOLUME, "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": kv_tiers.shm(role)}},
    ]
    volumes += weights.volumes(pool)
    if role.nodes > 1:
        leader = {"fieldPath": f"metadata.annotations['{protocol.ANNOTATION_LEADER}']"}
        item = {"path": PurePosixPath(protocol.LEADER_FILE).name, "fieldRef": leader}
        volumes.append({"name": _POD_VOLUME, "downwardAPI": {"items": [item]}})
    return volumes + kv_tiers.volumes(role)


#: Fields of the pod that a podTemplate cannot change: gates, and what must agree with the times of launcher and router.
_OURS = ("schedulingGates", "readinessGates", "restartPolicy", "terminationGracePeriodSeconds")


def enforced(merged: Template, ours: Template) -> Template:
    """Return the merged template with the parts that must stay ours put back."""
    given = merged["spec"] if isinstance(merged.get("spec"), Mapping) else {}
    base = ours["spec"]
    free = {key: value for key, value in given.items() if key not in _OURS}
    spec = {**base, **free}
    spec["containers"] = _enforced_containers(spec["containers"], base["containers"])
    if "initContainers" in base:
        spec["initContainers"] = _enforced_containers(spec["initContainers"], base["initContainers"])
    if "volumes" in base:
        own = {entry["name"] for entry in base["volumes"]}
        others = [entry for entry in _entries(spec["volumes"]) if entry.get("name") not in own]
        spec["volumes"] = [*base["volumes"], *others]
    return {"metadata": _enforced_metadata(merged.get("metadata"), ours["metadata"]), "spec": spec}


def _enforced_metadata(given: Any, ours: Template) -> Template:
    metadata = given if isinstance(given, Mapping) else {}
    kept = {key: metadata[key] for key in ("annotations", "labels") if isinstance(metadata.get(key), Mapping)}
    return merge(kept, ours)


def _entries(value: Any) -> list[Template]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _enforced_containers(given: Any, ours: list[Template]) -> list[Template]:
    """Put our containers first, each with what must stay, and keep the others as they are."""
    by_name = {container["name"]: container for container in ours}
    entries = _entries(given)
    found = {entry["name"]: entry for entry in entries if entry.get("name") in by_name}
    fixed = [_enforced_container(found.get(name, base), base) for name, base in by_name.items()]
    return fixed + [entry for entry in entries if entry.get("name") not in by_name]


#: Fields of our containers that a podTemplate cannot change.
_LOCKED = (
    "command",
    "startupProbe",
    "readinessProbe",
    "livenessProbe",
    "terminationMessagePath",
    "terminationMessagePolicy",
)
#: Fields of our containers that a podTemplate cannot add, unless they have them.
_ABSENT = ("args", "startupProbe", "restartPolicy")


def _enforced_container(given: Template, ours: Template) -> Template:
    container = {key: value for key, value in given.items() if key not in (*_LOCKED, *_ABSENT)}
    container.update({key: ours[key] for key in _LOCKED if key in ours})
    for field, key in (("ports", "containerPort"), ("volumeMounts", "mountPath"), ("env", "name")):
        own = ours.get(field, [])
        if not own:
            continue
        taken = {entry[key] for entry in own} | ({entry["name"] for entry in own} if field == "ports" else set())
        locked = [entry for entry in own if field != "env" or _managed(entry["name"])]
        others = [entry for entry in _entries(container.get(field)) if _free(field, entry, key, taken)]
        container[field] = [*locked, *others]
    return container


def _managed(variable: str) -> bool:
    return variable in protocol.MANAGED_ENV or variable.startswith("TWINPOOL_")


def _free(field: str, entry: Template, key: str, taken: set[Any]) -> bool:
    """Return whether an entry of a user's list may stand beside ours."""
    if field == "env":
        return not _managed(str(entry.get("name")))
    return entry.get(key) not in taken and (field != "ports" or entry.get("name") not in taken)
