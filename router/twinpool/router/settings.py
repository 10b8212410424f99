"""What one router process is started with, and the limits that bound what clients can make it hold."""

from dataclasses import dataclass, field

from twinpool.core.protocol import ROUTER_ADMIN_PORT, ROUTER_PORT, RouterConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds per data process. Sizes in bytes, times in seconds."""

    head: int = 64 * 1024
    headers: int = 100
    body: int = 64 * 2**20
    #: Request bodies held at one time, all clients together; beyond it new ones are told to come back.
    bodies: int = 128 * 2**20
    #: What one client may send ahead of the answer that it waits for.
    pipelined: int = 64 * 1024
    clients: int = 10_000
    #: An engine's answer to a prefill leg.
    prefill_answer: int = 16 * 2**20
    head_timeout: float = 10.0
    #: Between two pieces of a request's body.
    body_timeout: float = 60.0
    idle_timeout: float = 75.0
    #: A client that takes nothing of its answer.
    write_timeout: float = 300.0
    #: How long a refused client's remaining bytes are read, so that it gets to read the refusal.
    linger: float = 2.0
    connect_timeout: float = 3.0
    prefill_timeout: float = 120.0
    #: Until the first event of a stream, and until an answer in one piece: engines queue requests for minutes.
    first_token_timeout: float = 300.0
    answer_timeout: float = 3600.0
    #: Between two pieces of an answer that has begun.
    stall_timeout: float = 60.0
    #: Engines close an idle connection after 5 s (uvicorn); one that idled longer than this is not used again.
    upstream_idle: float = 3.0
    upstream_idle_connections: int = 256
    #: How long a decode leg whose client is gone is left alone, so that its engine knows it before it is aborted.
    release_grace: float = 0.1


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything but the open sockets."""

    config: RouterConfig
    host: str = "127.0.0.1"
    port: int = ROUTER_PORT
    admin_port: int = ROUTER_ADMIN_PORT
    workers: int = 1
    #: A file that lists endpoints, in place of Kubernetes.
    endpoints: str | None = None
    #: Admin ports of the other routers (host and port), in place of Kubernetes.
    copies: tuple[tuple[str, int], ...] = ()
    #: How long new connections are still taken after SIGTERM: load balancers need a moment to look elsewhere.
    lame_duck: float = 3.0
    #: Directories of a mounted Secret: API keys by name, and ``tls.crt`` with ``tls.key``. None: not wanted.
    keys: str | None = None
    tls: str | None = None
    limits: Limits = field(default_factory=Limits)
