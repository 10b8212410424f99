"""``make demo CLUSTER=kind``: the demonstration in containers, for machines that have a container engine.

What is done is a list of command lines, made by a pure function; this module then runs them one after another. The
images are built from the Dockerfile and handed to the nodes as archives, which works alike with docker and podman.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.core.errors import TwinpoolError
from twinpool.demo import scenario
from twinpool.localcluster.cluster import Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twinpool.demo.phases import Phases

CONFIGURATION = Path(__file__).with_name("kind.yaml")
PARTS = ("operator", "router", "worker")
#: The first release of kind whose nodes run Kubernetes 1.34, the oldest that Twinpool supports.
OLDEST = (0, 30)
#: docker.io is what an image's name without a registry means to the nodes; podman would put localhost there.
_REGISTRY = "docker.io"
_WITHOUT = "`make demo` needs none of this: it runs the same control plane as plain processes"


@dataclass(frozen=True, slots=True)
class Step:
    """One command; ``title`` is said before it runs, ``environment`` is added to that of this process."""

    title: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tools:
    """Programs of this machine: the container engine (docker or podman), kind and kubectl."""

    engine: str
    kind: str
    kubectl: str

    @property
    def environment(self) -> dict[str, str]:
        """Return what tells kind which container engine to use."""
        return {"KIND_EXPERIMENTAL_PROVIDER": Path(self.engine).name}


def found(which: Callable[[str], str | None], answers: Callable[[str], bool]) -> Tools:
    """Return the programs that ``which`` finds; a container engine must also be one that ``answers``.

    Raises
    ------
    TwinpoolError
        When there is no container engine, no kind, or no kubectl; it says how to go on.
    """
    engines = [program for program in map(which, ("docker", "podman")) if program]
    engine = next(filter(answers, engines), None)
    if engine is None:
        there = f"{' and '.join(engines)} cannot reach one" if engines else "neither docker nor podman is on the PATH"
        raise TwinpoolError(
            f"make demo CLUSTER=kind needs a running container engine, and {there}", f"start or install one; {_WITHOUT}"
        )
    kind, kubectl = which("kind"), which("kubectl")
    if kind is None:
        raise TwinpoolError("kind is not on the PATH", f"install it (https://kind.sigs.k8s.io); {_WITHOUT}")
    if kubectl is None:
        raise TwinpoolError("kubectl is not on the PATH", f"install it; {_WITHOUT}")
    return Tools(engine, kind, kubectl)


def answering(engine: str) -> bool:
    """Say whether a container engine runs containers: docker's client is often there without its daemon."""
    return subprocess.run([engine, "version"], capture_output=True, check=False, timeout=30).returncode == 0


def refuse_old(version: str) -> None:
    """Refuse a kind that is too old; ``version`` is what ``kind version`` prints."""
    match = re.search(r"v(\d+)\.(\d+)\.", version)
    if match is None or (int(match[1]), int(match[2])) < OLDEST:
        raise TwinpoolError(
            f"{version.strip() or 'this kind'} is too old or not understood",
            f"install kind {OLDEST[0]}.{OLDEST[1]} or newer: its nodes run Kubernetes 1.34, which Twinpool needs",
        )


def start(tools: Tools, name: str, kubeconfig: Path) -> Step:
    """Return how the cluster is made; its credentials go to ``kubeconfig`` alone."""
    command = (tools.kind, "create", "cluster", f"--name={name}", f"--config={CONFIGURATION}")
    return Step("start the nodes", (*command, f"--kubeconfig={kubeconfig}", "--wait=180s"), tools.environment)


def images(tools: Tools, name: str, source: Path, folder: Path) -> list[Step]:
    """Return how the images come from ``source`` onto the nodes, by way of archives in ``folder``."""
    steps = []
    for part in PARTS:
        tag, archive = f"{_REGISTRY}/twinpool/{part}:dev", folder / f"{part}.tar"
        load = (tools.kind, "load", "image-archive", str(archive), f"--name={name}")
        steps += [
            Step(f"build {part}", (tools.engine, "build", f"--build-arg=PART={part}", f"--tag={tag}", str(source))),
            Step(f"save {part}", (tools.engine, "save", f"--output={archive}", tag)),
            Step(f"load {part}", load, tools.environment),
        ]
    return steps


def stop(tools: Tools, name: str) -> Step:
    """Return how the cluster is removed."""
    return Step("remove the nodes", (tools.kind, "delete", "cluster", f"--name={name}"), tools.environment)


def run(step: Step, phases: Phases) -> None:
    """Run one command; what it prints is shown.

    Raises
    ------
    TwinpoolError
        When it ends with an error.
    """
    phases.say(" ".join(step.command))
    phases.stream.flush()
    done = subprocess.run(step.command, env={**os.environ, **step.environment}, check=False)
    if done.returncode:
        raise TwinpoolError(
            f"{step.title}: {' '.join(step.command)} ended with {done.returncode}", "read its lines above"
        )


def up(name: str, namespace: str, folder: Path, keep: bool, phases: Phases) -> None:
    """Run the demonstration on kind with simulated engines; without ``keep``, or when a step fails, nothing is left."""
    tools = found(shutil.which, answering)
    refuse_old(subprocess.run([tools.kind, "version"], capture_output=True, text=True, check=False).stdout)
    folder.mkdir(parents=True, exist_ok=True)
    choice, kubeconfig = scenario.CHOICES["simulated"], folder / "kubeconfig"
    kept = False
    try:
        with phases.phase("Kubernetes: kind starts a control plane and two nodes in containers"):
            run(start(tools, name, kubeconfig), phases)
        with phases.phase("Images: build and load"):
            for step in images(tools, name, scenario.ROOT, folder):
                run(step, phases)
        cluster = Cluster(kubeconfig, tools.kubectl)
        with phases.phase("Twinpool: install CRD and operator"):
            scenario.install_twinpool(cluster, phases)
        with phases.phase(f"Pool {choice.pool}: from manifest to ready"):
            scenario.make_pool(cluster, choice, namespace, phases)
        with phases.phase("A question, through kubectl port-forward"):
            run(ask(kubeconfig, choice.pool, namespace), phases)
        if keep:
            phases.say(f"\nexport KUBECONFIG={kubeconfig}; stop: make down CLUSTER=kind")
        kept = keep
    finally:
        if not kept:
            down(name, phases)
        print("\n" + phases.summary(), flush=True)


def ask(kubeconfig: Path, pool: str, namespace: str) -> Step:
    """Return the command that checks everything up to a token from the pool."""
    command = (sys.executable, "-m", "twinpool.cli", "doctor", pool, f"--namespace={namespace}")
    return Step("ask for a token", command, {"KUBECONFIG": str(kubeconfig)})


def down(name: str, phases: Phases) -> None:
    """Remove the cluster."""
    run(stop(found(shutil.which, answering), name), phases)
