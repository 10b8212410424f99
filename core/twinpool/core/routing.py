"""The ``routing`` block of a pool: the HTTP endpoint, who may ask, and what its pods get."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from twinpool.core import protocol
from twinpool.core.fields import ByteSize, CpuCores, Duration, Part, PodTemplate, SecretReference


class RouterService(Part):
    """The Service in front of the routers."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field("ClusterIP", description="Type of the Service.")
    port: int = Field(protocol.SERVICE_PORT, ge=1, le=65535, description="Port of the Service.")
    annotations: dict[str, str] = Field(default_factory=dict, max_length=64, description="Annotations of the Service.")


class RouterResources(Part):
    """What one router pod gets."""

    cpu: CpuCores = Field(
        "1", description="CPU cores requested, as a string; a router has a process for each whole one."
    )
    memory: ByteSize = Field("512Mi", description="Memory requested, which is also the limit.")


class KeyLimit(Part):
    """How much each API key may ask of each router, by token buckets that hold one minute's worth."""

    requests_per_minute: int | None = Field(
        None, ge=1, le=1_000_000_000, description="Requests; without it any number."
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        le=1_000_000_000_000,
        description="Tokens of prompts (a quarter of their bytes) and of the longest answers; without it any number.",
    )


class Auth(Part):
    """Who may ask."""

    secret_ref: SecretReference = Field(
        description="Secret whose entries are API keys by client name, each a key of at least 16 characters or "
        "sha256: and its digest in hexadecimal; changes are taken up while the routers run."
    )
    limit: KeyLimit = Field(
        default_factory=KeyLimit,
        description="How much each key may ask of each router; beyond it HTTP 429, with when to come back.",
    )


class Tls(Part):
    """HTTPS at the routers."""

    secret_ref: SecretReference = Field(
        description="Secret of type kubernetes.io/tls; a renewed certificate is taken up while the routers run."
    )


class RequestQueue(Part):
    """Requests that wait for room at the workers, in each router."""

    concurrency: int = Field(
        8192,
        ge=1,
        le=1_000_000,
        description="Requests that one router keeps at one decode worker; more wait in its queue. The default only "
        "bounds memory: with objectives.ttft engines get no more than they run at once (--max-num-seqs) anyway.",
    )
    max: int = Field(
        1024,
        ge=0,
        le=1_000_000,
        description="Requests that may wait in one router; then HTTP 429, first for those that miss their objective.",
    )
    timeout: Duration = Field("30s", description="How long a request may wait; then HTTP 504.")
    hold: Duration | None = Field(
        None,
        description="How long a request may wait while no decode worker serves, such as in a pool that comes back from "
        "zero; then HTTP 503. Without it, HTTP 503 at once.",
    )
    priorities: bool = Field(
        False, description="Whether the priority of a request counts (as in vLLM, a smaller one goes first)."
    )


class AccessLog(Part):
    """What the routers write down of requests: names, counts and times, never a prompt or an answer."""

    percent: int = Field(
        1, ge=0, le=100, description="Share of requests in the log, in percent; status 5xx is logged besides."
    )


class RendererResources(Part):
    """What one renderer pod gets."""

    cpu: CpuCores = Field("2", description="CPU cores requested, as a string.")
    memory: ByteSize = Field(
        "4Gi", description="Memory requested, which is also the limit: the engine's libraries and its tokenizer."
    )


class Renderer(Part):
    """Pods of the engine's image without GPUs that turn texts and chats into token ids."""

    replicas: int = Field(1, ge=0, le=64, description="Renderer pods; 0 has none, and prompts are estimated.")
    resources: RendererResources = Field(default_factory=RendererResources, description="What one renderer pod gets.")
    pod_template: PodTemplate = Field(
        default_factory=dict, description="Anything else of the renderer pods, merged last."
    )


class Routing(Part):
    """The HTTP endpoint."""

    replicas: int = Field(1, ge=0, le=64, description="Router pods.")
    policy: protocol.Policy = Field(
        "least-load",
        description="How a worker is chosen: least-load (fewest admitted tokens), price (least waiting caused, in "
        "seconds, with what workers probably have cached), prefix (most cached tokens), round-robin or random.",
    )
    continuation: bool = Field(
        False,
        description="Whether a stream that loses its decode worker goes on at another one: greedy requests to "
        "/v1/completions with one answer and without stop strings, penalties, logprobs or a grammar; all others end "
        "with an error event.",
    )
    queue: RequestQueue = Field(default_factory=RequestQueue, description="Requests that wait for room at the workers.")
    access_log: AccessLog = Field(default_factory=AccessLog, description="Log of single requests, as lines of JSON.")
    auth: Auth | None = Field(None, description="API keys that clients must send; without it everybody may ask.")
    tls: Tls | None = Field(None, description="HTTPS at the routers; without it they speak HTTP.")
    service: RouterService = Field(default_factory=RouterService, description="The Service in front of the routers.")
    resources: RouterResources = Field(default_factory=RouterResources, description="What one router pod gets.")
    pod_template: PodTemplate = Field(
        default_factory=dict, description="Anything else of the router pods, merged last."
    )
    renderer: Renderer | None = Field(
        None,
        description="Token ids of texts and chats, so that routers know what workers hold of them by KV events; "
        "without it, that is estimated.",
    )
