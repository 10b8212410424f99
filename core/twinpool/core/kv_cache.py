"""The ``kvCache`` block of a role: slower memory that keeps what the accelerator's KV cache has no room for.

Blocks go from the accelerator to the host's memory, and from there to a disk of the node or a store that pods share;
a prompt whose beginning one of them holds is loaded instead of computed.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from twinpool.core.fields import ByteSize, Part, rule, rules
from twinpool.core.protocol import KvStoreKind
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


class KvStore(Part):
    """A store of KV blocks that runs beside the pool; each pod adds memory of its own."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.kind == 'mooncake' || !has(self.metadata)",
                "metadata belongs to a Mooncake store",
                field_path=".metadata",
            ),
            rule(
                "self.kind != 'mooncake' || self.address.matches('^[^:/]+:[0-9]+$')",
                "a Mooncake store's address is HOST:PORT of its master",
                field_path=".address",
            ),
            rule(
                "self.kind != 'lmcache' || self.address.matches('^[a-z][a-z0-9+]*://[^/]+')",
                "an LMCache store's address is the URL that LMCache calls remote_url, such as lm://HOST:PORT",
                field_path=".address",
            ),
        )
    )

    kind: KvStoreKind = Field(description="lmcache or mooncake; the engine's image must hold its package.")
    address: str = Field(
        min_length=3,
        max_length=1024,
        description="Where the store is: of lmcache its remote_url (lm://HOST:PORT, redis://HOST:PORT), of mooncake "
        "HOST:PORT of its master.",
    )
    size: ByteSize = Field(description="Memory that each pod adds; it counts against the memory of its container.")
    metadata: str | None = Field(
        None,
        min_length=3,
        max_length=1024,
        description="Address of Mooncake's metadata service; default: none, the clients tell each other "
        "(P2PHANDSHAKE).",
    )
    protocol: Literal["rdma", "tcp"] = Field("rdma", description="How Mooncake moves blocks; LMCache has its own way.")


class KvCache(Part):
    """What a role keeps of its KV cache outside the accelerator."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.store) || !has(self.tiers) || size(self.tiers) == 0",
                "a store has memory of its own on every node; remove tiers, or store",
                field_path=".store",
            )
        )
    )

    tiers: Tiers = Field((), description="Slower memory behind the accelerator's, one of each kind.")
    store: KvStore | None = Field(None, description="A store beside the pool, in place of tiers.")

    def tier(self, kind: TierKind) -> KvTier | None:
        """Return the tier of a kind; None when there is none."""
        return next((tier for tier in self.tiers if tier.kind == kind), None)

    def bytes(self, kind: TierKind) -> int:
        """Return the size of the tier of a kind in bytes; 0 when there is none."""
        found = self.tier(kind)
        return parse_bytes(found.size) if found else 0
