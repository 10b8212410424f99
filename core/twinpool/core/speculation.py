"""The ``speculation`` block of a pool, and what a role says of it: drafted tokens that the model checks many at a time.

Method and draft model belong to the pool, because prefill and decode hand a KV cache over only when both have the same
ones (vLLM's NIXL compatibility hash). The number of tokens is each role's own.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, WithJsonSchema

from twinpool.core.fields import Part, rule, rules
from twinpool.core.protocol import SpeculationMethod

#: Most drafted tokens: far more than any published method wins with.
MAX_TOKENS = 32
Tokens = Annotated[
    Annotated[int, Field(ge=1, le=MAX_TOKENS)] | Literal["auto"],
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "maxLength": 4,
            **rules(
                rule(
                    f"type(self) == int ? self >= 1 && self <= {MAX_TOKENS} : self == 'auto'",
                    f"must be a number of tokens from 1 to {MAX_TOKENS}, or auto",
                )
            ),
        }
    ),
]


class Speculation(Part):
    """How tokens are drafted."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.model) == (self.method in ['draft_model', 'eagle', 'eagle3'])",
                "draft_model, eagle and eagle3 need a model that drafts; ngram, suffix and mtp have none",
                field_path=".model",
            )
        )
    )

    method: SpeculationMethod = Field(
        description="ngram (what followed the same words before in the same request), suffix (the same over all "
        "requests; needs arctic-inference in the image), draft_model, eagle or eagle3 (a model that was trained to "
        "draft), or mtp (layers of the model itself)."
    )
    model: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Draft model: an id on the Hugging Face hub, or an absolute path in the engine's container.",
    )


class RoleSpeculation(Part):
    """What a role decides of it."""

    tokens: Tokens = Field(
        "auto",
        description="Tokens that are drafted for each sequence and step, or auto: by the size of the batch, as the "
        "launcher computes it at the start from the model and the accelerator.",
    )
