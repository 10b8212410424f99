"""What the parts say to each other: names on Kubernetes objects, ports, and the settings handed to a pod.

Operator, router and worker never import each other; whatever two of them must agree on is here. Standard library
only, because the worker's launcher runs inside images that hold nothing of ours.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from twinpool.core.errors import InvalidValue
from twinpool.core.managed import MANAGED_ENV as MANAGED_ENV
from twinpool.core.managed import MANAGED_FLAGS as MANAGED_FLAGS
from twinpool.core.managed import managed_flag as managed_flag
from twinpool.core.managed import managed_flag_pattern as managed_flag_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP = "serving.twinpool.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferencePool"
PLURAL = "inferencepools"
SHORT_NAME = "tpool"

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "twinpool"
LABEL_POOL = f"{GROUP}/pool"
ROUTER_ROLE = "router"
RENDERER_ROLE = "renderer"
#: ``prefill``, ``decode``, ``router`` or ``renderer``. The workers of an aggregated pool are ``decode``.
LABEL_ROLE = f"{GROUP}/role"
#: Name of the serving group (its StatefulSet).
LABEL_GROUP = f"{GROUP}/group"
LABEL_REVISION = f"{GROUP}/revision"
#: Readiness gate of every worker pod and type of the condition that opens it: the routers list the pod's group.
ROUTABLE_GATE = f"{GROUP}/routable"
#: Scheduling gate of a worker pod whose node the operator chooses: kube-scheduler does not look at it before.
PLACEMENT_GATE = f"{GROUP}/placement"
#: On a worker pod that the operator takes out of service: until when its work may run (RFC 3339). Routers choose it no
#: more.
ANNOTATION_DRAINING = f"{GROUP}/draining"
#: On the pods of a group: the leader of the current epoch, as JSON with ``address``, ``uid`` and ``epoch``.
ANNOTATION_LEADER = f"{GROUP}/leader"
#: On the pod of a group's leader: where its node is in the network (:mod:`twinpool.core.distance`).
ANNOTATION_PLACE = f"{GROUP}/place"
#: On a pool: a value that is part of the revision, so that a new one restarts every worker in a rollout.
ANNOTATION_RESTART = f"{GROUP}/restart"
#: Set by Kubernetes on the pods of a StatefulSet: the ordinal, which is the node rank inside the group.
LABEL_POD_INDEX = "apps.kubernetes.io/pod-index"

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")
#: Whom routers dial: workers, and those that turn texts into token ids.
EndpointRole = Literal["prefill", "decode", "renderer"]
#: How routers choose a worker, and whether they hand a request over that could be.
Policy = Literal["least-load", "round-robin", "random", "prefix", "price"]
Conditional = Literal["always", "auto", "never"]

#: Ways to draft tokens that a step then checks (vLLM's ``SpeculativeMethod``).
SpeculationMethod = Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"]

#: Stores of KV blocks beside a pool.
KvStoreKind = Literal["lmcache", "mooncake"]

#: What becomes of a request whose prompt no prefill worker could read.
OnPrefillFailure = Literal["retry-then-local", "local", "fail"]

#: The engine's OpenAI-compatible HTTP port on every leader. Each pod has its own address, so one number serves all.
ENGINE_PORT = 8000
#: The launcher's port: ``/healthz``, ``/readyz``, ``/status``, ``/metrics``.
LAUNCHER_PORT = 8090
#: Where the ranks of a group that spans nodes meet: a port of the leader.
MASTER_PORT = 29501
#: Where the data-parallel ranks of a group that spans nodes meet: a port of the leader.
DATA_PARALLEL_PORT = 29521
#: Where the ranks of a preflight meet: a port of the leader, free again before the engine starts.
PREFLIGHT_PORT = 29511
#: NIXL's side channel (handshake); data-parallel rank r uses the port + r (vLLM's rule).
NIXL_SIDE_CHANNEL_PORT = 5600
#: KV events (ZMQ PUB) and their replay (ZMQ ROUTER); data-parallel rank r uses the port + r (vLLM's rule).
KV_EVENTS_PORT = 5557
KV_REPLAY_PORT = 5577
#: The router's port for clients, and the one for ``/metrics``, ``/ready`` and ``/admin/*`` that no client reaches.
ROUTER_PORT = 8000
ROUTER_ADMIN_PORT = 8081
#: The port of the pool's Service.
SERVICE_PORT = 80

#: Names of container ports, by which others find them.
ENGINE_PORT_NAME = "engine"
#: Only on workers whose engines publish KV events.
KV_EVENTS_PORT_NAME = "kv-events"
KV_REPLAY_PORT_NAME = "kv-replay"
LAUNCHER_PORT_NAME = "launcher"
ROUTER_PORT_NAME = "http"
ROUTER_ADMIN_PORT_NAME = "admin"

ENGINE_CONTAINER = "engine"
ROUTER_CONTAINER = "router"
#: The init container that copies the launcher, and where it copies it to.
INJECT_CONTAINER = "twinpool-inject"
INJECT_DIRECTORY = "/twinpool"
LAUNCHER_ZIPAPP = f"{INJECT_DIRECTORY}/worker.pyz"

#: Where a pod of a group that spans nodes finds its :data:`ANNOTATION_LEADER`, and the variable that holds its rank.
POD_INFO_DIRECTORY = "/twinpool-pod"
LEADER_FILE = f"{POD_INFO_DIRECTORY}/leader"
NODE_RANK_ENV = "TWINPOOL_NODE_RANK"

#: Where a worker pod finds the volumes of its disk and shared KV tiers.
KV_DISK_DIRECTORY = "/twinpool-kv/disk"
KV_SHARED_DIRECTORY = "/twinpool-kv/shared"

#: Where a worker pod keeps weights of the Hugging Face hub (``HF_HOME``).
WEIGHTS_DIRECTORY = "/twinpool-weights"

#: Where a router pod finds the Secrets of ``routing.auth`` and ``routing.tls``.
ROUTER_KEYS_DIRECTORY = "/twinpool-keys"
ROUTER_TLS_DIRECTORY = "/twinpool-tls"

#: Environment variables that carry the JSON of :class:`WorkerConfig` and :class:`RouterConfig`.
WORKER_CONFIG_ENV = "TWINPOOL_WORKER"
ROUTER_CONFIG_ENV = "TWINPOOL_ROUTER"

#: LoRA adapters that one batch may mix unless ``engine.args`` say otherwise; each takes memory on the accelerator.
MOST_ADAPTERS = 8

#: Seconds for which a prefill worker keeps the blocks of a handoff (vLLM's ``kv_lease_duration``; vLLM 0.32).
KV_LEASE_SECONDS = 30.0

#: Longest pool name. A StatefulSet's pods carry ``controller-revision-hash: <set>-<10 characters>``, a label value
#: of at most 63 characters, so a set's name has at most 52; ours is ``<pool>-prefill-<6 characters>``.
MAX_POOL_NAME = 37


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything a launcher is told by the operator; the rest it reads from its pod's environment.

    ``role`` is ``aggregated`` when the pool has no prefill role. Times are in seconds.
    """

    pool: str
    namespace: str
    role: Literal["prefill", "decode", "aggregated"]
    revision: str
    engine: Literal["vllm", "simulated"]
    model: str
    #: What the engine loads: a path inside the container, or a model id of the Hugging Face hub.
    model_path: str
    python: str = "python3"
    model_revision: str | None = None
    #: ``sha256:`` and the checksum of the list of checksums in the model's folder; None: nothing is checked there.
    model_checksum: str | None = None
    max_model_len: int | None = None
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    #: Pods of the group, one for each node.
    nodes: int = 1
    #: GPUs of this pod; 0 runs the engine on the CPU.
    gpus: int = 0
    connector: Literal["nixl"] | None = None
    args: tuple[str, ...] = ()
    startup_timeout: float = 1800.0
    drain_timeout: float = 300.0
    #: Time within which a ready engine must get on while requests run; an idle one is asked for a token three times as
    #: often. No step of an engine takes nearly as long.
    stall_timeout: float = 90.0
    #: Measure the links between the ranks of a group before its engine starts.
    preflight: bool = True
    #: Publish what the engine caches, at :data:`KV_EVENTS_PORT`.
    kv_events: bool = False
    #: Where the engine posts its spans (OTLP over HTTP); empty: nowhere.
    tracing_url: str = ""
    #: How tokens are drafted; None: not at all. ``draft_tokens`` 0 lets the launcher choose (``auto``).
    speculation: SpeculationMethod | None = None
    draft_model: str | None = None
    draft_tokens: int = 0
    #: Bytes of this pod's KV tiers behind the accelerator; 0: the tier is not there.
    host_kv_bytes: int = 0
    disk_kv_bytes: int = 0
    shared_kv_bytes: int = 0
    #: A store beside the pool, and the bytes of memory that this pod adds to it; None: there is none.
    kv_store: KvStoreKind | None = None
    kv_store_address: str = ""
    kv_store_bytes: int = 0
    kv_store_metadata: str = ""
    kv_store_protocol: str = "rdma"
    #: Whether a role of the pool has connectors that vLLM's hybrid memory of layers does not work with.
    plain_kv: bool = False
    #: Experts move by how busy they are, with so many copies in each layer, by the load of so many steps.
    expert_balancing: bool = False
    redundant_experts: int = 0
    expert_interval: int = 3000
    expert_window: int = 1000
    #: Version of the operator that made the pod's template; empty: not told.
    operator_version: str = ""
    #: LoRA adapters, NAME=SOURCE each, as the engine's command line has them.
    adapters: tuple[str, ...] = ()

    @property
    def adapter_paths(self) -> tuple[str, ...]:
        """Return what adapters are loaded from: paths in the container, or ids of the Hugging Face hub."""
        return tuple(item.partition("=")[2] for item in self.adapters)

    def to_json(self) -> str:
        """Return the settings as JSON with sorted keys, so that equal settings give equal pods."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str) -> WorkerConfig:
        """Read what :meth:`to_json` wrote; unknown keys of a newer operator are ignored.

        Raises
        ------
        InvalidValue
            When the text is not JSON or a required key is missing.
        """
        return _from_json(cls, text, WORKER_CONFIG_ENV)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """Everything a router is told by the operator. Times are in seconds."""

    pool: str
    namespace: str
    #: Model ids that clients may ask for; the first one is the engine's own served name, which engines are asked for.
    models: tuple[str, ...]
    #: True when prefill and decode are separate roles; False routes whole requests to decode workers.
    disaggregated: bool = True
    connector: Literal["nixl"] | None = "nixl"
    on_prefill_failure: OnPrefillFailure = "retry-then-local"
    policy: Policy = "least-load"
    #: Whether a request that could be handed off is: always, never, or when that is cheaper (auto).
    conditional: Conditional = "always"
    #: A stream that loses its decode worker goes on at another one, where that gives the same answer.
    continuation: bool = False
    drain_timeout: float = 300.0
    #: The queue of one router: requests that it keeps at one decode worker, that may wait, and for how many seconds.
    queue_concurrency: int = 8192
    #: What a decode engine runs at once, over all routers; 0: not known. With an objective no more are sent to it.
    sequences: int = 0
    queue_max: int = 1024
    queue_timeout: float = 30.0
    #: How long requests wait while no decode worker serves; 0: not at all.
    queue_hold: float = 0.0
    #: The ``priority`` of a request counts.
    queue_priorities: bool = False
    #: The objective for the first token, in seconds: who waits longer gives way when the queue is full.
    ttft: float | None = None
    #: Data processes of one router.
    processes: int = 1
    #: Share of requests in the access log.
    access_log: float = 0.01
    #: Clients need an API key of :data:`ROUTER_KEYS_DIRECTORY`.
    auth: bool = False
    #: What each key may ask of one router in a minute: requests, and tokens; 0: any number.
    key_requests: int = 0
    key_tokens: int = 0
    #: HTTPS with the certificate in :data:`ROUTER_TLS_DIRECTORY`.
    tls: bool = False
    #: Where spans are posted (OTLP over HTTP), empty: nowhere; and the share of requests that have some.
    tracing_url: str = ""
    tracing_sampling: float = 0.0
    #: Ids of LoRA adapters, which engines are asked for by their own names.
    adapters: tuple[str, ...] = ()
    #: Where engines load each of them from, in the same order: they name the blocks of its KV cache by that too.
    adapter_sources: tuple[str, ...] = ()
    #: How many of them an engine keeps loaded; 0: all.
    adapter_slots: int = 0
    #: The pool has renderers, which turn texts and chats into token ids.
    renders: bool = False

    def to_json(self) -> str:
        """Return the settings as JSON with sorted keys, so that equal settings give equal pods."""
        return _to_json(self)

    @classmethod
    def from_json(cls, text: str) -> RouterConfig:
        """Read what :meth:`to_json` wrote; unknown keys of a newer operator are ignored.

        Raises
        ------
        InvalidValue
            When the text is not JSON or a required key is missing.
        """
        return _from_json(cls, text, ROUTER_CONFIG_ENV)


@dataclass(frozen=True, slots=True)
class Leader:
    """Rank 0 of a group that spans nodes, as the operator names it to the others."""

    address: str
    #: Uid of the pod: an address alone may be another pod's by now.
    uid: str
    #: Counts the leaders that the group has had.
    epoch: int

    def to_json(self) -> str:
        """Return the value of :data:`ANNOTATION_LEADER`."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Leader | None:
        """Read what :meth:`to_json` wrote; None for anything else, such as an annotation that is not there yet."""
        try:
            value = json.loads(text)
            return cls(str(value["address"]), str(value["uid"]), int(value["epoch"]))
        except (ValueError, TypeError, KeyError):
            return None


def launcher_settings(pod: Mapping[str, Any]) -> WorkerConfig | None:
    """Return what a pod, or a template of pods, tells the launcher; None when it is none of ours."""
    for container in (pod.get("spec") or {}).get("containers") or ():
        for entry in container.get("env") or ():
            if entry.get("name") == WORKER_CONFIG_ENV:
                with contextlib.suppress(InvalidValue):
                    return WorkerConfig.from_json(entry.get("value", ""))
    return None


_Config = TypeVar("_Config", WorkerConfig, RouterConfig)


def _to_json(config: WorkerConfig | RouterConfig) -> str:
    return json.dumps(dataclasses.asdict(config), sort_keys=True, separators=(",", ":"))


def _from_json(cls: type[_Config], text: str, variable: str) -> _Config:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InvalidValue(f"{variable} is not JSON: {error}", "let the operator set it") from None
    if not isinstance(values, dict):
        raise InvalidValue(f"{variable} is not a JSON object", "let the operator set it")
    known = {f.name for f in dataclasses.fields(cls)}
    given: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items() if key in known
    }
    try:
        return cls(**given)
    except TypeError as error:
        raise InvalidValue(f"{variable}: {error}", "let the operator set it") from None
