"""The page of fields: each field of the definition is there once, with its default, bounds and rules."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from twinpool.core.crd import custom_resource_definition
from twinpool.core.reference import markdown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.core.crd import Schema


def root() -> Schema:
    (version,) = custom_resource_definition()["spec"]["versions"]
    found: Schema = version["schema"]["openAPIV3Schema"]
    return found


def fields(schema: Schema) -> Iterator[str]:
    block = schema.get("items", schema)
    for name, field in block.get("properties", {}).items():
        yield name
        yield from fields(field)


def section(title: str) -> str:
    return markdown().partition(f"## `{title}`\n")[2].partition("\n## ")[0]


def test_no_field_is_missing() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", markdown(), re.MULTILINE))
    properties = root()["properties"]
    assert named == {*fields(properties["spec"]), *fields(properties["status"])}


def test_links_lead_to_sections() -> None:
    titles = re.findall(r"^## `(.*)`$", markdown(), re.MULTILINE)
    assert len(titles) == len(set(titles))
    anchors = {re.sub(r"[^\w-]", "", title.lower()) for title in titles}
    assert set(re.findall(r"\(#([\w-]+)\)", markdown())) <= anchors


def test_a_row_says_type_bounds_and_default() -> None:
    assert "| `replicas` | integer, 0 to 1000 | `1` |" in section("spec.prefill")
    assert "| `startupTimeout` | duration | `30m` |" in section("spec.prefill")
    assert "| `kind` | `vllm` \\| `simulated` | `vllm` |" in section("spec.engine")
    assert "| `model` | object | **required** |" in section("spec")
    assert "| `nodeSelector` | map of string |  |" in section("spec.prefill.scheduling")
    assert "| `maxSurge` | integer or string | `1` |" in section("spec.rollout")


def test_equal_blocks_stand_once() -> None:
    assert "Workers that write tokens. Fields: [`spec.prefill`](#specprefill)" in section("spec")
    assert section("spec.decode") == ""


def test_rules_are_quoted_but_for_units() -> None:
    assert "* `ratio`: ratio needs a prefill role" in section("spec")
    assert "is set by Twinpool and cannot be given in args" in section("spec.engine"), "a computed message"
    assert "must be a duration" not in markdown()
    assert "at most 37 characters" in section("metadata")
