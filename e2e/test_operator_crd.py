"""The CRD on a real API server: every rule lets the right manifest through and refuses the wrong one by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from twinpool.core import protocol
from twinpool.core.crd import custom_resource_definition
from twinpool.core.protocol import Policy
from twinpool.core.spec import InferencePool
from twinpool.core.units import BYTES_PATTERN, CPU_PATTERN, DURATION_PATTERN
from twinpool.demo.crd_case import manifest
from twinpool.demo.crd_rules import CASES, elastic, without

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import Cluster

pytestmark = pytest.mark.cluster

CRD = f"{protocol.PLURAL}.{protocol.GROUP}"
#: A namesake of the Gateway API Inference Extension, as far as names go.
NAMESAKE = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "inferencepools.inference.networking.k8s.io",
        "annotations": {"api-approved.kubernetes.io": "unapproved, a stand-in for tests"},
    },
    "spec": {
        "group": "inference.networking.k8s.io",
        "scope": "Namespaced",
        "names": {
            "kind": "InferencePool",
            "plural": "inferencepools",
            "singular": "inferencepool",
            "shortNames": ["infpool"],
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                },
            }
        ],
    },
}


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the CRD, and with a namesake of another group beside it."""
    cluster.kubectl("apply", "--server-side", "-f", str(Path(__file__).parents[1] / "crds"))
    cluster.kubectl("apply", "--server-side", "-f", "-", input=json.dumps(NAMESAKE))
    for name in (CRD, NAMESAKE["metadata"]["name"]):
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{name}", "--timeout=30s")
    yield cluster
    cluster.kubectl("delete", "crd", NAMESAKE["metadata"]["name"])


def rules() -> list[tuple[str, str]]:
    """Return place and text of every rule for what users write; rules about changes have tests of their own."""
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found: list[tuple[str, str]] = []

    def walk(node: Any, path: str) -> None:
        entries = [entry for entry in node.get("x-kubernetes-validations", ()) if "oldSelf" not in entry["rule"]]
        found.extend((path, entry["rule"]) for entry in entries)
        for name, inner in node.get("properties", {}).items():
            walk(inner, f"{path}.{name}")
        if "items" in node:
            walk(node["items"], f"{path}[]")

    walk(schema, "")
    return [entry for entry in found if not entry[0].startswith(".status")]


def dry_run(cluster: Cluster, namespace: str, manifests: list[dict[str, Any]]) -> tuple[str, str]:
    """Let the API server judge manifests without storing them; return what kubectl said on both channels."""
    text = yaml.safe_dump_all(manifests)
    done = cluster.kubectl(
        "-n", namespace, "apply", "--dry-run=server", "-f", "-", input=text, check=False, timeout=120
    )
    return done.stdout, done.stderr


def test_every_rule_has_a_case() -> None:
    places = [path for path, _ in rules()]
    for path in places:
        assert sum(case.path == path for case in CASES) >= places.count(path), f"no case for the rule at {path}"


def test_every_rule_accepts_what_is_right(api: Cluster, namespace: str) -> None:
    names = [case.names[0] or f"good-{n}" for n, case in enumerate(CASES)]
    said, complained = dry_run(
        api, namespace, [manifest(name, **case.good) for name, case in zip(names, CASES, strict=True)]
    )
    assert complained == ""
    assert said.count("created (server dry run)") == len(CASES)


def test_every_rule_refuses_what_is_wrong_and_names_the_field(api: Cluster, namespace: str) -> None:
    wrong = [
        (case.names[1] or f"bad-{n}-{m}", spec, case.words)
        for n, case in enumerate(CASES)
        for m, spec in enumerate((case.bad, *case.extra))
    ]
    said, complained = dry_run(api, namespace, [manifest(name, **spec) for name, spec, _ in wrong])
    assert said == ""
    # kubectl begins the complaint about one of many with its full kind, about a single one with the short kind.
    by_name = {text.split('"', 1)[0]: text for text in re.split(r'InferencePool(?:\.[a-z.]+)? "', complained)[1:]}
    for name, spec, words in wrong:
        assert all(word in by_name.get(name, "") for word in words), f"{spec}: {by_name.get(name)}"


def test_one_violation_gives_one_message(api: Cluster, namespace: str) -> None:
    _, complained = dry_run(api, namespace, [manifest("one", objectives={"ttft": "800"})])
    assert complained.count("spec.objectives.ttft") == 1


def test_a_colliding_flag_is_named(api: Cluster, namespace: str) -> None:
    _, complained = dry_run(api, namespace, [manifest("one", engine={"args": ["--ok", "--served_model_name=x"]})])
    assert "--served_model_name=x is set by Twinpool" in complained


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"decode": {"replica": 2}}, 'unknown field "spec.decode.replica"'),
        ({"engine": {"kind": "vllm", "sglang": True}}, 'unknown field "spec.engine.sglang"'),
        ({"decode": None}, "spec.decode"),
        ({"model": {}}, "spec.model.name"),
        ({"engine": {"kind": "tgi"}}, 'supported values: "vllm", "simulated"'),
        ({"decode": {"replicas": -1}}, "spec.decode.replicas"),
        ({"decode": {"replicas": "2"}}, "spec.decode.replicas"),
    ],
)
def test_kubectl_refuses_and_names_the_field(api: Cluster, namespace: str, spec: dict[str, Any], words: str) -> None:
    given_spec = manifest("one", **spec)
    given_spec["spec"] = {key: value for key, value in given_spec["spec"].items() if value is not None}
    said, complained = dry_run(api, namespace, [given_spec])
    assert said == ""
    assert words.lower() in complained.lower()


