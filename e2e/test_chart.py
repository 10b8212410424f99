"""The chart's whole life on a real API server, with the real helm: no step of it restarts a worker."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.client import post
from twinpool.demo.scenario import condition, pods, pool, router_url
from twinpool.localcluster import cluster as clusters
from twinpool.localcluster.helm import ensure_helm
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


@pytest.fixture(scope="module")
def helm(request: pytest.FixtureRequest, bare: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """The helm that the pinned module makes, on that cluster."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return Helm(ensure_helm(Progress()), tmp_path_factory.mktemp("helm"), bare)


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


def twinpool(cluster: LocalCluster, *arguments: str) -> str:
    environment = {**cluster.environment, "PATH": f"{Path(cluster.kubectl_path).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "twinpool.cli", *arguments, "--namespace", NAMESPACE]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment).stdout


def make_pool(cluster: LocalCluster) -> None:
    cluster.kubectl("-n", NAMESPACE, "apply", "-f", str(ROOT / "examples" / "simulated.yaml"))
    wait_until(
        lambda: condition(pool(cluster, NAMESPACE, NAME), "Ready").get("status") == "True", 180, "the pool is ready"
    )


def acts_on_the_pool(cluster: LocalCluster) -> None:
    """Wait until an operator follows the pool: it raises the routers, and takes them back."""
    for replicas in (2, 1):
        patch = json.dumps({"spec": {"routing": {"replicas": replicas}}})
        cluster.kubectl("-n", NAMESPACE, "patch", CRD + "/" + NAME, "--type=merge", "-p", patch)
        wait_until(lambda n=replicas: len(pods(cluster, NAMESPACE, NAME, "router")) == n, 120, f"{replicas} routers")


def test_from_install_to_uninstall_and_back(helm: Helm, bare: LocalCluster, tmp_path: Path) -> None:
    notes = helm("install", "twinpool", previous(helm, tmp_path), "--wait", "--timeout=180s")
    assert "kubectl -n twinpool-system rollout status deployment/twinpool-operator" in notes
    assert "Router" not in columns(bare)
    make_pool(bare)
    before = workers(bare)
    assert len(before) == 2
    assert ask(bare) == 200
    assert "decode" in twinpool(bare, "explain", NAME, "--placement")

    url = router_url(bare, NAMESPACE, NAME)
    test = (f"--set=test.pool={NAME}", f"--set=test.namespace={NAMESPACE}", f"--set=test.url={url}")
    helm("upgrade", "twinpool", str(CHART), "--set=operator.replicas=2", *test, "--wait", "--timeout=180s")
    assert "Router" in columns(bare)
    assert "simulated-model answered" in helm("test", "twinpool", "--logs", "--timeout=180s")
    acts_on_the_pool(bare)

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

    helm("install", "twinpool", str(CHART), "--wait", "--timeout=180s")
    acts_on_the_pool(bare)
    assert "Router" in columns(bare)
    assert ask(bare) == 200
    assert workers(bare) == before, "no step has restarted a worker"
