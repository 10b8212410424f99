"""Every command in the README and the guides is typed by a test: here on one pool, or where :data:`ELSEWHERE` says."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from twinpool.core import protocol
from twinpool.demo.load import Load
from twinpool.demo.scenario import pods

if TYPE_CHECKING:
    from twinpool.localcluster.cluster import Cluster

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Begins of commands that need more than one pool, by page, and the test that runs them.
ELSEWHERE = {
    ("README.md", "make demo"): "test_demo.py::test_the_demo_ends_with_an_answer_and_leaves_nothing",
    ("README.md", "make test"): "test_docs.py::test_make_runs_what_the_tests_run",
    ("README.md", "kubectl get tpool"): "test_operator_crd.py",
    ("README.md", "for part in operator router worker; do"): "../tests/test_dockerfile.py",
    ("README.md", "helm"): "test_chart.py::test_the_commands_of_the_readme",
    ("README.md", "kubectl"): "test_chart.py::test_the_commands_of_the_readme",
    ("README.md", "curl"): "test_chart.py::test_the_commands_of_the_readme",
    ("README.md", "twinpool"): "test_chart.py::test_the_commands_of_the_readme",
    ("install.md", "kubectl"): "test_chart.py::bare",
    ("install.md", "helm"): "test_chart.py::test_from_install_to_uninstall_and_back",
}
#: Topology pages show what `twinpool plan` says of their own nodes.
TOPOLOGY = ROOT / "tests" / "cli" / "test_topology_pages.py"
#: Pages whose commands are run here, in this order: the last one leaves the pool in another revision.
HERE = ("placement", "explain", "sizing", "parallelism", "bench", "router", "speculation", "rollout")
#: What is smaller or slower here than in a guide.
SMALLER = {
    "--requests 400": "--requests 10",
    "--rate 4 ": "--rate 10 ",
    "--prompt-tokens 4000": "--prompt-tokens 100",
    "--output-tokens 300": "--output-tokens 4",
    "--ttft 800ms --itl 40ms": "--ttft 1m --itl 9s",
    "twinpool explain llama  ": "twinpool explain llama --seconds 5 ",
}
#: What was started in the background ends with the page, and needs a moment before it listens: a user would take one.
PREAMBLE = """\
trap 'kill $(jobs -p) 2>/dev/null || :' EXIT
listens() { until (: >"/dev/tcp/127.0.0.1/$1") 2>/dev/null; do sleep 0.1; done; }"""


def commands(page: Path) -> list[str]:
    """Return what a page tells to type: lines after ``$`` in console blocks, with those that go on below them."""
    found: list[str] = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        going_on = False
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append(line[2:])
            elif going_on:
                found[-1] += f"\n{line}"
            opened = bool(found) and found[-1].count("; do") > len(re.findall(r"^ *done\b", found[-1], re.MULTILINE))
            going_on = (line.startswith("$ ") or going_on) and (line.endswith("\\") or opened)
    return found


def place_of(page: Path, command: str) -> str | None:
    """Return which test runs a command, or None."""
    if page.parent.name == "topology":
        return str(TOPOLOGY.relative_to(ROOT))
    if page.stem in HERE:
        return "test_docs.py::test_the_commands_of_the_guides"
    return next(
        (test for (name, begin), test in ELSEWHERE.items() if page.name == name and command.startswith(begin)), None
    )


def test_no_command_is_run_by_nobody() -> None:
    assert len(commands(ROOT / "README.md")) > 8
    for page in PAGES:
        for command in commands(page):
            test = place_of(page, command)
            assert test, f"{page.relative_to(ROOT)}: no test runs `{command}`"
            file, _, name = test.partition("::")
            path = ROOT / file if file.startswith("tests/") else ROOT / "e2e" / file
            names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
            assert not name or name in names, test
    for page_name, begin in ELSEWHERE:
        assert any(
            command.startswith(begin) for page in PAGES if page.name == page_name for command in commands(page)
        ), f"{page_name} has no `{begin}` any more"


def test_commands_that_go_on_are_read_whole(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ one \\\n  more\noutput\n$ for x in a; do\n    act && act\n  done\noutput\n$ last\n```\n"
        "```yaml\n$ no\n```\n"
    )
    assert commands(page) == ["one \\\n  more", "for x in a; do\n    act && act\n  done", "last"]


def test_make_runs_what_the_tests_run() -> None:
    """`make demo` is the program that test_demo.py starts, `make test` these tests."""

    def shown(*arguments: str) -> str:
        command = ["make", "--dry-run", "--no-print-directory", "--assume-old=.venv/.complete", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert shown("demo", "ENGINE=simulated").split()[1:] == ["-m", "twinpool.demo", "up", "--engine", "simulated"]
    assert " up --engine vllm" in shown("demo")
    assert re.search(r"-m pytest e2e\b", shown("test"))
    assert re.search(r"-m pytest tests\b", shown("unit"))


LLAMA: dict[str, Any] = {
    "apiVersion": protocol.API_VERSION,
    "kind": protocol.KIND,
    "metadata": {"name": "llama"},
    "spec": {
        "model": {"name": "m"},
        "engine": {"kind": "simulated"},
        "prefill": {"resources": {"gpu": {"perNode": 0}}},
        "decode": {"resources": {"gpu": {"perNode": 0}}},
        "objectives": {"ttft": "1m", "itl": "9s"},
        "placement": {},
    },
}


def files(folder: Path, page: str) -> None:
    """Write what the commands of a page read."""
    pool = json.loads(json.dumps(LLAMA))
    pool["spec"]["engine"]["env"] = [{"name": "EDITED", "value": "yes"}]
    config = "llama-3-70b"
    if page in ("sizing", "parallelism"):
        config = "llama-3-70b" if page == "sizing" else "deepseek-v3"
        pool["spec"] = {"model": {"name": "m"}, "decode": {"parallelism": {"tensor": 8}}}
        if page == "sizing":
            role = {"parallelism": {"tensor": 4}}
            pool["spec"] |= {"prefill": role, "decode": role, "objectives": {"ttft": "1m", "itl": "9s"}}
    (folder / "pool.yaml").write_text(yaml.safe_dump(pool))
    shutil.copy(ROOT / "tests" / "core" / "configs" / f"{config}.json", folder / "config.json")
    shutil.copy(ROOT / "examples" / "plan" / "nodes.yaml", folder / "nodes.yaml")
    lines = ({"time": float(i), "prompt_tokens": 400, "output_tokens": 20} for i in range(20))
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))


def environment(cluster: Cluster, namespace: str, folder: Path) -> dict[str, str]:
    """Return what a user has who works on this cluster and namespace."""
    mine = folder / "kubeconfig"
    shutil.copy(cluster.kubeconfig, mine)
    folders = (Path(cluster.kubectl_path).parent, Path(sys.executable).parent)
    found = {**os.environ, "KUBECONFIG": str(mine), "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]])}
    command = ["kubectl", "config", "set-context", "--current", f"--namespace={namespace}"]
    subprocess.run(command, env=found, check=True, capture_output=True)
    return found


@pytest.mark.cluster
def test_the_commands_of_the_guides(twinpool: Cluster, namespace: str, tmp_path: Path) -> None:
    twinpool.kubectl("-n", namespace, "apply", "-f", "-", input=yaml.safe_dump(LLAMA))
    ready = (f"{protocol.PLURAL}.{protocol.GROUP}/llama", "--for=condition=Ready", "--timeout=180s")
    twinpool.kubectl("-n", namespace, "wait", *ready, timeout=190)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    user = environment(twinpool, namespace, tmp_path)
    decode = pods(twinpool, namespace, "llama", "decode")[0]["metadata"]["name"]
    other = {" 8000:80": f" {port}:80", "localhost:8000": f"localhost:{port}", "llama-decode-xyz-0": decode, **SMALLER}
    for page in HERE:
        files(tmp_path, page)
        typed = "\n".join(commands(ROOT / "docs" / f"{page}.md"))
        assert typed, page
        for guide, here in other.items():
            typed = typed.replace(guide, here)
        typed = re.sub("&$", f"& listens {port}", typed, flags=re.MULTILINE)
        load = Load(twinpool, namespace, "llama", "m") if page == "explain" else contextlib.nullcontext()
        with load:
            done = subprocess.run(
                ["bash", "-xeuo", "pipefail", "-c", f"{PREAMBLE}\n{typed}"],
                cwd=tmp_path, env=user, capture_output=True, text=True, timeout=240, check=False,
            )  # fmt: skip
        assert done.returncode == 0, f"{page}.md: {done.stdout}{done.stderr}"
