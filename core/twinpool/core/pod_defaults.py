"""What pods of every pool get unless the pool says otherwise: labels, pull secrets, proxies, tolerations, priorities.

An administrator sets it once for a cluster, beside the operator, instead of in every pool. Always true: what a pool's
own fields say wins, and without defaults pods are what they were before there were any.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field, ValidationError

from twinpool.core.errors import InvalidValue
from twinpool.core.fields import Part, SecretReference
from twinpool.core.scheduling import Scheduling
from twinpool.core.spec import EnvironmentVariable  # noqa: TC001 - pydantic reads annotations when it runs

_STRICT = ConfigDict(**{**Part.model_config, "extra": "forbid"})
_Text = dict[str, Annotated[str, Field(strict=True)]]


class PartDefaults(Scheduling):
    """Defaults of the pods of one part. Environment variables are those of the engine: routers dial pods only."""

    model_config = _STRICT

    env: tuple[EnvironmentVariable, ...] = ()


class PodDefaults(Part):
    """Defaults of the pods that the operator makes."""

    model_config = _STRICT

    labels: _Text = Field(default_factory=dict)
    annotations: _Text = Field(default_factory=dict)
    image_pull_secrets: tuple[SecretReference, ...] = ()
    router: PartDefaults = PartDefaults()
    worker: PartDefaults = PartDefaults()


def parse(text: str) -> PodDefaults:
    """Return the defaults that JSON says; empty text says none.

    Raises
    ------
    InvalidValue
        It is no JSON, or has a key or type that is not known; the message names the place.
    """
    try:
        return PodDefaults.model_validate_json(text or "{}")
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise InvalidValue(f"defaults of pods: {place}: {first['msg']}", "see `pools` in the chart's values") from None