def test_scaling_and_the_scale_subresource_exclude_each_other(api: Cluster, namespace: str) -> None:
    body = manifest("elastic", **elastic())
    api.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(body))
    scale = ("-n", namespace, "scale", f"{CRD}/elastic", "--replicas=2")
    refused = api.kubectl(*scale, check=False).stderr
    assert "scaling decides the number of decode groups" in refused
    assert "spec.decode.replicas" in refused
    fixed = {**body, "spec": without(body["spec"], "scaling")}
    api.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(fixed))
    api.kubectl(*scale)


def test_prefill_without_decode_is_refused(api: Cluster, namespace: str) -> None:
    lonely = manifest("one", prefill={})
    del lonely["spec"]["decode"]
    _, complained = dry_run(api, namespace, [lonely])
    assert "spec.decode: Required value" in complained


def test_a_namesake_of_another_group_changes_nothing(api: Cluster, namespace: str) -> None:
    api.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(manifest("mine")))
    other = {"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": "other"}}
    api.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(other))
    for word in (protocol.SHORT_NAME, CRD):
        found = api.json("-n", namespace, "get", word)["items"]
        assert [(item["apiVersion"], item["metadata"]["name"]) for item in found] == [(protocol.API_VERSION, "mine")]
    api.kubectl("-n", namespace, "delete", protocol.SHORT_NAME, "mine", "--timeout=20s")


def test_the_table_shows_what_the_status_says(api: Cluster, namespace: str) -> None:
    api.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(manifest("table", prefill={"replicas": 0})))
    header, line = api.kubectl("-n", namespace, "get", protocol.SHORT_NAME).stdout.splitlines()
    assert header.split() == ["NAME", "MODEL", "PREFILL", "DECODE", "RATIO", "REVISION", "ROUTER", "READY", "AGE"]
    assert line.split()[:2] == ["table", "acme/model"]
    api.kubectl("-n", namespace, "delete", protocol.SHORT_NAME, "table", "--timeout=20s")


def test_explain_knows_every_field(api: Cluster) -> None:
    text = api.kubectl("explain", f"{CRD}.spec.decode", "--recursive").stdout
    assert "podTemplate" in text
    assert "drainTimeout" in text


NAMES = st.from_regex(r"\A[a-z][a-z0-9]{0,8}\Z")
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
MAPS = st.dictionaries(NAMES, TEXT, max_size=3)


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def pattern(text: str) -> st.SearchStrategy[str]:
    return st.from_regex(f"\\A{text.strip('^$')}\\Z", alphabet=st.characters(codec="ascii"))


ENVIRONMENT = st.lists(
    st.fixed_dictionaries({"name": NAMES}, optional={"value": TEXT}), max_size=3, unique_by=lambda item: item["name"]
)
ENGINE = {"args": st.lists(NAMES.map("--x-{}".format), max_size=3), "env": ENVIRONMENT}
ROLE = optional(
    replicas=st.integers(0, 1000),
    parallelism=st.sampled_from([1, 2, 4, 8]).map(lambda count: {"tensor": count}),
    resources=optional(cpu=pattern(CPU_PATTERN), memory=pattern(BYTES_PATTERN), shm=pattern(BYTES_PATTERN)),
    engine=optional(image=NAMES, **ENGINE),
    serviceAccountName=NAMES,
    scheduling=optional(
        nodeSelector=MAPS,
        tolerations=st.lists(optional(key=NAMES, operator=st.sampled_from(["Exists", "Equal"])), max_size=2),
        priorityClassName=NAMES,
    ),
    startupTimeout=pattern(DURATION_PATTERN),
    drainTimeout=pattern(DURATION_PATTERN),
    podTemplate=optional(metadata=optional(annotations=MAPS), spec=optional(hostNetwork=st.booleans())),
)
AMOUNT = st.one_of(st.integers(1, 1000), st.integers(1, 100).map("{}%".format))
SPEC = st.fixed_dictionaries(
    {"model": st.fixed_dictionaries({"name": NAMES}, optional={"maxModelLen": st.integers(1, 10**8)}), "decode": ROLE},
    optional={
        "prefill": ROLE,
        "engine": optional(
            kind=st.sampled_from(["vllm", "simulated"]), python=NAMES, preflight=st.booleans(), **ENGINE
        ),
        "objectives": optional(ttft=pattern(DURATION_PATTERN), percentile=st.integers(50, 99)),
        "routing": optional(
            replicas=st.integers(0, 64),
            policy=st.sampled_from(get_args(Policy)),
            service=optional(port=st.integers(1, 65535), annotations=MAPS),
        ),
        "rollout": optional(
            maxSurge=AMOUNT,
            maxUnavailable=AMOUNT,
            decode=optional(maxSurge=AMOUNT),
            progressDeadline=pattern(DURATION_PATTERN),
            paused=st.booleans(),
            revisionHistoryLimit=st.integers(0, 100),
        ),
    },
)


# No shrinking: every example costs a second, and a failing one names the field already.
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
@given(specs=st.lists(SPEC, min_size=12, max_size=12))
def test_a_pool_survives_the_api_server(api: Cluster, namespace: str, specs: list[dict[str, Any]]) -> None:
    """Model, manifest, API server and back again: nothing is lost and nothing is invented."""
    pools = [InferencePool.model_validate(manifest(f"p{n}", **spec)) for n, spec in enumerate(specs)]
    # JSON, because kubectl's YAML takes a plain n for a boolean.
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": [pool.to_manifest() for pool in pools]})
    # Not stored, so that nobody begins to serve them; defaults, pruning and rules are the real ones.
    done = api.kubectl("-n", namespace, "apply", "--dry-run=server", "-o", "json", "-f", "-", input=text, timeout=120)
    items = json.loads(done.stdout)["items"]
    read = [InferencePool.model_validate(item) for item in items]
    assert [pool.spec for pool in read] == [pool.spec for pool in pools]
