"""One rule of the CRD, as the tests of all rules try it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from twinpool.core import protocol


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """Return a pool with the least that it must have, and ``spec``."""
    body = {"model": {"name": "acme/model"}, "decode": {}, **spec}
    return {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": name}, "spec": body}


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return ``{a: {b: value}}`` for the path ``a.b``."""
    *outer, last = path.split(".")
    made: dict[str, Any] = {last: value}
    for part in reversed(outer):
        made = {part: made}
    return made


@dataclass(frozen=True)
class Case:
    """A rule by its place in the schema, a manifest that it accepts, one that it refuses, and what it then says."""

    path: str
    good: dict[str, Any]
    bad: dict[str, Any]
    words: tuple[str, ...]
    names: tuple[str, str] = ("", "")
    extra: tuple[dict[str, Any], ...] = field(default=())
