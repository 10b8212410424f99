"""What Twinpool needs of vLLM by name, and what a version of vLLM has, read from its source without importing it.

Flags, metrics and fields are renamed between versions, and then nothing fails until a pod does. Reading the source
works for versions that cannot run here. Always true: a name that Twinpool uses and the source lacks is reported.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, get_args

from twinpool.core import protocol
from twinpool.localengine.errors import EngineError
from twinpool.router.logic.kv_room import KV_CACHE
from twinpool.router.logic.request import Route
from twinpool.worker.engines.simulated.logic.metrics import FAMILIES, OFFLOADING, SPECULATION, TIERING
from twinpool.worker.engines.vllm.flags import CPU_DEFAULTS
from twinpool.worker.logic.load import MARKS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: Where the names are, as patterns below the package's folder: wide, because vLLM moves files (``cli_args.py`` between
#: 0.32 and 0.33).
_FLAG_FILES = ("engine/arg_utils.py", "entrypoints/**/cli_args.py")
_METRIC_FILES = (
    *("v1/metrics/**/*.py", "v1/spec_decode/metrics.py", "distributed/kv_transfer/kv_connector/v1/**/*.py"),
    "v1/kv_offload/**/*.py",
)
_REQUEST_FILES = ("entrypoints/**/protocol.py",)
_ROUTE_FILES = ("entrypoints/**/api_router.py",)
_CONFIG_FILES = ("config/kv_transfer.py", "config/kv_events.py", "config/speculative.py", "config/parallel.py")
_TRANSFER_FILES = (
    *("distributed/kv_transfer/kv_connector/v1/nixl/**/*.py", "distributed/kv_transfer/kv_connector/factory.py"),
    *("distributed/kv_transfer/kv_connector/v1/multi_connector.py", "v1/kv_offload/**/*.py"),
    *("distributed/mooncake_store.py", "renderers/online_renderer.py"),
)

#: Suffixes that Prometheus adds to a metric's name.
_SUFFIXES = re.compile(r"_(total|count|sum|bucket)$")
_METRIC = re.compile(r"^vllm:[a-z0-9_]+$")


@dataclass(frozen=True)
class Contract:
    """Names of one version, or names that are needed."""

    flags: frozenset[str]
    metrics: frozenset[str]
    #: Fields of completion requests, as ``Class.field``.
    requests: frozenset[str]
    #: Fields of the JSON that three flags take, as ``Class.field``, and ways to draft, as ``SpeculativeMethod.name``.
    configs: frozenset[str]
    #: Keys of ``kv_transfer_params``.
    transfer: frozenset[str]
    #: Paths of the HTTP interface that only some versions have.
    routes: frozenset[str]


#: Fields of requests that the router sets or reads, and that the simulated engine serves.
_REQUEST_FIELDS = (
    *("model", "max_tokens", "min_tokens", "stream", "stream_options", "n", "stop", "stop_token_ids", "ignore_eos"),
    *("kv_transfer_params", "ec_transfer_params", "cache_salt", "return_token_ids", "temperature", "priority"),
)

#: Keys of ``kv_transfer_params`` that the router writes or reads, and the settings of connectors that we make.
_TRANSFER_KEYS = (
    *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_host", "remote_port"),
    *("kv_lease_duration", "prompt_token_ids"),
    # Connectors and their settings for KV tiers.
    *("MultiConnector", "OffloadingConnector", "connectors", "TieringOffloadingSpec"),
    *("LMCacheConnectorV1", "MooncakeStoreConnector", "MOONCAKE_CONFIG_PATH", "embedded", "metadata_server"),
    *("master_server_address", "protocol", "device_name", "global_segment_size"),
    *("cpu_bytes_to_use", "spec_name", "secondary_tiers", "fs"),
)


def needed() -> Contract:
    """Return every name of vLLM's that Twinpool sets or reads."""
    flags = {flag for flag in protocol.MANAGED_FLAGS if flag != "--model"}  # its place is that of `serve MODEL`
    flags |= {"--enable-prompt-tokens-details", "--prefix-caching-hash-algo"} | {words[0] for words, _ in CPU_DEFAULTS}
    metrics = {f"vllm:{family.name}" for family in FAMILIES + SPECULATION + OFFLOADING + TIERING} | set(MARKS)
    metrics.add(KV_CACHE)
    requests = {f"{kind}Request.{name}" for kind in ("Completion", "ChatCompletion") for name in _REQUEST_FIELDS}
    requests |= {"CompletionRequest.prompt", "ChatCompletionRequest.messages"}
    requests |= {"ChatCompletionRequest.max_completion_tokens"}
    transfer = ("kv_connector", "kv_role", "kv_buffer_device", "kv_connector_extra_config", "kv_load_failure_policy")
    events = ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic", "buffer_steps")
    drafts = ("method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size")
    balancing = (
        "num_redundant_experts",
        "step_interval",
        "window_size",
        "log_balancedness",
        "log_balancedness_interval",
    )
    return Contract(
        flags=frozenset(flags),
        metrics=frozenset(_base(name) for name in metrics),
        requests=frozenset(requests),
        configs=frozenset(
            [f"KVTransferConfig.{name}" for name in transfer]
            + [f"KVEventsConfig.{name}" for name in events]
            + [f"SpeculativeConfig.{name}" for name in drafts]
            + [f"EPLBConfig.{name}" for name in balancing]
            + [f"SpeculativeMethod.{name}" for name in get_args(protocol.SpeculationMethod)]
        ),
        transfer=frozenset(_TRANSFER_KEYS),
        routes=frozenset(f"{route.value}/render" for route in (Route.CHAT, Route.COMPLETIONS)),
    )


