"""``twinpool validate``: what can be said of manifests without a cluster, with the line that each field came from.

The API server has the last word at ``kubectl apply`` (it knows the CEL rules); this command finds unknown fields, wrong
types and wrong units before a cluster is at hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import yaml
from pydantic import BaseModel, ValidationError

from twinpool.core import protocol
from twinpool.core.spec import InferencePool

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a manifest: where (``spec.prefill.replicas``) and what."""

    pool: str
    field: str
    message: str

    def __str__(self) -> str:
        """Return one line for people."""
        return f"{self.pool}: {self.field}: {self.message}"


@dataclass(frozen=True, slots=True)
class Report:
    """The pools that were found and all their problems."""

    pools: tuple[str, ...]
    problems: tuple[Problem, ...]


def validate(stream: TextIO) -> Report:
    """Read YAML documents and check every InferencePool of ours among them; other kinds are passed over.

    Raises
    ------
    yaml.YAMLError
        When the text is not YAML.
    """
    pools: list[str] = []
    problems: list[Problem] = []
    for document in yaml.safe_load_all(stream):
        if not isinstance(document, dict) or document.get("apiVersion") != protocol.API_VERSION:
            continue
        name = str((document.get("metadata") or {}).get("name", "(no name)"))
        pools.append(name)
        problems.extend(_problems(name, document))
    return Report(tuple(pools), tuple(problems))


def _problems(name: str, document: dict[str, Any]) -> Iterator[Problem]:
    try:
        InferencePool.model_validate(document)
    except ValidationError as error:
        for entry in error.errors():
            yield Problem(name, ".".join(str(part) for part in entry["loc"]), entry["msg"])
    if isinstance(document.get("spec"), dict):
        for path in _unknown(document["spec"], InferencePool.model_fields["spec"].annotation):
            yield Problem(name, f"spec.{path}", "unknown field")


def _unknown(value: Any, annotation: Any) -> Iterator[str]:
    """Yield the paths in ``value`` that the model behind ``annotation`` has no field for."""
    model = _model(annotation)
    if model is None or not isinstance(value, dict):
        return
    by_alias = {field.alias or key: field for key, field in model.model_fields.items()}
    for key, inner in value.items():
        if key not in by_alias:
            yield key
            continue
        yield from (f"{key}.{path}" for path in _unknown(inner, by_alias[key].annotation))


def _model(annotation: Any) -> type[BaseModel] | None:
    """Return the model inside ``Model``, ``Model | None``, or None for anything else."""
    options = getattr(annotation, "__args__", (annotation,))
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None
