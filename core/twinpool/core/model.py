"""The ``model`` block: what is served, where its weights come from, and how they are checked.

``docs/weights.md`` says what becomes of them.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from twinpool.core.fields import Part, SecretReference, rule, rules

_MODEL_ID = rules(
    rule(
        "self.matches('^[A-Za-z0-9][A-Za-z0-9._/:-]*$')",
        "must start with a letter or digit and hold letters, digits and . _ / : - only",
    )
)
Alias = Annotated[str, Field(min_length=1, max_length=253, json_schema_extra=_MODEL_ID)]


class ModelCache(Part):
    """Where a model of the hub is kept, so that it is fetched once for many pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(rule("has(self.hostPath) != has(self.claim)", "give either hostPath or claim"))
    )

    host_path: str | None = Field(
        None,
        min_length=2,
        max_length=1024,
        description="Folder of each node, made where it is missing: one download for each node, by whichever pod comes "
        "first.",
        json_schema_extra=rules(
            rule(
                "self.startsWith('/') && !self.contains('/..')", "must be an absolute path without '..', on every node"
            )
        ),
    )
    claim: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="Volume claim of the namespace that all pods may mount (ReadWriteMany): one download for all.",
    )


class Adapter(Part):
    """A LoRA adapter that is loaded beside the model; clients ask for it as for a model."""

    name: Alias = Field(description="Id that clients ask for.")
    source: str = Field(
        min_length=6,
        max_length=1024,
        description="Where it is: hf://ORG/NAME, or file:///PATH inside the engine's container (the volume of a pvc:// "
        "or oci:// model is at /models).",
        json_schema_extra=rules(
            rule("self.matches('^(hf://[^/]+/[^/]+|file:///.+)$')", "must be hf://ORG/NAME or file:///ABSOLUTE/PATH")
        ),
    )


class Model(Part):
    """What is served."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.revision) || !has(self.source) || self.source.startsWith('hf://')",
                "revision belongs to a model of the Hugging Face hub; leave it out with a pvc://, oci:// or file:// "
                "source",
                field_path=".revision",
            ),
            rule(
                "!has(self.cache) || !has(self.source) || self.source.startsWith('hf://')",
                "cache keeps a model of the Hugging Face hub; leave it out with a pvc://, oci:// or file:// source",
                field_path=".cache",
            ),
            rule(
                "!has(self.checksum) || (has(self.source) && !self.source.startsWith('hf://'))",
                "checksum belongs to a pvc://, oci:// or file:// source; the hub tells the checksums of its files",
                field_path=".checksum",
            ),
            rule(
                "!has(self.adapters) || self.adapters.all(a, a.name != self.name && (!has(self.aliases) || "
                "!(a.name in self.aliases)))",
                "an adapter needs a name that is neither the model's nor one of its aliases",
                field_path=".adapters",
            ),
        )
    )

    name: str = Field(
        min_length=1,
        max_length=253,
        description="Model id that clients ask for; without a source it is also the id on the Hugging Face hub.",
        json_schema_extra=_MODEL_ID,
    )
    aliases: tuple[Alias, ...] = Field(
        (),
        max_length=16,
        description="Other ids that clients may ask for; the routers put the name in their place, so a change restarts "
        "no worker.",
    )
    adapters: tuple[Adapter, ...] = Field(
        (),
        max_length=16,
        description="LoRA adapters of the model, loaded by every worker at its start.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    source: str | None = Field(
        None,
        min_length=6,
        max_length=1024,
        description="Where the weights are: hf://ORG/NAME (default: hf:// and the name), pvc://CLAIM/PATH, "
        "oci://IMAGE or oci://IMAGE#PATH (an image that holds them, mounted), or file:///PATH inside the engine's "
        "container.",
        json_schema_extra=rules(
            rule(
                "self.matches('^(hf://[^/]+(/[^/]+)?|pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/.*)?|oci://[^/#].*"
                "|file:///.+)$')",
                "must be hf://ORG/NAME, pvc://CLAIM/PATH, oci://IMAGE#PATH or file:///ABSOLUTE/PATH",
            )
        ),
    )
    revision: str | None = Field(
        None,
        min_length=1,
        max_length=253,
        description="Commit, tag or branch on the Hugging Face hub; pin it in production.",
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        le=100_000_000,
        description="Longest prompt and answer together, in tokens; default: the model's own.",
    )
    secret_ref: SecretReference | None = Field(
        None, description="Secret whose key HF_TOKEN opens a gated model on the Hugging Face hub."
    )
    cache: ModelCache | None = Field(
        None,
        description="Where weights of the Hugging Face hub are kept; without it each pod fetches them for itself, into "
        "space of its node's root disk, and keeps them over restarts of its container.",
    )
    checksum: str | None = Field(
        None,
        max_length=71,
        description="sha256:HEX of the file SHA256SUMS in the model's folder, by which every file is checked before "
        "the engine starts.",
        json_schema_extra=rules(
            rule("self.matches('^sha256:[0-9a-f]{64}$')", "must be sha256: and 64 hexadecimal digits")
        ),
    )
