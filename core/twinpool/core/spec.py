"""The API type ``InferencePool``: what a user writes, with every default and every rule.

The models here are the only source: the CRD in ``crds/`` is generated from them (:mod:`twinpool.core.crd`), and the
operator and the CLI parse manifests with them. A field is here only when something acts on it.

Two kinds of rules. Those that the API server must refuse at ``kubectl apply`` are CEL, written with ``rule()`` beside
the field they guard; pydantic repeats only what parsing needs. Unknown fields are ignored here, because an
object stored by a newer version must still be read after a roll-back; ``kubectl`` refuses them by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from twinpool.core import protocol
from twinpool.core.expert_balancing import ExpertBalancing as ExpertBalancing
from twinpool.core.fields import Duration, Part, PodTemplate, SecretReference, rule, rules
from twinpool.core.kv_cache import KvCache as KvCache
from twinpool.core.kv_cache import KvTier as KvTier
from twinpool.core.model import Alias as Alias
from twinpool.core.model import Model as Model
from twinpool.core.objectives import Objectives as Objectives
from twinpool.core.placement import Placement as Placement
from twinpool.core.ratio import Ratio as Ratio
from twinpool.core.resources import Gpu as Gpu
from twinpool.core.resources import Parallelism as Parallelism
from twinpool.core.resources import Resources as Resources
from twinpool.core.rollout import Rollout as Rollout
from twinpool.core.routing import Routing as Routing
from twinpool.core.scaling import POOL_RULES, Scaling
from twinpool.core.scheduling import Scheduling as Scheduling
from twinpool.core.speculation import RoleSpeculation as RoleSpeculation
from twinpool.core.speculation import Speculation as Speculation
from twinpool.core.status import Condition as Condition
from twinpool.core.status import InferencePoolStatus as InferencePoolStatus
from twinpool.core.status import RoleStatus as RoleStatus
from twinpool.core.tracing import Tracing as Tracing

#: Longest list of engine arguments or environment variables, and longest entry: they bound the cost of CEL rules.
MAX_LIST = 64
MAX_ARGUMENT = 2048


class EnvironmentVariable(Part):
    """One environment variable of the engine's container, as in a pod."""

    name: str = Field(
        min_length=1,
        max_length=253,
        description="Name of the variable; those that Twinpool sets are refused.",
        json_schema_extra=rules(
            rule(
                f"!(self in {list(protocol.MANAGED_ENV)!r}) && !self.startsWith('TWINPOOL_')",
                f"is set by Twinpool and cannot be given: {', '.join(protocol.MANAGED_ENV)} and TWINPOOL_*",
            )
        ),
    )
    value: str | None = Field(None, max_length=32768, description="The value.")
    value_from: dict[str, Any] | None = Field(
        None,
        description="Where the value comes from, as in a pod: secretKeyRef, configMapKeyRef, fieldRef, "
        "resourceFieldRef.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


Argument = Annotated[str, Field(min_length=1, max_length=MAX_ARGUMENT)]
Arguments = Annotated[
    tuple[Argument, ...],
    Field(
        max_length=MAX_LIST,
        json_schema_extra=rules(
            rule(
                f"!self.exists(a, a.matches(r'{protocol.managed_flag_pattern()}'))",
                f"self.filter(a, a.matches(r'{protocol.managed_flag_pattern()}'))[0] + ' is set by Twinpool and cannot "
                "be given in args; use the field of the pool that stands for it (model, parallelism, handoff, "
                "kvCache, speculation)'",
                computed=True,
            )
        ),
    ),
]
Environment = Annotated[
    tuple[EnvironmentVariable, ...],
    Field(
        max_length=MAX_LIST,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    ),
]


#: Arguments that would give KV blocks other names, or none.
_OF_BLOCKS = r"^--(no[-_]enable[-_]prefix[-_]caching|prefix[-_]caching[-_]hash[-_]algo)([=.].*)?$"


class Engine(Part):
    """The program that runs the model."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.kvEvents) || !self.kvEvents || !has(self.args) "
                f"|| !self.args.exists(a, a.matches(r'{_OF_BLOCKS}'))",
                "kvEvents needs prefix caching and its own hash of blocks; remove --no-enable-prefix-caching and "
                "--prefix-caching-hash-algo from args, or kvEvents",
                field_path=".args",
            )
        )
    )

    kind: Literal["vllm", "simulated"] = Field(
        "vllm",
        description="vllm, or simulated: same HTTP interface and handoff protocol, invented tokens and times, no GPU.",
    )
    image: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Image of the engine; default: the operator's choice for the kind.",
    )
    image_pull_secrets: tuple[SecretReference, ...] = Field(
        (), max_length=16, description="Secrets that open a private registry."
    )
    python: str = Field(
        "python3",
        min_length=1,
        max_length=1024,
        description="Python interpreter of the image that can import the engine.",
    )
    args: Arguments = Field(
        (), description="More arguments for the engine; a flag that Twinpool sets is refused by name."
    )
    env: Environment = Field((), description="More environment variables for the engine.")
    preflight: bool = Field(
        True,
        description="Measure the links between the ranks of a group before each start of its engine; it does not start "
        "when they cannot work together.",
    )
    kv_events: bool = Field(
        False,
        description="Have engines publish which blocks they cache, so that routers with routing.policy price or prefix "
        "know it, instead of an estimate, for prompts that come as token ids, or that "
        "routing.renderer turns into some.",
    )


class RoleEngine(Part):
    """What a role changes of the pool's engine."""

    image: str | None = Field(None, min_length=1, max_length=1024, description="Image for this role.")
    args: Arguments = Field((), description="Arguments for this role, after those of the pool.")
    env: Environment = Field((), description="Environment variables for this role; they win over the pool's.")


#: GPUs of one replica, in CEL.
_COPY = "self.parallelism.tensor * self.parallelism.pipeline"
_RANKS = f"{_COPY} * self.parallelism.data"


class WorkerRole(Part):
    """One of the twin pools."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                f"self.resources.gpu.perNode == 0 ? {_RANKS} == 1 "
                f": self.resources.gpu.perNode % ({_RANKS}) == 0 || ({_RANKS}) % self.resources.gpu.perNode == 0",
                "parallelism.tensor x pipeline x data must divide resources.gpu.perNode (default 8) or be a multiple "
                "of it: 1, 2, 4 or 8 GPUs of a node with 8, or 16, 24, ... over several nodes; on the CPU, where "
                "perNode is 0, it must be 1",
                field_path=".parallelism",
            ),
            rule(
                f"self.parallelism.data == 1 || self.resources.gpu.perNode == 0 "
                f"|| self.resources.gpu.perNode % ({_COPY}) == 0",
                "with parallelism.data above 1, each copy (tensor x pipeline) must fit into a node, as a divisor of "
                "resources.gpu.perNode (default 8); over nodes a copy cannot be split then",
                field_path=".parallelism.data",
            ),
            rule(
                "!has(self.kvCache) || size(self.kvCache.tiers) == 0 || self.resources.gpu.perNode == 0 "
                f"|| {_COPY} <= self.resources.gpu.perNode",
                "kvCache.tiers needs each copy (tensor x pipeline) within a node, whose memory the host tier is",
                field_path=".kvCache",
            ),
            rule(
                "!has(self.expertBalancing) "
                "|| self.parallelism.expert && self.parallelism.tensor * self.parallelism.data > 1",
                "expertBalancing needs parallelism.expert, and tensor x data above 1 to move experts between",
                field_path=".expertBalancing",
            ),
        )
    )

    replicas: int = Field(1, ge=0, le=1000, description="Model replicas; each is one serving group of pods.")
    parallelism: Parallelism = Field(default_factory=Parallelism, description="How one replica is split over GPUs.")
    resources: Resources = Field(default_factory=Resources, description="What one pod gets.")
    engine: RoleEngine = Field(default_factory=RoleEngine, description="What this role changes of the engine.")
    kv_cache: KvCache | None = Field(None, description="What is kept of the KV cache outside the accelerator.")
    expert_balancing: ExpertBalancing | None = Field(
        None, description="Even out the load of a mixture's experts; without it they stay where they are."
    )
    speculation: RoleSpeculation | None = Field(
        None, description="How many tokens this role drafts, where the pool's speculation says how; default: auto."
    )
    service_account_name: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="ServiceAccount of the pods; default: one without any rights.",
    )
    scheduling: Scheduling = Field(default_factory=Scheduling, description="Where pods may run.")
    startup_timeout: Duration = Field("30m", description="How long an engine may load before it is restarted.")
    drain_timeout: Duration = Field("5m", description="How long running requests may take to end when a pod must go.")
    pod_template: PodTemplate = Field(
        default_factory=dict,
        description="Anything else of the pods (metadata and spec), merged last by the keys that Kubernetes merges "
        "lists by; the launcher, the pod's identity and its ports stay Twinpool's.",
    )

    @property
    def ranks(self) -> int:
        """Return the GPUs of one replica."""
        return self.parallelism.tensor * self.parallelism.pipeline * self.parallelism.data

    @property
    def nodes(self) -> int:
        """Return the nodes, and so the pods, of one replica."""
        per_node = self.resources.gpu.per_node
        return max(1, self.ranks // per_node) if per_node else 1


class Handoff(Part):
    """How the KV cache goes from prefill to decode."""

    connector: Literal["nixl"] = Field("nixl", description="Transfer library: nixl (decode pulls from prefill).")
    conditional: protocol.Conditional = Field(
        "always",
        description="Whether a request is handed off: always, never (decode workers serve whole requests), or auto: "
        "only when that causes less waiting, in seconds, than prefilling on the decode worker.",
    )
    on_prefill_failure: protocol.OnPrefillFailure = Field(
        "retry-then-local",
        description="What becomes of a prompt that a prefill worker did not read: retry-then-local (another prefill "
        "worker, then the decode worker reads it itself), local (the decode worker at once), or fail (another prefill "
        "worker, then HTTP 503, so that decode latency never pays for lost prefill workers).",
    )


class InferencePoolSpec(Part):
    """What the user wants."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.ratio) || has(self.prefill)",
                "ratio needs a prefill role; remove it from a pool of decode workers alone",
                field_path=".ratio",
            ),
            *POOL_RULES,
            rule(
                "!has(self.routing.renderer) || self.engine.kvEvents && self.routing.policy in ['price', 'prefix']",
                "a renderer names the blocks that KV events tell of: set engine.kvEvents, and routing.policy to price "
                "(or prefix); or remove it",
                field_path=".routing.renderer",
            ),
            rule(
                "has(self.speculation) || !(has(self.decode.speculation) "
                "|| has(self.prefill) && has(self.prefill.speculation))",
                "the speculation of a role needs the pool's spec.speculation, which names the method",
                field_path=".speculation",
            ),
        )
    )

    model: Model = Field(description="What is served.")
    engine: Engine = Field(default_factory=Engine, description="The program that runs the model.")
    prefill: WorkerRole | None = Field(
        None,
        description="Workers that read prompts; without them decode workers serve whole requests (an aggregated pool).",
    )
    decode: WorkerRole = Field(description="Workers that write tokens.")
    ratio: Ratio | None = Field(
        None,
        description="Prefill groups to decode groups: prefill.replicas is moved into this band, also when only "
        "decode.replicas is changed (kubectl scale).",
    )
    handoff: Handoff = Field(default_factory=Handoff, description="How the KV cache goes from prefill to decode.")
    speculation: Speculation | None = Field(
        None, description="Draft tokens and let the model check several in one step; without it one token a step."
    )
    objectives: Objectives = Field(default_factory=Objectives, description="Latency that users are promised.")
    scaling: Scaling | None = Field(None, description="Numbers of groups that follow the arriving work; else replicas.")
    routing: Routing = Field(default_factory=Routing, description="The HTTP endpoint.")
    placement: Placement | None = Field(
        None, description="Who chooses the nodes of new groups, and by what; without it kube-scheduler alone does."
    )
    tracing: Tracing | None = Field(
        None, description="Spans of requests over both hops and into the engines; a change restarts the workers."
    )
    rollout: Rollout = Field(default_factory=Rollout, description="How a new revision replaces the old one.")


class ObjectMetadata(Part):
    """The part of an object's metadata that decisions use."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    annotations: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: str | None = None


class InferencePool(Part):
    """A pool as the API server holds it."""

    api_version: Literal["serving.twinpool.dev/v1alpha1"] = protocol.API_VERSION  # type: ignore[assignment]
    kind: Literal["InferencePool"] = protocol.KIND  # type: ignore[assignment]
    metadata: ObjectMetadata
    spec: InferencePoolSpec
    status: InferencePoolStatus = Field(default_factory=InferencePoolStatus)

    def to_manifest(self) -> dict[str, Any]:
        """Return what a user would write: set fields only, in the manifest's own spelling, without status."""
        return {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": self.metadata.model_dump(by_alias=True, exclude_defaults=True),
            "spec": self.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True),
        }
