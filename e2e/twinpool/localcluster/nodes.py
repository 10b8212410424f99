"""Descriptions of nodes, read from YAML. Every mistake is reported with its place; nothing is guessed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from twinpool.localcluster.addresses import MOST_NODES
from twinpool.localcluster.errors import ClusterError
from twinpool.localcluster.paths import sources_dir

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_TAINT = re.compile(r"[^=:]+(=[^=:]*)?:(NoSchedule|PreferNoSchedule|NoExecute)")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?")
_LONGEST = 63
_FIELDS = ("name", "count", "gpus", "labels", "taints", "capacity")
GPU = "nvidia.com/gpu"


@dataclass(frozen=True)
class NodeSpec:
    """One node: its name, labels, taints (``KEY=VALUE:EFFECT``) and capacity (resource name to quantity)."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()
    capacity: Mapping[str, str] = field(default_factory=dict)


def default_file() -> Path:
    """Return the file with the nodes of a cluster that says nothing else."""
    return sources_dir() / "nodes.yaml"


def load(path: Path) -> tuple[NodeSpec, ...]:
    """Read a file of nodes.

    Raises
    ------
    ClusterError
        The file cannot be read or has a mistake; the message names the place and what is allowed.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ClusterError(f"nodes file {path}: {error.strerror}", "give the path of a YAML file") from error
    except yaml.YAMLError as error:
        raise ClusterError(f"nodes file {path} is no YAML: {error}", "correct it at that line") from error
    return parse(data, str(path))


def parse(data: object, where: str) -> tuple[NodeSpec, ...]:
    """Turn the content of a file of nodes into nodes; ``where`` names the file in errors."""
    if not isinstance(data, dict) or set(data) != {"nodes"} or not isinstance(data["nodes"], list) or not data["nodes"]:
        raise ClusterError(f"{where}: no list of nodes", "write 'nodes:' and below it one '- name: ...' per node")
    nodes = [node for i, entry in enumerate(data["nodes"]) for node in _expand(entry, f"{where}: nodes[{i}]")]
    names = [node.name for node in nodes]
    for name in names:
        if names.count(name) > 1:
            raise ClusterError(f"{where}: two nodes are named {name!r}", "give every node its own name")
    if len(nodes) > MOST_NODES:
        raise ClusterError(f"{where}: {len(nodes)} nodes", f"one cluster runs at most {MOST_NODES}")
    return tuple(nodes)


def _expand(entry: object, where: str) -> list[NodeSpec]:
    if not isinstance(entry, dict):
        raise ClusterError(f"{where} is not an object", f"the fields are {', '.join(_FIELDS)}")
    if unknown := sorted(str(key) for key in set(entry) - set(_FIELDS)):
        raise ClusterError(f"{where}: unknown field {unknown[0]!r}", f"the fields are {', '.join(_FIELDS)}")
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ClusterError(
            f"{where}.name: {name!r} cannot name a node", "use lower-case letters, digits and '-', at most 63"
        )
    count = _whole(entry, "count", where, least=1)
    gpus = _whole(entry, "gpus", where, least=0)
    capacity = _strings(entry, "capacity", where)
    for resource, quantity in capacity.items():
        if not _QUANTITY.fullmatch(quantity):
            raise ClusterError(
                f"{where}.capacity.{resource}: {quantity!r} is no quantity", "write it like 8, 500m or 32Gi"
            )
    if gpus:
        capacity.setdefault(GPU, str(gpus))
    labels = _strings(entry, "labels", where)
    taints = _taints(entry, where)
    if count is None:
        return [NodeSpec(name, labels, taints, capacity)]
    if len(f"{name}-{count - 1}") > _LONGEST:
        raise ClusterError(
            f"{where}.name: {name!r} with its number is too long", f"a node's name has at most {_LONGEST}"
        )
    return [NodeSpec(f"{name}-{i}", labels, taints, capacity) for i in range(count)]


def _whole(entry: Mapping[str, Any], key: str, where: str, least: int) -> int | None:
    value = entry.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ClusterError(f"{where}.{key}: {value!r}", f"give a whole number, at least {least}")
    return value


def _strings(entry: Mapping[str, Any], key: str, where: str) -> dict[str, str]:
    value = entry.get(key) or {}
    if not isinstance(value, dict) or not all(
        isinstance(v, str | int) and not isinstance(v, bool) for v in value.values()
    ):
        raise ClusterError(f"{where}.{key}: not an object of strings", "write it as NAME: value; quote true and false")
    strings = {str(k): str(v) for k, v in value.items()}
    for name, text in strings.items():
        if set(name + text) & set(',="'):
            raise ClusterError(
                f"{where}.{key}.{name}: {text!r} holds ',', '=' or a quote", "leave those characters out"
            )
    return strings


def _taints(entry: Mapping[str, Any], where: str) -> tuple[str, ...]:
    value = entry.get("taints") or []
    if not isinstance(value, list):
        raise ClusterError(f"{where}.taints: not a list", "write it as ['key=value:NoSchedule']")
    for i, taint in enumerate(value):
        if not isinstance(taint, str) or not _TAINT.fullmatch(taint):
            raise ClusterError(
                f"{where}.taints[{i}]: {taint!r}",
                "write KEY=VALUE:EFFECT with NoSchedule, PreferNoSchedule or NoExecute",
            )
    return tuple(value)
