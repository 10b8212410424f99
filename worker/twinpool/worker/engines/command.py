"""What the launcher starts: one command per kind of engine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue
from twinpool.worker.logic.experts import balancing_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.core.protocol import WorkerConfig

#: Seconds an engine lets requests finish after SIGTERM. The launcher signals an engine that is idle, or one that is out
#: of time; this only covers a request that came between the last look and the signal.
SHUTDOWN_SECONDS = 5

_SECRET = re.compile("(token|key|secret|password)$", re.IGNORECASE)


@dataclass(frozen=True)
class Pod:
    """Who this pod is, from the downward API."""

    ip: str
    name: str = ""
    uid: str = ""
    namespace: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Pod:
        """Read the pod's identity.

        Raises
        ------
        InvalidValue
            When ``POD_IP`` is missing: the engine must listen on exactly this address.
        """
        ip = environment.get("POD_IP", "")
        if not ip:
            raise InvalidValue(
                "POD_IP is not set", "the operator sets it by the downward API; by hand: POD_IP=127.0.0.1"
            )
        names = ("POD_NAME", "POD_UID", "POD_NAMESPACE")
        return cls(ip, *(environment.get(name, "") for name in names))


@dataclass(frozen=True)
class Place:
    """Where this pod stands in its group: its rank among the nodes, and the leader's address."""

    rank: int = 0
    leader: str = ""


@dataclass(frozen=True)
class Command:
    """How to start an engine."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    #: True when the engine runs on the CPU.
    on_cpu: bool
    #: Files that the engine reads its settings from, by path.
    files: Mapping[str, str] = field(default_factory=dict)


def redacted(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` for a log: values of flags that are named for a token, key, secret or password become ``***``."""
    shown = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        secret = word.startswith("-") and _SECRET.search(name) is not None
        if secret and equals:
            shown.append(f"{name}=***")
        else:
            shown.append("***" if hide_next and not word.startswith("-") else word)
        hide_next = secret and not equals
    return shown


def parallel_flags(config: WorkerConfig, place: Place) -> list[str]:
    """Return the flags that say how the model is split, which are vLLM's and the simulated engine's alike."""
    flags = ["--tensor-parallel-size", str(config.tensor)]
    if config.pipeline > 1:
        flags += ["--pipeline-parallel-size", str(config.pipeline)]
    if config.expert:
        flags += ["--enable-expert-parallel"]
    if config.data > 1:
        return flags + _data_parallel(config, place)
    if config.nodes > 1:
        flags += ["--nnodes", str(config.nodes), "--node-rank", str(place.rank)]
        flags += ["--master-addr", place.leader, "--master-port", str(protocol.MASTER_PORT)]
    return [*flags, "--headless"] if place.rank else flags


def _data_parallel(config: WorkerConfig, place: Place) -> list[str]:
    """Return the flags of copies behind one endpoint; over nodes each pod has equally many, and the leader balances."""
    flags = ["--data-parallel-size", str(config.data)]
    if config.nodes > 1:
        local = config.data // config.nodes
        flags += ["--data-parallel-size-local", str(local), "--data-parallel-address", place.leader]
        flags += ["--data-parallel-rpc-port", str(protocol.DATA_PARALLEL_PORT)]
        if place.rank:
            flags += ["--data-parallel-start-rank", str(place.rank * local), "--headless"]
    return flags


def ranks(config: WorkerConfig) -> int:
    """Return the ranks of the group, over all its pods."""
    return config.tensor * config.pipeline * config.data


def wants_preflight(config: WorkerConfig) -> bool:
    """Return whether there are links between ranks to measure; the simulated engine's ranks exchange nothing."""
    return config.preflight and config.engine == "vllm" and ranks(config) > 1


def behind_preflight(
    command: Command, config: WorkerConfig, pod: Pod, place: Place, program: Sequence[str], result: str
) -> Command:
    """Return the command that runs this pod's ranks of the preflight first and then becomes ``command``.

    ``program`` is how to run the launcher's own program again; ``result`` is the file that the result goes to.
    """
    local = ranks(config) // config.nodes
    flags = {
        "python": config.python,
        "pod": pod.name or pod.ip,
        "local": local,
        "first": place.rank * local,
        "world": ranks(config),
        "leader": place.leader or pod.ip,
        "port": protocol.PREFLIGHT_PORT,
        "result": result,
    }
    words = (f"--{name}={value}" for name, value in flags.items())
    return replace(command, argv=(*program, "preflight", *words, "--", *command.argv))


def event_flags(config: WorkerConfig, host: str = "*") -> list[str]:
    """Return the flags by which an engine publishes its KV events, which are vLLM's and the simulated engine's alike.

    ``*`` binds, and so does an address with ``::`` in it; vLLM connects to any other, and counts ports up by
    data-parallel rank, over all pods (vLLM 0.32, ``distributed/kv_events.py``).

    Raises
    ------
    InvalidValue
        When this pod has so many ranks that ports of events and of replays meet.
    """
    local, most = config.data // config.nodes, protocol.KV_REPLAY_PORT - protocol.KV_EVENTS_PORT
    if local > most:
        raise InvalidValue(
            f"engine.kvEvents: {local} data-parallel ranks in one pod need the same ports for events and replays",
            f"leave kvEvents out, or have at most {most} ranks in a pod (parallelism.data over its nodes)",
        )
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://{host}:{protocol.KV_EVENTS_PORT}",
        "replay_endpoint": f"tcp://{host}:{protocol.KV_REPLAY_PORT}",
    }
    return ["--kv-events-config", json.dumps(events, sort_keys=True, separators=(",", ":"))]


def adapter_flags(config: WorkerConfig) -> list[str]:
    """Return the flags that load LoRA adapters, which are vLLM's and the simulated engine's alike; none without."""
    if not config.adapters:
        return []
    mixed = str(min(len(config.adapters), protocol.MOST_ADAPTERS))
    return ["--enable-lora", "--max-loras", mixed, "--lora-modules", *config.adapters]


def simulated_command(
    config: WorkerConfig,
    pod: Pod,
    environment: Mapping[str, str],
    python: str,
    place: Place,
    speculative: str = "",
) -> Command:
    """Build the command of the simulated engine, which is this package run by ``python``."""
    argv = [python, "-m", "twinpool.worker", "simulate", "--host", pod.ip, "--port", str(protocol.ENGINE_PORT)]
    argv += ["--role", config.role, "--model", config.model]
    argv += [*parallel_flags(config, place), "--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    if config.connector is not None:
        argv += ["--connector", config.connector]
    if config.max_model_len is not None:
        argv += ["--max-model-len", str(config.max_model_len)]
    if config.kv_events:
        argv += event_flags(config)
    if speculative:
        argv += ["--speculative-config", speculative]
    argv += [*balancing_flags(config), *adapter_flags(config)]
    if config.kv_store is not None:
        raise InvalidValue(
            "kvCache.store is not simulated: the simulated engine has tiers of its own only",
            "use kvCache.tiers with a shared tier, or engine.kind vllm",
        )
    sizes = {"host": config.host_kv_bytes, "disk": config.disk_kv_bytes, "shared": config.shared_kv_bytes}
    argv += [word for kind, size in sizes.items() if size for word in (f"--{kind}-kv-bytes", str(size))]
    env = {key: value for key, value in environment.items() if key != protocol.WORKER_CONFIG_ENV}
    return Command(tuple(argv) + config.args, env, on_cpu=True)
