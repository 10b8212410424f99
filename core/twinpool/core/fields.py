"""What the models of the API are made of: the base class, CEL rules, and strings with units."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from twinpool.core.units import BYTES_PATTERN, CPU_PATTERN, DURATION_PATTERN


def rule(expression: str, message: str, *, field_path: str = "", computed: bool = False) -> dict[str, str]:
    """Build one ``x-kubernetes-validations`` entry; ``computed`` says that the message is CEL too."""
    entry = {"rule": expression, ("messageExpression" if computed else "message"): message}
    if field_path:
        entry["fieldPath"] = field_path
    return entry


def rules(*entries: dict[str, str]) -> dict[str, Any]:
    """Return the extra schema that holds CEL rules."""
    return {"x-kubernetes-validations": list(entries)}


Duration = Annotated[
    str,
    Field(
        pattern=DURATION_PATTERN,
        max_length=12,
        json_schema_extra=rules(
            rule(
                f"self.matches(r'{DURATION_PATTERN}')",
                "must be a duration: a whole number and ms, s, m or h (800ms, 5s, 20m)",
            )
        ),
    ),
]
ByteSize = Annotated[
    str,
    Field(
        pattern=BYTES_PATTERN,
        max_length=20,
        json_schema_extra=rules(
            rule(
                f"self.matches(r'{BYTES_PATTERN}')",
                "must be a size: a whole number and Ki, Mi, Gi, Ti, k, M, G or T (500Mi, 25Gi)",
            )
        ),
    ),
]
CpuCores = Annotated[
    str,
    Field(
        pattern=CPU_PATTERN,
        max_length=10,
        json_schema_extra=rules(
            rule(f"self.matches(r'{CPU_PATTERN}')", "must be CPU cores as a string: '4', '0.5' or '500m'")
        ),
    ),
]
Name = Annotated[str, Field(min_length=1, max_length=253)]


class Part(BaseModel):
    """A block of the manifest: camelCase outside, immutable inside."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="ignore", protected_namespaces=()
    )


class SecretReference(Part):
    """A Secret of the pool's namespace."""

    name: Name = Field(description="Name of the Secret.")


#: Anything else of a pod.
PodTemplate = Annotated[
    dict[str, Any],
    Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
]