def read(package: Path) -> Contract:
    """Return the names that the vLLM package in this folder has.

    Raises
    ------
    EngineError
        The folder holds no vLLM.
    """
    if not (package / "engine").is_dir():
        raise EngineError(f"{package} is not the source of vLLM", "name the folder that holds engine/arg_utils.py")
    flags: set[str] = set()
    for tree in _trees(package, _FLAG_FILES):
        flags |= set(_flags(tree))
    metrics = {_base(text) for tree in _trees(package, _METRIC_FILES) for text in _strings(tree) if _METRIC.match(text)}
    requests = {name for tree in _trees(package, _REQUEST_FILES) for name in _fields(tree, "Request")}
    configs = {name for tree in _trees(package, _CONFIG_FILES) for name in (*_fields(tree, "Config"), *_methods(tree))}
    transfer = {text for tree in _trees(package, _TRANSFER_FILES) for text in _strings(tree)}
    routes = {text for tree in _trees(package, _ROUTE_FILES) for text in _strings(tree) if text.startswith("/")}
    return Contract(*map(frozenset, (flags, metrics, requests, configs, transfer, routes)))


def installed_package(venv: Path) -> Path:
    """Return the folder of the vLLM that is installed in a virtual environment.

    Raises
    ------
    EngineError
        There is none.
    """
    found = next(venv.glob("lib/python3*/site-packages/vllm"), None)
    if found is None:
        raise EngineError(f"{venv} has no vLLM", "run: python -m twinpool.localengine install")
    return found


def missing(wanted: Contract, source: Contract) -> list[str]:
    """Return, by kind and name, what ``source`` lacks of what is ``wanted``."""
    return [
        f"{kind.name}: {name}"
        for kind in fields(Contract)
        for name in sorted(getattr(wanted, kind.name) - getattr(source, kind.name))
    ]


def changes(old: Contract, new: Contract) -> list[str]:
    """Return what was added and removed between two versions, but for the strings of the connector's code."""
    return [
        f"{kind.name}: {sign}{name}"
        for kind in fields(Contract)
        if kind.name != "transfer"
        for sign, names in (
            ("-", getattr(old, kind.name) - getattr(new, kind.name)),
            ("+", getattr(new, kind.name) - getattr(old, kind.name)),
        )
        for name in sorted(names)
    ]


def _base(metric: str) -> str:
    """Return a metric's name without what Prometheus adds to it, or vLLM itself (``iteration_tokens_total``)."""
    while (shorter := _SUFFIXES.sub("", metric)) != metric:
        metric = shorter
    return metric


def _trees(package: Path, places: tuple[str, ...]) -> Iterator[ast.Module]:
    for place in places:
        for file in sorted(package.glob(place)):
            yield ast.parse(file.read_text(encoding="utf-8"), str(file))


def _strings(tree: ast.AST) -> Iterator[str]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def _flags(tree: ast.AST) -> Iterator[str]:
    """Yield the flags of ``add_argument`` calls, and those that vLLM makes of a dataclass of arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = (each.value for each in node.args if isinstance(each, ast.Constant))
            yield from (word for word in words if isinstance(word, str) and word.startswith("-"))
    for name in _fields(tree, "FrontendArgs"):
        yield "--" + name.partition(".")[2].replace("_", "-")


def _methods(tree: ast.Module) -> Iterator[str]:
    """Yield the ways to draft: the strings of the ``Literal`` types of which ``SpeculativeMethod`` is made."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name == "SpeculativeMethod" or name.endswith("Types"):
                yield from (f"SpeculativeMethod.{text}" for text in _strings(node.value))


def _fields(tree: ast.AST, ending: str) -> Iterator[str]:
    """Yield ``Class.field`` of every annotated field of the classes whose names end so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith(ending):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    yield f"{node.name}.{line.target.id}"
