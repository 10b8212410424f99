"""The chart renders what it should: golden files, the manifests of ``deploy/``, the CRD, and clear refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.core.pod_defaults import PodDefaults
from twinpool.core.pod_defaults import parse as parse_pods
from twinpool.core.spec import InferencePool
from twinpool.core.topology import AUTO, NAMES, PRESETS, parse, topology
from twinpool.operator.logic.router_objects import router_objects
from twinpool.operator.logic.settings import Settings
from twinpool.operator.logic.worker_objects import headless_service

if TYPE_CHECKING:
    from tests.charts.conftest import Helm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHART = ROOT / "charts" / "twinpool"
SETS = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
Body = dict[str, Any]


def one(bodies: list[Body], kind: str, name: str = "twinpool-operator") -> Body:
    (found,) = [body for body in bodies if body["kind"] == kind and body["metadata"]["name"] == name]
    return found


def values(name: str) -> str:
    return f"--values={HERE / 'values' / name}.yaml"


@pytest.mark.parametrize("name", SETS)
def test_golden_render(helm: Helm, name: str) -> None:
    """Written again by ``TWINPOOL_GOLDEN=write python -m pytest tests/charts``; read what changed before you commit."""
    bodies = [body for body in helm.render(values(name)) if body["kind"] != "CustomResourceDefinition"]
    text = yaml.safe_dump_all(bodies, sort_keys=False, width=120)
    golden = HERE / "golden" / f"{name}.yaml"
    if os.environ.get("TWINPOOL_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


def test_there_are_six_sets_and_no_forgotten_golden_file() -> None:
    assert len(SETS) == 6
    assert sorted(path.stem for path in (HERE / "golden").iterdir()) == SETS


def test_lint_has_nothing_to_say(helm: Helm) -> None:
    for name in SETS:
        said = helm.run("lint", "--strict", str(CHART), values(name), "--kube-version=1.36.0").stdout
        assert "0 chart(s) failed" in said
        assert "[WARNING]" not in said


def without_release(body: Body) -> Body:
    """Return an object without what only a release has: labels of helm, images' environment, an explicit policy."""
    copy: Body = json.loads(json.dumps(body))
    copy["metadata"].pop("labels", None)
    if copy["kind"] == "Deployment":
        template = copy["spec"]["template"]
        template["metadata"].pop("labels", None)
        copy["spec"].pop("selector")
        (container,) = template["spec"]["containers"]
        container.pop("imagePullPolicy", None)
        for entry in list(container["env"]):
            if entry["name"] in SET_BY_THE_CHART:
                assert entry["value"] == SET_BY_THE_CHART[entry["name"]], (
                    "the chart's default is not the operator's own"
                )
                container["env"].remove(entry)
    return copy


SET_BY_THE_CHART = {
    "TWINPOOL_ROUTER_IMAGE": Settings().router_image,
    "TWINPOOL_WORKER_IMAGE": Settings().worker_image,
    "TWINPOOL_TOPOLOGY": AUTO,
    "TWINPOOL_LOG_LEVEL": "info",
}


@pytest.mark.parametrize(("scope", "file"), [("cluster", "operator.yaml"), ("namespace", "namespaced/operator.yaml")])
def test_the_chart_and_the_manifests_install_the_same_operator(helm: Helm, scope: str, file: str) -> None:
    text = (ROOT / "deploy" / file).read_text().replace("namespace: team-a", "namespace: twinpool-system")
    wanted = [body for body in yaml.safe_load_all(text) if body["kind"] != "Namespace"]
    bodies = helm.render(f"--set=scope={scope}", "--set=crds.install=false", "--set=rbac.aggregate=false")
    assert sorted(body["kind"] for body in bodies) == sorted(body["kind"] for body in wanted)
    for body in wanted:
        assert without_release(one(bodies, body["kind"])) == without_release(body), body["kind"]


