"""The CustomResourceDefinition, generated from the models in :mod:`twinpool.core.spec`.

pydantic writes JSON schema with references and nulls; the API server wants a structural schema with neither. The
rules of the translation:

* references are put in place, titles are dropped;
* ``X | None`` becomes an optional X without default: absent means None;
* a block whose every field has a default gets the default ``{}``, so that the API server fills it in and CEL rules
  may read its fields without ``has()``;
* a ``pattern`` that has a CEL rule beside it is dropped: one violation gives one message, the readable one.
"""

from __future__ import annotations

import json
from typing import Any

from twinpool.core import protocol
from twinpool.core.spec import InferencePoolSpec, InferencePoolStatus

Schema = dict[str, Any]

_KEPT = (
    "type",
    "description",
    "enum",
    "const",
    "format",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "maxItems",
    "minItems",
    "maxProperties",
    "required",
)

PRINTER_COLUMNS: tuple[dict[str, str], ...] = (
    {
        "name": "Model",
        "type": "string",
        "jsonPath": ".spec.model.name",
        "description": "Model that is served",
    },
    {
        "name": "Prefill",
        "type": "string",
        "jsonPath": ".status.prefill.summary",
        "description": "Prefill groups, routable/wanted",
    },
    {
        "name": "Decode",
        "type": "string",
        "jsonPath": ".status.decode.summary",
        "description": "Decode groups, routable/wanted",
    },
    {
        "name": "Ratio",
        "type": "string",
        "jsonPath": ".status.ratio",
        "description": "Routable prefill to routable decode groups",
    },
    {
        "name": "Revision",
        "type": "string",
        "jsonPath": ".status.revision",
        "description": "Revision of the newest pods",
    },
    {
        "name": "Router",
        "type": "string",
        "jsonPath": ".status.router.summary",
        "description": "Router pods, ready/wanted",
    },
    {
        "name": "Ready",
        "type": "string",
        "jsonPath": ".status.conditions[?(@.type=='Ready')].status",
        "description": "Whether the pool answers",
    },
    {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
)

#: ``kubectl scale`` and autoscalers set the decode groups; prefill groups follow within ``spec.ratio``.
SCALE: dict[str, str] = {
    "specReplicasPath": ".spec.decode.replicas",
    "statusReplicasPath": ".status.decode.created",
    "labelSelectorPath": ".status.selector",
}

_NAME_RULES = [
    {
        "rule": f"size(self.metadata.name) <= {protocol.MAX_POOL_NAME}",
        "message": f"metadata.name must have at most {protocol.MAX_POOL_NAME} characters, so that the names of the "
        "pool's pods fit into 63",
    },
    {
        "rule": "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "message": "metadata.name must start with a letter and hold lower-case letters, digits and - only, since a "
        "Service is named after it",
    },
]


def custom_resource_definition() -> Schema:
    """Return the CRD as a plain dictionary that shares no part with itself, ready to be written as YAML."""
    definition: Schema = json.loads(json.dumps(_definition()))
    return definition


def _definition() -> Schema:
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{protocol.PLURAL}.{protocol.GROUP}",
            "labels": {protocol.LABEL_MANAGED_BY: protocol.MANAGED_BY},
        },
        "spec": {
            "group": protocol.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": protocol.KIND,
                "listKind": f"{protocol.KIND}List",
                "plural": protocol.PLURAL,
                "singular": protocol.KIND.lower(),
                "shortNames": [protocol.SHORT_NAME],
                "categories": ["twinpool"],
            },
            "versions": [
                {
                    "name": protocol.VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}, "scale": dict(SCALE)},
                    "additionalPrinterColumns": [dict(column) for column in PRINTER_COLUMNS],
                    "schema": {"openAPIV3Schema": _root_schema()},
                }
            ],
        },
    }


def _root_schema() -> Schema:
    return {
        "type": "object",
        "description": "A model served by twin pools of prefill and decode workers behind one endpoint.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(InferencePoolSpec.model_json_schema(by_alias=True, mode="validation")),
            "status": structural(
                InferencePoolStatus.model_json_schema(by_alias=True, mode="validation"), defaults=False
            ),
        },
        "x-kubernetes-validations": _NAME_RULES,
    }


def structural(schema: Schema, *, defaults: bool = True) -> Schema:
    """Translate pydantic's JSON schema into a structural schema; ``defaults`` says whether defaults are written."""
    return _Translator(schema.get("$defs", {}), defaults).block(schema)


class _Translator:
    def __init__(self, definitions: dict[str, Schema], defaults: bool) -> None:
        self.definitions = definitions
        self.defaults = defaults

    def block(self, schema: Schema) -> Schema:
        schema = self._resolved(schema)
        result: Schema = {key: schema[key] for key in _KEPT if key in schema}
        result.update({key: value for key, value in schema.items() if key.startswith("x-kubernetes-")})
        if "pattern" in result and "x-kubernetes-validations" in result:
            del result["pattern"]
        if "const" in result:
            result["enum"] = [result.pop("const")]
        if "items" in schema:
            result["items"] = self.block(schema["items"])
        if isinstance(schema.get("additionalProperties"), dict):
            result["additionalProperties"] = self.block(schema["additionalProperties"])
        if "properties" in schema:
            required = schema.get("required", [])
            result["properties"] = {
                name: self._property(value, name in required) for name, value in schema["properties"].items()
            }
        return result

    def _property(self, schema: Schema, required: bool) -> Schema:
        result = self.block(schema)
        if not self.defaults or required or "anyOf" in schema:
            return result
        default = schema.get("default", {} if "properties" in result and "required" not in result else None)
        if default not in (None, []):
            result["default"] = default
        return result

    def _resolved(self, schema: Schema) -> Schema:
        """Follow references and drop the null of ``X | None``; what stands beside them wins (descriptions)."""
        beside = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "allOf")}
        if "anyOf" in schema:
            (inner,) = [option for option in schema["anyOf"] if option.get("type") != "null"]
        elif "$ref" in schema:
            inner = self.definitions[schema["$ref"].rsplit("/", 1)[1]]
        else:
            return schema
        return self._resolved({**inner, **beside})
