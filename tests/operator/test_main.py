"""Options come from flags, then from the environment, then from the defaults."""

from __future__ import annotations

from importlib import metadata

import pytest
from aiohttp.test_utils import TestClient, TestServer

from twinpool.core.topology import preset, topology
from twinpool.operator.__main__ import main, parse
from twinpool.operator.logic.settings import VLLM_IMAGE, Settings
from twinpool.operator.shell.cluster import ApiRefused
from twinpool.operator.shell.health import health_application
from twinpool.operator.shell.journal import Journal
from twinpool.operator.shell.metrics import Metrics
from twinpool.operator.shell.selfcheck import crd_problem


def test_defaults() -> None:
    options, level = parse([], {})
    own = metadata.version("twinpool")
    assert options.settings == Settings("twinpool/worker:dev", "twinpool/router:dev", VLLM_IMAGE, version=own)
    assert (options.host, options.port, options.namespace) == ("0.0.0.0", 8080, "")
    assert (options.lease_namespace, options.lease_name) == ("twinpool-system", "twinpool-operator")
    assert level == "info"


def test_flags_win_over_the_environment() -> None:
    environment = {
        "TWINPOOL_WORKER_IMAGE": "w:env",
        "TWINPOOL_ROUTER_IMAGE": "r:env",
        "POD_IP": "127.1.0.5",
        "POD_NAMESPACE": "ns",
        "POD_NAME": "op-1",
    }
    options, _ = parse(["--worker-image", "w:flag", "--namespace", "one"], environment)
    assert (options.settings.worker_image, options.settings.router_image) == ("w:flag", "r:env")
    assert (options.host, options.namespace, options.lease_namespace) == ("127.1.0.5", "one", "ns")
    assert options.identity.startswith("op-1-")
    assert options.identity != parse([], environment)[0].identity, "two processes are never the same holder"


def test_a_wrong_log_level_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--log-level", "loud"], {})
    assert "--log-level loud: must be debug, info, warning or error" in capsys.readouterr().err


def test_the_topology_is_a_preset_or_labels_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([], {"TWINPOOL_TOPOLOGY": "gke"})[0].settings.topology == preset("gke")
    assert parse(["--topology", "rack=example.com/rack"], {})[0].settings.topology == topology(
        {"rack": ("example.com/rack",)}
    )
    with pytest.raises(SystemExit):
        parse(["--topology", "moon"], {})
    assert "there is no topology 'moon' - use auto, eks" in capsys.readouterr().err


def test_defaults_of_pods_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse([], {"TWINPOOL_PODS": '{"labels": {"team": "a"}}'})[0].settings.pods.labels == {"team": "a"}
    with pytest.raises(SystemExit):
        parse(["--pods", '{"labels": {"team": 5}}'], {})
    assert "defaults of pods: labels.team: Input should be a valid string" in capsys.readouterr().err


def test_no_cluster_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/none")
    assert main(["--host", "127.0.0.1", "--port", "0"]) == 1
    assert capsys.readouterr().err.strip().endswith("run inside a pod with a service account, or set KUBECONFIG")


@pytest.mark.parametrize(
    ("code", "words"), [(404, "kubectl apply -f crds/"), (403, "--namespace"), (0, "cannot be listed")]
)
def test_what_keeps_the_operator_from_starting_is_said(code: int, words: str) -> None:
    assert words in crd_problem(ApiRefused(code, "nope"))


async def test_probes_and_metrics() -> None:
    problem = ["not yet"]
    application = health_application(lambda: problem[0], lambda: "", Metrics(), Journal())
    async with TestClient(TestServer(application)) as client:
        answer = await client.get("/readyz")
        assert (answer.status, await answer.text()) == (503, "not yet\n")
        problem[0] = ""
        assert (await client.get("/readyz")).status == 200
        assert (await client.get("/healthz")).status == 200
        text = await (await client.get("/metrics")).text()
        assert "twinpool_operator_leader 0.0" in text
