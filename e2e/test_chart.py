"""The chart's whole life on a real API server, with the real helm: no step of it restarts a worker."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import post
from twinpool.demo.load import Load
from twinpool.demo.scenario import condition, pods, pool, router_url
from twinpool.localcluster import cluster as clusters
from twinpool.localcluster.helm import ensure_helm
from twinpool.localcluster.images import default_images
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twinpool.localcluster.cluster import LocalCluster

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "twinpool"
SYSTEM, NAMESPACE, NAME = "twinpool-system", "serving", "simulated"
CRD = f"{protocol.PLURAL}.{protocol.GROUP}"


@dataclass(frozen=True)
class Helm:
    """Helm with files of its own, on one cluster."""

    program: Path
    home: Path
    cluster: LocalCluster

    def __call__(self, *arguments: str) -> str:
        """Run helm on the release's namespace and return what it prints; what it complains about fails the test."""
        homes = {f"HELM_{kind}_HOME": str(self.home / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")}
        done = subprocess.run(
            [self.program, "--namespace", SYSTEM, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            env={**self.cluster.environment, **homes},
        )
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def bare(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """A cluster without Twinpool, whose namespaces hold pods to what the chart promises."""
    if request.config.getoption("--cluster") == "external":
        pytest.skip("it installs the CRD, of which a cluster has one")
    request.getfixturevalue("binaries")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    name = next(name for i in itertools.count() if clusters.is_free(name := f"test-chart-{worker}-{i}"))
    with clusters.running(name) as cluster:
        for namespace, level in ((SYSTEM, "restricted"), (NAMESPACE, "baseline")):
            cluster.kubectl("create", "namespace", namespace)
            cluster.kubectl("label", "namespace", namespace, f"pod-security.kubernetes.io/enforce={level}")
        yield cluster


@pytest.fixture
def helm(request: pytest.FixtureRequest, bare: LocalCluster, tmp_path: Path) -> Iterator[Helm]:
    """The helm that the pinned module makes, on that cluster; release and CRD, with its pools, go afterwards."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        found = Helm(ensure_helm(Progress()), tmp_path / "helm", bare)
    yield found
    found("uninstall", "twinpool", "--ignore-not-found", "--wait", "--timeout=180s")
    bare.kubectl("delete", "crd", CRD, "--ignore-not-found", timeout=120)


def previous(helm: Helm, folder: Path) -> str:
    """Return a packaged chart of an older version, whose CRD prints no column about the router."""
    copy = folder / "twinpool"
    shutil.copytree(CHART, copy)
    crd = yaml.safe_load((copy / "files" / "crd.yaml").read_text())
    (version,) = crd["spec"]["versions"]
    version["additionalPrinterColumns"] = [x for x in version["additionalPrinterColumns"] if x["name"] != "Router"]
    (copy / "files" / "crd.yaml").write_text(yaml.safe_dump(crd))
    helm("package", str(copy), "--version=0.0.9", f"--destination={folder}")
    return str(folder / "twinpool-0.0.9.tgz")


def columns(cluster: LocalCluster) -> set[str]:
    (version,) = cluster.json("get", "crd", CRD)["spec"]["versions"]
    return {column["name"] for column in version["additionalPrinterColumns"]}


def workers(cluster: LocalCluster) -> dict[str, tuple[str, int]]:
    """Return uid and restarts of every worker pod."""
    items: list[dict[str, Any]] = cluster.json("-n", NAMESPACE, "get", "pods", "-l", protocol.LABEL_GROUP)["items"]
    return {
        item["metadata"]["name"]: (
            item["metadata"]["uid"],
            sum(status["restartCount"] for status in item["status"].get("containerStatuses", ())),
        )
        for item in items
    }


def ask(cluster: LocalCluster) -> int:
    body = {"model": "simulated-model", "prompt": "a b", "max_tokens": 2}
    return post(f"{router_url(cluster, NAMESPACE, NAME)}/v1/completions", body).status


def twinpool(cluster: LocalCluster, *arguments: str, code: int = 0) -> str:
    """Return what the command line prints; it must end with this exit code."""
    environment = {**cluster.environment, "PATH": f"{Path(cluster.kubectl_path).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "twinpool.cli", *arguments, "--namespace", NAMESPACE]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def make_pool(cluster: LocalCluster) -> None:
    cluster.kubectl("-n", NAMESPACE, "apply", "-f", str(ROOT / "examples" / "simulated.yaml"))
    wait_until(
        lambda: condition(pool(cluster, NAMESPACE, NAME), "Ready").get("status") == "True", 180, "the pool is ready"
    )


def router_fits_restricted(cluster: LocalCluster) -> None:
    """Ask the namespace of the operator, which holds pods to `restricted`, whether it would take a router's pod."""
    made = cluster.json("-n", NAMESPACE, "get", "deployment", f"{NAME}-router")["spec"]["template"]
    spec = {**made["spec"], "serviceAccountName": "default", "serviceAccount": "default"}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "router"}, "spec": spec}
    taken = ("-n", SYSTEM, "create", "--dry-run=server", "-f", "-")
    assert "pod/router created" in cluster.kubectl(*taken, input=json.dumps(body)).stdout
    spec["securityContext"] = {}
    assert "PodSecurity" in cluster.kubectl(*taken, input=json.dumps(body), check=False).stderr


def acts_on_the_pool(cluster: LocalCluster) -> None:
    """Wait until an operator follows the pool: it raises the routers, and takes them back."""
    for replicas in (2, 1):
        patch = json.dumps({"spec": {"routing": {"replicas": replicas}}})
        cluster.kubectl("-n", NAMESPACE, "patch", CRD + "/" + NAME, "--type=merge", "-p", patch)
        wait_until(lambda n=replicas: len(pods(cluster, NAMESPACE, NAME, "router")) == n, 120, f"{replicas} routers")


def test_a_crd_that_was_applied_by_hand_is_taken_over(helm: Helm, bare: LocalCluster) -> None:
    bare.kubectl("apply", "--server-side", "-f", str(ROOT / "crds"))
    helm("install", "twinpool", str(CHART), "--set=operator.replicas=0", "--take-ownership", "--force-conflicts")
    assert bare.json("get", "crd", CRD)["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"


def readme_commands() -> str:
    """Return what the README tells to type on a cluster, as a script; building images takes a container engine."""
    text = (ROOT / "README.md").read_text().partition("## Install on a cluster")[2]
    block = text.partition("```console\n")[2].partition("```")[0]
    commands = [command for command in block.split("\n$ ") if "docker" not in command]
    assert len(commands) > 4
    return "\n".join(commands)


def test_the_commands_of_the_readme(helm: Helm, bare: LocalCluster) -> None:
    bare.add_images({f"registry.test/{name}": image for name, image in default_images().items()})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Another port than 8000 on this machine, which somebody else may have.
    script = readme_commands().replace(" 8000:8000", f" {port}:8000").replace("localhost:8000", f"localhost:{port}")
    folders = (helm.program.parent, Path(bare.kubectl_path).parent, Path(sys.executable).parent)
    environment = {**bare.environment, "PATH": ":".join([*map(str, folders), os.environ["PATH"]])}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"trap 'kill $(jobs -p)' EXIT\n{script}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
        env={**environment, "REGISTRY": "registry.test"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Paris" in done.stdout
    assert "answered one" in done.stdout, "doctor has asked for a token"


def test_from_install_to_uninstall_and_back(helm: Helm, bare: LocalCluster, tmp_path: Path) -> None:
    notes = helm("install", "twinpool", previous(helm, tmp_path), "--wait", "--timeout=180s")
    assert "kubectl -n twinpool-system rollout status deployment/twinpool-operator" in notes
    assert "Router" not in columns(bare)
    make_pool(bare)
    before = workers(bare)
    assert len(before) == 2
    router_fits_restricted(bare)
    assert ask(bare) == 200
    assert "decode" in twinpool(bare, "explain", NAME, "--placement")
    assert twinpool(bare, "status", NAME).count(" serving ") == 2
    assert "failed" not in twinpool(bare, "doctor", NAME)
    load = (
        "--rate=20",
        "--requests=20",
        "--prompt-tokens=50",
        "--output-tokens=5",
        f"--pool={NAME}",
        "--ttft=1m",
        "--itl=9s",
    )
    assert "answered 20 of 20" in twinpool(bare, "bench", router_url(bare, NAMESPACE, NAME), *load)
    with Load(bare, NAMESPACE, NAME, "simulated-model") as asked:
        assert "slowest:" in twinpool(bare, "explain", NAME, "--seconds", "6")
    assert not asked.failures

    url = router_url(bare, NAMESPACE, NAME)
    test = (f"--set=test.pool={NAME}", f"--set=test.namespace={NAMESPACE}", f"--set=test.url={url}")
    shared = ("--set-string=labels.cost=42", "--set-string=pools.router.nodeSelector.kubernetes\\.io/os=linux")
    helm("upgrade", "twinpool", str(CHART), "--set=operator.replicas=2", *shared, *test, "--wait", "--timeout=180s")
    assert "Router" in columns(bare)
    assert "simulated-model answered" in helm("test", "twinpool", "--logs", "--timeout=180s")
    acts_on_the_pool(bare)
    (router,) = pods(bare, NAMESPACE, NAME, "router")
    assert router["metadata"]["labels"]["cost"] == "42", "what all pools get reaches routers at once"
    assert router["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}

    helm("rollback", "twinpool", "1", "--wait", "--timeout=180s")
    assert "Router" not in columns(bare)
    assert ask(bare) == 200

    assert "kept due to the resource policy" in helm("uninstall", "twinpool", "--wait", "--timeout=180s")
    assert (
        bare.json("-n", SYSTEM, "get", "deployments,serviceaccounts", "-l", "app.kubernetes.io/part-of=twinpool")[
            "items"
        ]
        == []
    )
    assert CRD in bare.kubectl("get", "crd", "-o", "name").stdout
    assert ask(bare) == 200, "a pool serves without its operator"
    assert "no operator is installed" in twinpool(bare, "doctor", NAME, code=1)

    helm("install", "twinpool", str(CHART), "--wait", "--timeout=180s")
    acts_on_the_pool(bare)
    assert "Router" in columns(bare)
    assert ask(bare) == 200
    assert workers(bare) == before, "no step has restarted a worker"
