"""The command line and environment of vLLM for one worker.

Twinpool derives every flag that others depend on (ports, roles, connector) and refuses a user argument that would set
one again, because argparse lets the last one win. Checked against vLLM 0.32.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twinpool.core import blockhash, protocol
from twinpool.core.errors import InvalidValue
from twinpool.worker.engines.command import (
    SHUTDOWN_SECONDS,
    Command,
    Place,
    Pod,
    adapter_flags,
    event_flags,
    parallel_flags,
)
from twinpool.worker.engines.vllm.transfer import kv_transfer, mooncake_settings
from twinpool.worker.logic.experts import balancing_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twinpool.core.protocol import WorkerConfig

#: Defaults on the CPU, each dropped when the user's arguments hold one of the flags named with it. Compiling takes
#: minutes at every start, and bfloat16 without AMX makes prefill five times slower (measured with a 135M model).
CPU_DEFAULTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("--dtype", "float32"), ("--dtype",)),
    (
        ("--enforce-eager",),
        ("--enforce-eager", "--no-enforce-eager", "--compilation-config", "--optimization-level", "-O", "-cc"),
    ),
)

#: Environment on the CPU unless the user set it: vLLM's own choice binds every worker of a node to the same core.
CPU_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}

#: Where a pod keeps the settings of Mooncake's store, which vLLM takes from a file alone.
_MOONCAKE_FILE = "/tmp/twinpool-mooncake.json"  # noqa: S108 - the container's own folder

_NO_CACHE = "--no-enable-prefix-caching"
#: vLLM's seed of block names, and that of Python's own hashes.
_HASH_SEED = "PYTHONHASHSEED"


def vllm_command(
    config: WorkerConfig,
    pod: Pod,
    environment: Mapping[str, str],
    gpus_visible: int,
    place: Place,
    speculative: str = "",
) -> Command:
    """Build vLLM's command; ``speculative`` is the value of ``--speculative-config``.

    Raises
    ------
    InvalidValue
        When arguments or environment contradict ``config.kv_events`` or KV tiers, or there are tiers or expert
        balancing on the CPU.
    """
    on_cpu = config.gpus == 0 or gpus_visible == 0
    argv = [config.python, "-m", "vllm.entrypoints.cli.main", "serve", config.model_path]
    argv += ["--served-model-name", config.model, "--host", pod.ip, "--port", str(protocol.ENGINE_PORT)]
    argv += [*parallel_flags(config, place), "--shutdown-timeout", str(SHUTDOWN_SECONDS)]
    # The router learns from it how much of a prompt was cached; it changes nothing but the usage object.
    argv += ["--enable-prompt-tokens-details"]
    if config.model_revision is not None:
        argv += ["--revision", config.model_revision]
    if config.max_model_len is not None:
        argv += ["--max-model-len", str(config.max_model_len)]
    argv += [*adapter_flags(config), *_cache(config, pod, environment, on_cpu=on_cpu)]
    argv += _balancing(config, on_cpu=on_cpu)
    if config.tracing_url:
        argv += ["--otlp-traces-endpoint", config.tracing_url]
    if speculative:
        argv += ["--speculative-config", speculative]
    if on_cpu:
        argv += [word for words, flags in CPU_DEFAULTS if not _given(config.args, flags) for word in words]
    settings = mooncake_settings(config)
    files = {} if settings is None else {_MOONCAKE_FILE: settings}
    return Command(tuple(argv) + config.args, _environment(config, pod, environment, on_cpu=on_cpu), on_cpu, files)


def _cache(config: WorkerConfig, pod: Pod, environment: Mapping[str, str], *, on_cpu: bool) -> list[str]:
    """Return the flags of the KV cache: where blocks go to and come from, and what is told of them."""
    for kept, field in ((config.host_kv_bytes, "kvCache.tiers"), (config.kv_store, "kvCache.store")):
        if kept:
            _refuse(config.args, _NO_CACHE, f"{field}, which keeps what prefix caching finds again", field)
    transfer = kv_transfer(config, on_cpu=on_cpu)
    argv = [] if transfer is None else ["--kv-transfer-config", transfer]
    if config.plain_kv:
        argv += ["--disable-hybrid-kv-cache-manager"]
    if config.kv_events:
        _refuse_other_names(config.args, environment)
        argv += [*event_flags(config, _publishes_at(pod.ip)), "--prefix-caching-hash-algo", blockhash.ALGORITHM]
    return argv


def _publishes_at(ip: str) -> str:
    """Return where KV events are published: everywhere, but for pods that share one machine's loopback network.

    Those have an address each and one set of ports, so each binds its own. Written as an IPv4 address within IPv6,
    because vLLM would connect to a plain one; ZMQ binds the IPv4 address.
    """
    return f"[::ffff:{ip}]" if ip.startswith("127.") else "*"


def _environment(config: WorkerConfig, pod: Pod, given: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    env = {key: value for key, value in given.items() if key not in (protocol.WORKER_CONFIG_ENV, "VLLM_PORT")}
    env.update(
        VLLM_HOST_IP=pod.ip,
        VLLM_NIXL_SIDE_CHANNEL_HOST=pod.ip,
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(protocol.NIXL_SIDE_CHANNEL_PORT),
    )
    if config.kv_events:
        env[_HASH_SEED] = blockhash.SEED
    if config.kv_store is not None:
        # Blocks are found by names that every process must make alike.
        env.setdefault(_HASH_SEED, blockhash.SEED)
    if config.kv_store == "mooncake":
        env["MOONCAKE_CONFIG_PATH"] = _MOONCAKE_FILE
    if config.tracing_url:
        env = {**_tracing(config), **env}
    return {**CPU_ENVIRONMENT, **env} if on_cpu else env


def _balancing(config: WorkerConfig, *, on_cpu: bool) -> list[str]:
    if config.expert_balancing and on_cpu:
        raise InvalidValue(
            "expertBalancing needs GPUs: vLLM balances experts on CUDA, ROCm and XPU only",
            "remove expertBalancing from the role, or give it GPUs",
        )
    return balancing_flags(config)


def _tracing(config: WorkerConfig) -> dict[str, str]:
    """Return what OpenTelemetry in the engine reads: spans of what the router traces, over HTTP."""
    return {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_SERVICE_NAME": f"twinpool-{config.role}",
        "OTEL_RESOURCE_ATTRIBUTES": f"service.namespace={config.namespace},twinpool.pool={config.pool}",
    }


def _refuse_other_names(args: Sequence[str], environment: Mapping[str, str]) -> None:
    """Refuse what would give blocks names that routers cannot compute, or switch off caching itself."""
    for flag in ("--prefix-caching-hash-algo", _NO_CACHE):
        _refuse(args, flag, "engine.kvEvents, by which routers know blocks by name", "kvEvents")
    if environment.get(_HASH_SEED, blockhash.SEED) != blockhash.SEED:
        raise InvalidValue(
            f"engine.env: {_HASH_SEED} is {blockhash.SEED} with engine.kvEvents, because blocks are named by it",
            "remove the variable, or kvEvents",
        )


def _refuse(args: Sequence[str], flag: str, setting: str, field: str) -> None:
    if _given(args, (flag,)):
        raise InvalidValue(f"engine.args: {flag} contradicts {setting}", f"remove the argument, or {field}")


def _given(args: Sequence[str], flags: Sequence[str]) -> bool:
    """Return whether the user's arguments set one of ``flags`` (``-O`` and ``-cc`` may be glued to a value)."""
    for argument in args:
        name = re.split("[=.]", argument, maxsplit=1)[0]
        name = name.replace("_", "-") if name.startswith("--") else name
        if any(name == flag or (not flag.startswith("--") and name.startswith(flag)) for flag in flags):
            return True
    return False
