"""The CRD on a real API server: every rule lets the right manifest through and refuses the wrong one by name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
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


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    body = {"model": {"name": "acme/model"}, "decode": {}, **spec}
    return {"apiVersion": protocol.API_VERSION, "kind": protocol.KIND, "metadata": {"name": name}, "spec": body}


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return ``{a: {b: value}}`` for the path ``a.b``."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


@dataclass(frozen=True)
class Case:
    """A rule by its place in the schema, a manifest that it accepts, one that it refuses, and what it then says."""

    path: str
    good: dict[str, Any]
    bad: dict[str, Any]
    words: tuple[str, ...]
    names: tuple[str, str] = ("", "")
    extra: tuple[dict[str, Any], ...] = field(default=())


ARGS = [
    "--enforce-eager",
    "--max-num-seqs=8",
    "--data-parallel-backend=mp",
    "-5",
    "--",
    "-nothing",
    "--=x",
    "{'-t': 1}",
]
COLLIDING = [
    "--model=x",
    "--tensor-parallel-size",
    "--tensor_parallel_size=2",
    "-tp",
    "--kv-transfer-config.kv_role=kv_both",
    "--port=1",
    "-n2",
    "--speculative-config.num_speculative_tokens=3",
    "-sc",
]
COLLIDING_ENV = ["POD_IP", "VLLM_HOST_IP", "TWINPOOL_ANYTHING"]


def role_cases(role: str) -> list[Case]:
    split = (f"spec.{role}.parallelism", "must divide resources.gpu.perNode")
    return [
        Case(
            f".spec.{role}",
            {role: {"parallelism": {"tensor": 8, "pipeline": 2}}},
            {role: {"parallelism": {"tensor": 3}}},
            split,
            extra=(
                {role: {"parallelism": {"tensor": 4, "pipeline": 3}}},
                {role: {"parallelism": {"tensor": 2}, "resources": {"gpu": {"perNode": 0}}}},
            ),
        ),
        Case(
            f".spec.{role}",
            {role: {"parallelism": {"tensor": 2, "data": 8}}},
            {role: {"parallelism": {"tensor": 16, "data": 2}}},
            (f"spec.{role}.parallelism.data", "each copy (tensor x pipeline) must fit into a node"),
        ),
        Case(
            f".spec.{role}",
            {role: {"parallelism": {"data": 8, "expert": True}, "expertBalancing": {"redundantExperts": 32}}},
            {role: {"parallelism": {"data": 8}, "expertBalancing": {}}},
            (f"spec.{role}.expertBalancing", "needs parallelism.expert"),
            extra=({role: {"parallelism": {"pipeline": 2, "expert": True}, "expertBalancing": {}}},),
        ),
        *argument_cases(f"{role}.engine"),
        *unit_cases(f"{role}.resources.cpu", ["4", "0.5", "500m"], ["two", "4 ", "-1"]),
        *unit_cases(f"{role}.resources.memory", ["25Gi", "16"], ["25GB ", "25GB", "Gi", "0Gi"]),
        *unit_cases(f"{role}.resources.shm", ["8Gi"], ["8 Gi"]),
        *unit_cases(f"{role}.startupTimeout", ["30m"], ["800", "1.5h", "0s"]),
        *unit_cases(f"{role}.drainTimeout", ["800ms"], ["800"]),
    ]


def argument_cases(engine: str) -> list[Case]:
    args, env = f"{engine}.args", f"{engine}.env"
    return [
        Case(
            f".spec.{args}",
            nested(args, ARGS),
            nested(args, [*ARGS, COLLIDING[0]]),
            (f"spec.{args}", "is set by Twinpool"),
            extra=tuple(nested(args, [flag]) for flag in COLLIDING),
        ),
        Case(
            f".spec.{env}[].name",
            nested(env, [{"name": "A", "value": "1"}]),
            nested(env, [{"name": COLLIDING_ENV[0], "value": "1"}]),
            (f"spec.{env}[0].name", "is set by Twinpool"),
            extra=tuple(nested(env, [{"name": name}]) for name in COLLIDING_ENV),
        ),
    ]


def unit_cases(path: str, good: list[str], bad: list[str]) -> list[Case]:
    words = (f"spec.{path}", "must be")
    (first, *others) = bad
    made = [Case(f".spec.{path}", nested(path, value), nested(path, first), words) for value in good]
    return [*made, Case(f".spec.{path}", nested(path, good[0]), nested(path, first), words, extra=_all(path, others))]


def _all(path: str, values: list[str]) -> tuple[dict[str, Any], ...]:
    return tuple(nested(path, value) for value in values)


def band(low: str, high: str = "1:1") -> dict[str, Any]:
    return {"prefill": {}, "ratio": {"min": low, "max": high}}


def amount_cases(path: str) -> list[Case]:
    words = (f"spec.{path}", "must be a count from 0 to 1000, or a percentage")
    wrong = [-1, 1001, "1", "101%", "5.5%", "%"]
    good = [Case(f".spec.{path}", nested(path, value), nested(path, "x"), words) for value in (2, "25%", "100%")]
    return [*good, Case(f".spec.{path}", nested(path, 1), nested(path, "x%"), words, extra=_all(path, wrong))]


def speculating(**block: Any) -> dict[str, Any]:
    return {"speculation": block}


def tokens_case(role: str) -> Case:
    def made(tokens: Any) -> dict[str, Any]:
        return {**speculating(method="ngram"), role: {"speculation": {"tokens": tokens}}}

    path = f"spec.{role}.speculation.tokens"
    return Case(f".{path}", made(4), made(0), (path, "1 to 32, or auto"), extra=(made(33), made("4"), made("all")))


def tier_cases(role: str) -> list[Case]:
    """Return the cases of what a role keeps of its KV cache outside the accelerator."""
    host = {"kind": "host", "size": "64Gi"}
    disk = {"kind": "disk", "size": "1Ti", "storageClass": "local-nvme"}
    shared = {"kind": "shared", "size": "4Ti", "claim": "kv"}
    path = f"spec.{role}.kvCache"

    def made(*tiers: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {role: {"kvCache": {"tiers": list(tiers)}, **more}}

    wide = {"parallelism": {"tensor": 16}}
    alone = {"parallelism": {"tensor": 8, "data": 2}}
    within = (f"{path}.tiers", "need a host tier")
    odd = {**host, "storageClass": "x"}
    bare = without(shared, "claim")
    both = {**disk, "claim": "kv"}
    return [
        Case(f".{path}.tiers", made(host, disk, shared), made(disk), within, extra=(made(shared),)),
        Case(f".{path}.tiers[]", made(host, disk), made(odd), (path, "belongs to a disk tier")),
        Case(
            f".{path}.tiers[]",
            made(host, shared),
            made(host, bare),
            (path, "a shared tier needs claim"),
            extra=(made(host, both),),
        ),
        Case(f".{path}.tiers[].size", made(host), made({**host, "size": "64GB"}), (path, "must be a size")),
        Case(f".spec.{role}", made(host, **alone), made(host, **wide), (path, "within a node")),
    ]


def stuck_case(role: str, good: dict[str, Any], bad: dict[str, Any], *more: dict[str, Any]) -> Case:
    """Return a case for the rule that a group must be allowed to be one more or one fewer."""
    words = ("spec.rollout.maxSurge", f"cannot both be 0 for {role}")
    return Case(".spec.rollout", {"rollout": good}, {"rollout": bad}, words, extra=tuple({"rollout": m} for m in more))


def elastic(spec: dict[str, Any] | None = None, **scaling: Any) -> dict[str, Any]:
    """Return a pool whose numbers follow the work, with changes to its spec and to the block."""
    block = {"prefill": {"max": 4}, "decode": {"max": 4}, **scaling}
    return {"prefill": {}, "objectives": {"ttft": "1s", "itl": "40ms"}, "scaling": block, **(spec or {})}


def without(spec: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != name}


def scaling_cases() -> list[Case]:
    two = {"prefill": {"parallelism": {"tensor": 2}}}
    never = {"handoff": {"conditional": "never"}}
    return [
        Case(".spec", elastic(), without(elastic(), "prefill"), ("spec.scaling", "without a prefill role")),
        Case(
            ".spec",
            elastic(),
            without(elastic(), "objectives"),
            ("spec.objectives", "set objectives.ttft"),
            extra=(elastic({"objectives": {"ttft": "1s"}}),),
        ),
        Case(".spec", elastic({"handoff": {}}), elastic(never), ("spec.handoff.conditional", "is never")),
        Case(
            ".spec",
            elastic(two, gpuBudget=3),
            elastic(two, gpuBudget=2),
            ("spec.scaling.gpuBudget", "less than prefill.min and decode.min"),
        ),
        *(
            Case(
                f".spec.scaling.{role}",
                elastic(**{role: {"min": 0, "max": 4}}),
                elastic(**{role: {"min": 5, "max": 4}}),
                (f"spec.scaling.{role}.min", "must not be above max"),
            )
            for role in ("prefill", "decode")
        ),
        Case(".spec.scaling.window", elastic(window="30s"), elastic(window="30"), ("spec.scaling.window", "must be")),
        *(
            Case(
                f".spec.scaling.stabilization.{name}",
                elastic(stabilization={name: "10s"}),
                elastic(stabilization={name: "0s"}),
                (f"spec.scaling.stabilization.{name}", "must be"),
            )
            for name in ("scaleIn", "scaleOut")
        ),
    ]


CASES: list[Case] = [
    *scaling_cases(),
    Case(".spec", band("1:4"), {"ratio": {"min": "1:4", "max": "1:2"}}, ("spec.ratio", "needs a prefill role")),
    Case(
        ".spec",
        {**speculating(method="mtp"), "decode": {"speculation": {"tokens": "auto"}}},
        {"decode": {"speculation": {"tokens": 2}}},
        ("spec.speculation", "needs the pool's spec.speculation"),
        extra=({"prefill": {"speculation": {}}},),
    ),
    Case(
        ".spec",
        {"engine": {"kvEvents": True}, "prefill": {}},
        {"engine": {"kvEvents": True}, "decode": {"parallelism": {"data": 2}}},
        ("spec.engine", "the KV events of one rank"),
        extra=({"engine": {"kvEvents": True}, "prefill": {"parallelism": {"data": 2}}},),
    ),
    Case(
        ".spec.speculation",
        speculating(method="eagle3", model="org/draft"),
        speculating(method="eagle3"),
        ("spec.speculation.model", "need a model that drafts"),
        extra=(speculating(method="ngram", model="org/draft"),),
    ),
    tokens_case("prefill"),
    tokens_case("decode"),
    *tier_cases("prefill"),
    *tier_cases("decode"),
    Case(".spec.ratio", band("1:2", "1:2"), band("1:1", "1:2"), ("spec.ratio.min", "must not be above ratio.max")),
    Case(".spec.ratio.min", band("1:999"), band("1:0"), ("spec.ratio.min", "must be PREFILL:DECODE")),
    Case(".spec.ratio.max", band("1:4", "3:4"), band("1:4", "0.75"), ("spec.ratio.max", "must be PREFILL:DECODE")),
    Case("", {}, {}, ("metadata.name", "at most 37"), names=("a" * 37, "a" * 38)),
    Case("", {}, {}, ("metadata.name", "start with a letter"), names=("a-1", "1-a")),
    Case(
        ".spec.model",
        {"model": {"name": "m", "revision": "main"}},
        {"model": {"name": "m", "revision": "main", "source": "pvc://claim/m"}},
        ("spec.model.revision", "Hugging Face hub"),
    ),
    Case(
        ".spec.model",
        {"model": {"name": "m", "cache": {"hostPath": "/var/lib/weights"}}},
        {"model": {"name": "m", "source": "oci://image", "cache": {"hostPath": "/var/lib/weights"}}},
        ("spec.model.cache", "Hugging Face hub"),
    ),
    Case(
        ".spec.model",
        {"model": {"name": "m", "source": "pvc://c/m", "checksum": f"sha256:{'0' * 64}"}},
        {"model": {"name": "m", "checksum": f"sha256:{'0' * 64}"}},
        ("spec.model.checksum", "belongs to"),
    ),
    Case(
        ".spec.model.checksum",
        {"model": {"name": "m", "source": "oci://image", "checksum": f"sha256:{'a' * 64}"}},
        {"model": {"name": "m", "source": "oci://image", "checksum": f"sha256:{'A' * 64}"}},
        ("spec.model.checksum", "hexadecimal"),
    ),
    Case(
        ".spec.model.cache",
        {"model": {"name": "m", "cache": {"claim": "weights"}}},
        {"model": {"name": "m", "cache": {"claim": "weights", "hostPath": "/w"}}},
        ("spec.model.cache", "either hostPath or claim"),
        extra=({"model": {"name": "m", "cache": {}}},),
    ),
    Case(
        ".spec.model.cache.hostPath",
        {"model": {"name": "m", "cache": {"hostPath": "/var/lib/weights"}}},
        {"model": {"name": "m", "cache": {"hostPath": "weights"}}},
        ("spec.model.cache.hostPath", "absolute"),
        extra=({"model": {"name": "m", "cache": {"hostPath": "/var/../etc"}}},),
    ),
    Case(".spec.model.name", {"model": {"name": "org/m-1.0_x:y"}}, {"model": {"name": "-m"}}, ("spec.model.name",)),
    Case(
        ".spec.model.aliases[]",
        {"model": {"name": "m", "aliases": ["a", "org/b:1"]}},
        {"model": {"name": "m", "aliases": ["a", "-b"]}},
        ("spec.model.aliases", "letters, digits"),
    ),
    Case(
        ".spec.model.source",
        {"model": {"name": "m", "source": "file:///data/m"}},
        {"model": {"name": "m", "source": "s3://bucket/m"}},
        ("spec.model.source", "hf://ORG/NAME"),
        extra=(
            {"model": {"name": "m", "source": "file://m/x"}},
            {"model": {"name": "m", "source": "pvc:///x"}},
            {"model": {"name": "m", "source": "oci://#path"}},
        ),
    ),
    Case(
        ".spec.model.source",
        {"model": {"name": "m", "source": "oci://registry.example:5000/models/llama@sha256:0123#weights"}},
        {"model": {"name": "m", "source": "oci://"}},
        ("spec.model.source",),
    ),
    *argument_cases("engine"),
    Case(
        ".spec.engine",
        {"engine": {"kvEvents": True, "args": ["--prefix-caching=x", "--enable-prefix-caching"]}},
        {"engine": {"kvEvents": True, "args": ["--no-enable-prefix-caching"]}},
        ("spec.engine.args", "kvEvents needs prefix caching"),
        extra=({"engine": {"kvEvents": True, "args": ["--prefix_caching_hash_algo=xxhash"]}},),
    ),
    *role_cases("prefill"),
    *role_cases("decode"),
    *unit_cases("objectives.ttft", ["800ms"], ["800"]),
    *unit_cases("objectives.itl", ["40ms"], ["40 ms"]),
    *unit_cases("routing.queue.timeout", ["30s"], ["30"]),
    *unit_cases("routing.queue.hold", ["5m"], ["5", "0s"]),
    *unit_cases("routing.resources.cpu", ["1"], ["one"]),
    *unit_cases("routing.resources.memory", ["512Mi"], ["512MB"]),
    *(
        case
        for block in ("rollout", "rollout.prefill", "rollout.decode")
        for name in ("maxSurge", "maxUnavailable")
        for case in amount_cases(f"{block}.{name}")
    ),
    *unit_cases("rollout.progressDeadline", ["1h"], ["60"]),
    stuck_case("decode", {"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 0}, {"maxSurge": "0%"}),
    stuck_case(
        "decode", {"maxSurge": 0, "decode": {"maxSurge": 1}, "prefill": {"maxSurge": 1}}, {"decode": {"maxSurge": 0}}
    ),
    stuck_case("prefill", {"prefill": {"maxSurge": 0, "maxUnavailable": "1%"}}, {"prefill": {"maxSurge": 0}}),
    Case(
        ".spec.tracing.endpoint",
        {"tracing": {"endpoint": "http://collector.monitoring.svc:4318", "sampling": 0.5}},
        {"tracing": {"endpoint": "collector:4317"}},
        ("spec.tracing.endpoint", "address of a collector"),
    ),
]


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
