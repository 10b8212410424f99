"""``python -m twinpool.demo up|down|prepare``: what ``make demo``, ``make down`` and ``make test`` call."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from twinpool.core.errors import TwinpoolError
from twinpool.demo import kind, scenario
from twinpool.demo.phases import Phases
from twinpool.localcluster import cluster as clusters
from twinpool.localcluster import toolchain
from twinpool.localcluster.helm import ensure_helm
from twinpool.localcluster.images import Image, parse
from twinpool.localcluster.paths import cache_dir
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.prometheus import ensure_prometheus
from twinpool.localengine import engine_image
from twinpool.localengine.image import IMAGE
from twinpool.localengine.install import ensure_engine
from twinpool.localengine.models import MODELS, SMOLLM2, ensure_model

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NAMESPACE = "default"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m twinpool.demo", description="Twinpool on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start everything, ask a question, prove the handoff")
    up.add_argument(
        "--engine", choices=tuple(scenario.CHOICES), default="vllm", help="vllm (default) or simulated; kind: simulated"
    )
    up.add_argument("--keep", action=argparse.BooleanOptionalAction, help="keep serving (default: on a terminal)")
    down = commands.add_parser("down", help="stop what is left serving")
    for command in (up, down):
        command.add_argument(
            "--cluster", choices=("local", "kind"), default="local", help="processes (default), or kind's containers"
        )
        command.add_argument("--name", default="demo", help="name of the local cluster (default: demo)")
    commands.add_parser("prepare", help="build and install what tests need and the cache lacks")
    return parser


def engine_images() -> dict[str, Image]:
    """Return the image of vLLM for CPUs, whose models are below ``/models``."""
    return parse({IMAGE: engine_image()}, "the local engine")


def up(engine: str, name: str, keep: bool) -> None:
    """Run the demonstration; without ``keep``, and whenever a step failed, nothing is left running.

    A cluster that is to be kept outlives this process. Any other ends with it, even when it is killed.
    """
    choice = scenario.CHOICES[engine]
    phases = Phases(sys.stdout)
    progress = Progress(sys.stdout)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(lambda: print("\n" + phases.summary(), flush=True))
        images = _prepared(engine, phases, progress)
        with phases.phase("Kubernetes: start etcd, API server, controllers, scheduler and two nodes"):
            if keep:
                cluster = clusters.start_detached(name, None, images, progress)
                cleanup.callback(clusters.stop, name, progress)
            else:
                cluster = cleanup.enter_context(clusters.running(name, extra_images=images))
            phases.say(cluster.kubectl("get", "nodes", "-L", "topology.kubernetes.io/zone").stdout.strip())
        with phases.phase("Twinpool: install CRD and operator"):
            scenario.install_twinpool(cluster, phases)
        with phases.phase(f"Pool {choice.pool}: from manifest to ready"):
            scenario.make_pool(cluster, choice, NAMESPACE, phases)
        with phases.phase("A question, and where the KV cache came from"):
            scenario.question_and_proof(cluster, choice, NAMESPACE, phases)
        if keep:
            phases.say("\n" + scenario.how_to_go_on(cluster, choice, NAMESPACE))
            cleanup.pop_all()
            print("\n" + phases.summary(), flush=True)


def _prepared(engine: str, phases: Phases, progress: Progress) -> dict[str, Image]:
    """Build and install what this engine needs and the cache does not hold; return the engine's image."""
    with phases.phase("Kubernetes control plane and kubelet: build (once)"):
        phases.say(str(toolchain.ensure(progress).folder))
    if engine == "simulated":
        return {}
    with phases.phase("vLLM for CPUs and NIXL: install (once)"):
        installed = ensure_engine(progress)
        phases.say(str(installed.folder))
    with phases.phase("SmolLM2-135M-Instruct: convert (once)"):
        phases.say(str(ensure_model(SMOLLM2, installed, progress)))
    return engine_images()


def prepare() -> None:
    """Build and install whatever the end-to-end tests need and the cache does not hold."""
    progress = Progress()
    toolchain.ensure(progress)
    ensure_helm(progress)
    ensure_prometheus(progress)
    installed = ensure_engine(progress)
    for model in MODELS.values():
        ensure_model(model, installed, progress)


def _kind_folder(name: str) -> Path:
    """Return where the credentials of kind's cluster and the archives of images lie."""
    return cache_dir() / "kind" / name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0 done, 1 failed with one message, 130 interrupted."""
    given = _parser().parse_args(arguments)
    try:
        match given.command:
            case "up":
                keep = sys.stdout.isatty() if given.keep is None else given.keep
                if given.cluster == "kind":
                    kind.up(f"twinpool-{given.name}", NAMESPACE, _kind_folder(given.name), keep, Phases(sys.stdout))
                else:
                    up(given.engine, given.name, keep)
            case "down" if given.cluster == "kind":
                kind.down(f"twinpool-{given.name}", Phases(sys.stdout))
            case "down":
                was_running = clusters.stop(given.name, Progress())
                print(f"cluster {given.name}: {'stopped' if was_running else 'was not running'}")
            case _:
                prepare()
    except TwinpoolError as error:
        print(f"\nfailed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
