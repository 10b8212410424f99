"""Fixtures of the scenarios: one cluster for the whole session, a fresh namespace for every test.

``--cluster=local`` (the default) starts one on this machine; ``--cluster=external`` uses the one of ``KUBECONFIG``.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.demo.near import CLIQUE, NAME, Pool
from twinpool.demo.phases import Phases
from twinpool.demo.scenario import install_twinpool
from twinpool.localcluster import cluster as clusters
from twinpool.localcluster import images, toolchain
from twinpool.localcluster.cluster import Cluster, ExternalCluster, LocalCluster
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.waiting import wait_until
from twinpool.localengine import image as engine_images
from twinpool.localengine.install import ensure_engine
from twinpool.localengine.models import MODELS, TINY, ensure_model

# As in tests/conftest.py: pytest-asyncio would leave the loop open that Python 3.11 makes for whoever asks first.
asyncio.set_event_loop(None)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twinpool.demo.near import OwnCluster
    from twinpool.localcluster.images import Image
    from twinpool.localengine.layout import Engine


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster",
        choices=("local", "external"),
        default="local",
        help="where the scenarios run: on a cluster of this machine, or on that of KUBECONFIG",
    )
    parser.addoption("--slow", action="store_true", help="run what `make e2e-vllm` runs, and only that")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the long tests with the real engine out of `make test`, and everything else out of `make e2e-vllm`."""
    slow = config.getoption("--slow")
    config.hook.pytest_deselected(items=[item for item in items if slow != ("slow" in item.keywords)])
    items[:] = [item for item in items if slow == ("slow" in item.keywords)]


@pytest.fixture(scope="session")
def extra_images() -> dict[str, Image]:
    """Images of the local cluster besides Twinpool's own, by name."""
    return {}


@pytest.fixture(scope="session")
def binaries(request: pytest.FixtureRequest) -> toolchain.Binaries:
    """The binaries of the local cluster; building them shows its progress even where output is captured."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        return toolchain.ensure(Progress())


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, extra_images: dict[str, Image]) -> Iterator[Cluster]:
    """The cluster that all tests share."""
    if request.config.getoption("--cluster") == "external":
        yield ExternalCluster.from_environment()
        return
    request.getfixturevalue("binaries")
    # Tests may run in several processes (pytest -n 2): each of them has a cluster of its own.
    process = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    name = next(name for i in itertools.count() if clusters.is_free(name := f"test-{process}-{i}"))
    with clusters.running(name, extra_images=extra_images) as local:
        yield local


@pytest.fixture(scope="session")
def local_cluster(cluster: Cluster) -> LocalCluster:
    """The shared cluster, for tests that kill nodes or name images: skipped on an external one."""
    if not isinstance(cluster, LocalCluster):
        pytest.skip("only the local cluster can do this")
    return cluster


@pytest.fixture(scope="session")
def twinpool(cluster: Cluster) -> Cluster:
    """The shared cluster with Twinpool on it: its CRD, and its operator for all namespaces."""
    install_twinpool(cluster, Phases(io.StringIO()))
    return cluster


@pytest.fixture(scope="session")
def installed_engine(request: pytest.FixtureRequest) -> Engine:
    """vLLM for CPUs and its models; installing them shows its progress even where output is captured."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        engine = ensure_engine(Progress())
        for model in MODELS.values():
            ensure_model(model, engine, Progress())
    return engine


@pytest.fixture(scope="session")
def engine(request: pytest.FixtureRequest) -> Engine:
    """vLLM for CPUs and the tiny model alone, for tests without a cluster."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        found = ensure_engine(Progress())
        ensure_model(TINY, found, Progress())
    return found


@pytest.fixture(scope="session")
def vllm(local_cluster: LocalCluster, twinpool: Cluster, installed_engine: Engine) -> LocalCluster:
    """The shared cluster with Twinpool, and with vLLM for CPUs as an image."""
    local_cluster.add_images(images.parse({engine_images.IMAGE: engine_images.engine_image()}, "the local engine"))
    return local_cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A fresh namespace with its service account; deleted afterwards, without waiting for it."""
    with cluster.fresh_namespace() as name:
        yield name


@pytest.fixture(scope="session")
def own_cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OwnCluster:
    """What starts a cluster with the nodes that a module of tests needs; they are skipped on an external cluster."""

    @contextmanager
    def start(purpose: str, nodes: Sequence[Mapping[str, Any]]) -> Iterator[LocalCluster]:
        if request.config.getoption("--cluster") == "external":
            pytest.skip("the nodes must be ours, to label and to kill")
        request.getfixturevalue("binaries")
        file: Path = tmp_path_factory.mktemp("nodes") / "nodes.yaml"
        file.write_text(yaml.safe_dump({"nodes": list(nodes)}))
        name = next(name for i in itertools.count() if clusters.is_free(name := f"test-{purpose}-{i}"))
        with clusters.running(name, nodes=file) as local:
            yield local

    return start


@pytest.fixture(scope="module")
def labelled(own_cluster: OwnCluster) -> Iterator[LocalCluster]:
    """A cluster of four nodes with two GPUs each, two to an NVLink domain and rack."""
    nodes = [
        {
            "name": f"node-{letter}",
            "gpus": 2,
            "labels": {CLIQUE: f"c{index // 2}", "network.topology.nvidia.com/leaf": f"r{index // 2}"},
        }
        for index, letter in enumerate("abcd")
    ]
    with own_cluster("placement", nodes) as local:
        install_twinpool(local, Phases(io.StringIO()))
        yield local


@pytest.fixture
def near(labelled: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """A pool's namespace, which the command line reaches too."""
    monkeypatch.setenv("KUBECONFIG", str(labelled.kubeconfig))
    monkeypatch.setenv("PATH", f"{Path(labelled.kubectl_path).parent}:{os.environ['PATH']}")
    with labelled.fresh_namespace() as namespace:
        found = Pool(labelled, namespace)
        yield found
        found.kubectl("delete", "tpool", NAME, "--ignore-not-found")
        found.kubectl("delete", "pods", "-l", "app=other", "--ignore-not-found")
        wait_until(lambda: not found.kubectl("get", "pods", "-o", "name"), 90, "its pods are gone")
