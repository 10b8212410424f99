"""The demonstration on kind, without kind: which commands run in which order, and what is said where tools lack."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from twinpool.core.errors import TwinpoolError
from twinpool.demo import kind
from twinpool.demo.__main__ import main

TOOLS = kind.Tools("/usr/bin/docker", "/usr/bin/kind", "/usr/bin/kubectl")


def test_a_machine_without_a_container_engine_hears_how_to_go_on() -> None:
    with pytest.raises(TwinpoolError, match="neither docker nor podman") as raised:
        kind.found(lambda _: None, lambda _: True)
    assert "`make demo` needs none of this" in str(raised.value)


@pytest.mark.parametrize(("lacks", "said"), [("kind", "kind is not on the PATH"), ("kubectl", "kubectl is not on")])
def test_other_tools_that_lack_are_named(lacks: str, said: str) -> None:
    with pytest.raises(TwinpoolError, match=said):
        kind.found(lambda name: None if name == lacks else f"/bin/{name}", lambda _: True)


def test_the_first_engine_that_answers_is_taken() -> None:
    there = "/bin/{}".format
    assert kind.found(there, lambda _: True).environment == {"KIND_EXPERIMENTAL_PROVIDER": "docker"}
    assert kind.found(there, lambda engine: engine == "/bin/podman").engine == "/bin/podman"
    with pytest.raises(TwinpoolError, match="/bin/docker and /bin/podman cannot reach one"):
        kind.found(there, lambda _: False)


@pytest.mark.parametrize("version", ["kind v0.30.0 go1.24.6 linux/amd64", "kind v0.33.1 go1.26", "kind v1.0.0 go2"])
def test_a_kind_that_is_new_enough(version: str) -> None:
    kind.refuse_old(version)


@pytest.mark.parametrize("version", ["kind v0.29.0 go1.24.2 linux/amd64", "", "kind (unknown)"])
def test_a_kind_that_is_too_old(version: str) -> None:
    with pytest.raises(TwinpoolError, match=r"install kind 0\.30 or newer"):
        kind.refuse_old(version)


def test_each_image_is_built_saved_and_loaded_under_the_name_that_manifests_use() -> None:
    steps = kind.images(TOOLS, "twinpool-demo", Path("/source"), Path("/state"))
    assert [step.title for step in steps[:3]] == ["build operator", "save operator", "load operator"]
    assert len(steps) == 3 * len(kind.PARTS)
    build, save, load = (step.command for step in steps[:3])
    assert build == (
        "/usr/bin/docker", "build", "--build-arg=PART=operator", "--tag=docker.io/twinpool/operator:dev", "/source",
    )  # fmt: skip
    assert save[-2:] == ("--output=/state/operator.tar", "docker.io/twinpool/operator:dev")
    assert load == ("/usr/bin/kind", "load", "image-archive", "/state/operator.tar", "--name=twinpool-demo")
    manifest = (Path(__file__).parents[2] / "deploy" / "operator.yaml").read_text()
    assert "image: twinpool/operator:dev" in manifest


def test_the_cluster_has_two_workers_and_touches_nobody_elses_credentials() -> None:
    body = yaml.safe_load(kind.CONFIGURATION.read_text())
    assert (body["kind"], body["apiVersion"]) == ("Cluster", "kind.x-k8s.io/v1alpha4")
    assert [node["role"] for node in body["nodes"]] == ["control-plane", "worker", "worker"]
    assert all("image" not in node for node in body["nodes"])
    command = kind.start(TOOLS, "x", Path("/state/kubeconfig")).command
    assert "--kubeconfig=/state/kubeconfig" in command


STAND_IN = """\
#!/bin/sh
echo "$(basename "$0") $*" >>"$LOG"
case "$*" in
  version) echo "kind v0.33.0 go1.26" ;;
  "$FAILS"*) exit 3 ;;
  *"get inferencepools"*) echo '{"status": {"conditions": [{"type": "Ready", "status": "True"}]}}' ;;
esac
"""


def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> tuple[int, list[str]]:
    """Run the demonstration with stand-ins for the programs, of which a command that begins with ``fails`` fails."""
    for name in ("docker", "kind", "kubectl"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(STAND_IN)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("FAILS", fails)
    monkeypatch.setattr(kind, "ask", lambda *_: kind.Step("ask", (sys.executable, "-c", "")))
    code = main(["up", "--cluster", "kind", "--no-keep"])
    return code, (tmp_path / "log").read_text().splitlines()


def test_all_steps_in_order_and_nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = played(tmp_path, monkeypatch, "nothing")
    assert code == 0
    begins = [" ".join(line.split()[:2]) for line in said]
    order = ["kind version", "kind create", "docker build", "docker save", "kind load", "kubectl apply", "kind delete"]
    assert [begins.index(begin) for begin in order] == sorted(begins.index(begin) for begin in order)
    assert begins[-1] == "kind delete"
    assert begins.count("kind load") == 3


def test_a_step_that_fails_ends_it_and_the_nodes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = played(tmp_path, monkeypatch, "build")
    assert code == 1
    assert "build operator" in capsys.readouterr().err
    assert not [line for line in said if line.startswith("kubectl")]
    assert said[-1].startswith("kind delete cluster")


def test_make_hands_the_wish_on() -> None:
    command = ["make", "--dry-run", "--no-print-directory", "--assume-old=.venv/.complete", "demo", "CLUSTER=kind"]
    said = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True).stdout
    assert said.split()[1:] == ["-m", "twinpool.demo", "up", "--cluster", "kind"]