def test_the_crd_is_the_generated_one_and_is_kept(helm: Helm) -> None:
    (file,) = (ROOT / "crds").glob("*.yaml")
    wanted = yaml.safe_load(file.read_text())
    found = one(helm.render(), "CustomResourceDefinition", wanted["metadata"]["name"])
    assert found["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    found["metadata"].pop("labels")
    wanted["metadata"].pop("labels")
    assert found == wanted
    assert not [x for x in helm.render("--set=crds.install=false") if x["kind"] == "CustomResourceDefinition"]


def test_pod_monitors_come_with_their_crd(helm: Helm) -> None:
    def monitors(*arguments: str) -> int:
        return sum(body["kind"] == "PodMonitor" for body in helm.render(*arguments))

    api = "--api-versions=monitoring.coreos.com/v1/PodMonitor"
    assert monitors() == 0
    assert monitors(api) == monitors("--set=podMonitors.create=always") == 4
    assert monitors(api, "--set=podMonitors.create=never") == 0


def test_service_monitors_come_instead_of_pod_monitors(helm: Helm) -> None:
    def made(*arguments: str) -> tuple[int, int]:
        kinds = [body["kind"] for body in helm.render(*arguments)]
        return kinds.count("PodMonitor"), kinds.count("ServiceMonitor")

    pod, service = (f"--api-versions=monitoring.coreos.com/v1/{kind}Monitor" for kind in ("Pod", "Service"))
    assert made(service) == (0, 3), "a cluster that knows ServiceMonitors only"
    assert made(pod, service) == (4, 0), "nothing is scraped twice"
    assert made(pod, service, "--set=serviceMonitors.create=always") == (0, 3)
    assert made(pod, service, "--set=podMonitors.create=never") == (0, 3)
    assert made(service, "--set=serviceMonitors.create=never") == (0, 0)
    both = ("--set=podMonitors.create=always", "--set=serviceMonitors.create=always")
    assert "scrape everything twice" in helm.run("template", str(CHART), *both, check=False).stderr


def test_service_monitors_select_what_the_operator_makes(helm: Helm) -> None:
    """Their selectors fit the Services of pools, and their ports are named in the pods."""
    pool = InferencePool.model_validate(yaml.safe_load((ROOT / "examples" / "simulated.yaml").read_text()))
    services = [headless_service(pool, role) for role in protocol.ROLES]
    services += [body for body in router_objects(pool, Settings(), 0) if body["kind"] == "Service"]
    bodies = helm.render("--set=serviceMonitors.create=always")
    services.append(one(bodies, "Service", "twinpool-operator-metrics"))
    monitors = [body for body in bodies if body["kind"] == "ServiceMonitor"]
    picked = {
        m["metadata"]["name"]: [s["metadata"]["name"] for s in services if fits(m["spec"]["selector"], s)]
        for m in monitors
    }
    assert picked == {
        "twinpool-operator": ["twinpool-operator-metrics"],
        "twinpool-routers": ["simulated-router"],
        "twinpool-workers": ["simulated-prefill", "simulated-decode"],
    }
    ports = {m["metadata"]["name"]: [e["targetPort"] for e in m["spec"]["endpoints"]] for m in monitors}
    assert ports["twinpool-routers"] == [protocol.ROUTER_ADMIN_PORT_NAME]
    assert ports["twinpool-workers"] == [protocol.LAUNCHER_PORT_NAME, protocol.ENGINE_PORT_NAME]


def fits(selector: Body, service: Body) -> bool:
    labels = service["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(item["key"]) in item["values"] for item in selector.get("matchExpressions", [])
    )


def test_topology_presets_and_levels_are_those_of_the_operator() -> None:
    known = SCHEMA["properties"]["topology"]["properties"]
    assert known["preset"]["enum"] == [AUTO, *PRESETS]
    assert tuple(known["levels"]["properties"]) == NAMES[:-1]


def test_topology_is_a_preset_or_labels_which_the_operator_can_read(helm: Helm) -> None:
    (container,) = one(helm.render(values("airgapped")), "Deployment")["spec"]["template"]["spec"]["containers"]
    (said,) = [entry["value"] for entry in container["env"] if entry["name"] == "TWINPOOL_TOPOLOGY"]
    assert parse(said) == topology(
        {"block": ("example.com/block",), "rack": ("example.com/rack", "example.com/old-rack")}
    )
    both = ("--set=topology.preset=eks", "--set=topology.levels.rack={a}")
    assert "are both set - leave topology.preset" in helm.run("template", str(CHART), *both, check=False).stderr


def test_what_all_pools_get_is_what_the_operator_reads(helm: Helm) -> None:
    def said(name: str) -> PodDefaults:
        (container,) = one(helm.render(values(name)), "Deployment")["spec"]["template"]["spec"]["containers"]
        (text,) = [entry["value"] for entry in container["env"] if entry["name"] == "TWINPOOL_PODS"]
        return parse_pods(text)

    found = said("available")
    assert found.labels == {"cost-center": "42", "team": "serving"}
    assert (found.router.priority_class_name, found.router.node_selector) == ("serving-critical", {"pool": "cpu"})
    assert (found.worker.priority_class_name, found.worker.tolerations[0].key) == ("serving", "nvidia.com/gpu")
    found = said("airgapped")
    assert [secret.name for secret in found.image_pull_secrets] == ["mirror"]
    assert [entry.name for entry in found.worker.env] == ["HTTPS_PROXY", "HF_ENDPOINT"]


def test_labels_are_on_every_object_and_every_pod(helm: Helm) -> None:
    kinds = ("PodMonitor", "PrometheusRule")
    apis = [f"--api-versions=monitoring.coreos.com/v1/{kind}" for kind in kinds]
    settings = ("--set-string=labels.cost=42", "--set=operator.replicas=2", "--set=networkPolicy.enabled=true")
    more = ("--set=networkPolicy.poolNamespaces={serving}", "--set=operator.podLabels.cost=own")
    bodies = helm.render(values("endpoints"), *apis, *settings, *more)
    assert len(bodies) > 20
    unlabelled = [(x["kind"], x["metadata"]["name"]) for x in bodies if x["metadata"]["labels"].get("cost") != "42"]
    assert not unlabelled
    pods = one(bodies, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pods["cost"] == "own", "the nearer one wins, and neither is written twice"


def test_every_value_has_its_default_and_its_schema() -> None:
    def keys(schema: Body) -> set[str] | dict[str, Any]:
        return {name: keys(inner) for name, inner in schema.get("properties", {}).items()}

    def given(value: Any, schema: Body) -> Any:
        inner = schema.get("properties", {})
        return {name: given(value[name], inner[name]) for name in value if name in inner} if inner else {}

    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    wanted = keys({"properties": {k: v for k, v in SCHEMA["properties"].items() if k != "global"}})
    wanted["operator"]["resources"].pop("claims")  # type: ignore[index]
    wanted["topology"]["levels"] = {}  # type: ignore[index]
    assert given(defaults, SCHEMA) == wanted


def wrong(schema: Body) -> Any:
    """Return values that are wrong in every single place."""
    if "properties" in schema:
        return {name: wrong(inner) for name, inner in schema["properties"].items()}
    if schema.get("type") == "array" and "properties" in schema["items"]:
        return [wrong(schema["items"])]
    return 5 if schema.get("type") != "integer" else "five"


def places(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict):
        return [place for name, inner in value.items() for place in places(inner, f"{path}/{name}")]
    if isinstance(value, list):
        return [place for index, inner in enumerate(value) for place in places(inner, f"{path}/{index}")]
    return [path]


def test_every_wrong_type_is_refused_with_its_place(helm: Helm, tmp_path: Path) -> None:
    values = wrong(SCHEMA)
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(values))
    done = helm.run("template", "twinpool", str(CHART), f"--values={file}", check=False)
    assert done.returncode
    missed = [place for place in places(values) if f"at '{place}'" not in done.stderr]
    assert not missed, done.stderr


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("operator.replica=2", "at '/operator': additional properties 'replica' not allowed"),
        ("operator.replicas=two", "at '/operator/replicas': got string, want integer"),
        ("topology.preset=aws", "at '/topology/preset': value must be one of 'auto', 'eks'"),
        ("scope=all", "at '/scope': value must be one of 'cluster', 'namespace'"),
        ("images.router.digest=latest", "at '/images/router/digest': 'latest' does not match pattern '^(sha256:"),
        ("operator.env[0].name=TWINPOOL_NAMESPACE", "at '/operator/env/0/name': 'not' failed"),
        ("endpoints[0].pool=a", "at '/endpoints/0': missing property 'namespace'"),
        ("endpoints[0].namespace=b", "at '/endpoints/0': missing property 'pool'"),
        ("operator.tolerations=yes", "at '/operator/tolerations': got string, want array"),
        ("operator.tolerations[0].effect=Never", "at '/operator/tolerations/0/effect': value must be one of 'NoSch"),
        ("pools.worker.toleration[0].key=a", "at '/pools/worker': additional properties 'toleration' not allowed"),
        ("pools.worker.env[0].name=TWINPOOL_A", "at '/pools/worker/env/0/name': 'not' failed"),
        ("labels.a=5", "at '/labels/a': got number, want string"),
        ("operator.podLabels.app\\.kubernetes\\.io/name=a", "operator.podLabels: app.kubernetes.io/name is set"),
        ("labels.helm\\.sh/chart=a", "labels: helm.sh/chart is set by Twinpool, which finds its objects by it"),
        ("pools.labels.serving\\.twinpool\\.dev/pool=a", "pools.labels: serving.twinpool.dev/pool is set by Twin"),
        ("networkPolicy.clients[0].ipBlock.cidr=all", "at '/networkPolicy/clients/0/ipBlock/cidr': 'all' does not"),
    ],
)
def test_a_wrong_value_is_refused_in_words(helm: Helm, setting: str, words: str) -> None:
    done = helm.run("template", "twinpool", str(CHART), "--set", setting, check=False)
    assert done.returncode
    assert words in done.stderr


def test_dashboards_and_alerts_are_what_the_repository_holds(helm: Helm) -> None:
    assert not [body for body in helm.render() if body["kind"] in ("ConfigMap", "PrometheusRule")]
    bodies = helm.render("--api-versions=monitoring.coreos.com/v1/PrometheusRule", "--set=alerts.labels.team=serving")
    (rule,) = [body for body in bodies if body["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert rule["metadata"]["labels"]["team"] == "serving"
    shown = {name: text for body in bodies if body["kind"] == "ConfigMap" for name, text in body["data"].items()}
    files = sorted((CHART / "files" / "dashboards").iterdir())
    assert {name: json.loads(text) for name, text in shown.items()} == {
        path.name: json.loads(path.read_text()) for path in files
    }
    for body in bodies:
        if body["kind"] == "ConfigMap":
            assert body["metadata"]["labels"]["grafana_dashboard"] == "1"
