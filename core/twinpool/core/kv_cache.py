"""The ``kvCache`` block of a role: slower memory that keeps what the accelerator's KV cache has no room for.

Blocks go from the accelerator to the host's memory, and from there to a disk of the node or a store that pods share;
a prompt whose beginning one of them holds is loaded instead of computed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from twinpool.core.fields import ByteSize, Part, rule, rules
from twinpool.core.units import parse_bytes

TierKind = Literal["host", "disk", "shared"]


class KvTier(Part):
    """One tier behind the accelerator's memory."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.storageClass) || self.kind == 'disk'",
                "storageClass belongs to a disk tier",
                field_path=".storageClass",
            ),
            rule(
                "has(self.claim) == (self.kind == 'shared')",
                "a shared tier needs claim, a volume claim that all pods may mount (ReadWriteMany); others have none",
                field_path=".claim",
            ),
        )
    )

    kind: TierKind = Field(
        description="host (memory of the node), disk (storage of the node), or shared (a volume that all pods mount)."
    )
    size: ByteSize = Field(
        description="What each pod keeps there, or all pods together in a shared tier; the oldest gives way."
    )
    storage_class: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="Class of the volume that each pod gets for its disk tier and loses with it; default: an emptyDir, "
        "which is space of the node's root disk.",
    )
    claim: str | None = Field(
        None, min_length=1, max_length=253, description="Volume claim of the namespace that holds a shared tier."
    )


Tiers = Annotated[
    tuple[KvTier, ...],
    Field(
        max_length=3,
        json_schema_extra={
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["kind"],
            **rules(
                rule(
                    "size(self) == 0 || self.exists(tier, tier.kind == 'host')",
                    "disk and shared need a host tier too, through which blocks go to them and come back",
                )
            ),
        },
    ),
]


class KvCache(Part):
    """What a role keeps of its KV cache outside the accelerator."""

    tiers: Tiers = Field((), description="Slower memory behind the accelerator's, one of each kind.")

    def tier(self, kind: TierKind) -> KvTier | None:
        """Return the tier of a kind; None when there is none."""
        return next((tier for tier in self.tiers if tier.kind == kind), None)

    def bytes(self, kind: TierKind) -> int:
        """Return the size of the tier of a kind in bytes; 0 when there is none."""
        found = self.tier(kind)
        return parse_bytes(found.size) if found else 0
