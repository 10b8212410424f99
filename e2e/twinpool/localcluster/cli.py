"""Command line of the local cluster: ``python -m twinpool.localcluster COMMAND``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import TwinpoolError
from twinpool.localcluster import cluster, images, nodes, toolchain
from twinpool.localcluster.cluster import LocalCluster
from twinpool.localcluster.images import Image, default_images
from twinpool.localcluster.progress import Progress
from twinpool.localcluster.supervisor import Settings, Supervisor

if TYPE_CHECKING:
    from collections.abc import Sequence


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m twinpool.localcluster", description="A Kubernetes cluster of plain processes on this machine."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, *, named: bool = True, output: bool = False) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if named:
            sub.add_argument("--name", default="default", help="name of the cluster (default: default)")
        if output:
            sub.add_argument("-o", "--output", choices=("text", "json"), default="text", help="form of the answer")
        return sub

    up = command("up", "start a cluster and stay in the foreground; Ctrl-C stops it", output=True)
    up.add_argument("--nodes", type=Path, metavar="FILE", help="YAML file of nodes (default: two nodes with 8 GPUs)")
    up.add_argument("--images", type=Path, metavar="FILE", help="JSON file of more images: how their names start")
    up.add_argument("--detach", action="store_true", help="return when the cluster is ready; 'down' stops it")
    up.add_argument("--until-eof", action="store_true", help="stop when standard input ends")
    command("down", "stop a cluster and wait until no process of it is left")
    command("status", "show a cluster: processes, addresses, files", output=True)
    command("kubeconfig", "print the path of the kubeconfig: export KUBECONFIG=$(... kubeconfig)")
    command("nodes", "list the nodes and their processes", output=True)
    for verb, text in (("kill-node", "take the power of a node"), ("start-node", "switch a node on again")):
        command(verb, text).add_argument("node")
    kubectl = command("kubectl", "run kubectl on the cluster; put its arguments after --")
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER)
    command("build", "build the cluster's binaries into the cache, if they are not there", named=False, output=True)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors go to standard error as one line, the exit status is then 1."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except TwinpoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # the cache's disk is full or not ours
        print(f"error: {error} - make room, or set TWINPOOL_CACHE to a folder that can be written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "up":
            return _up(arguments)
        case "down":
            found = cluster.stop(arguments.name, Progress())
            print(f"cluster {arguments.name!r} " + ("is stopped" if found else "was not running"))
        case "status":
            _show_status(arguments)
        case "kubeconfig":
            print(LocalCluster.find(arguments.name).kubeconfig)
        case "nodes":
            _show_nodes(arguments)
        case "kill-node":
            LocalCluster.find(arguments.name).kill_node(arguments.node)
        case "start-node":
            LocalCluster.find(arguments.name).start_node(arguments.node)
        case "kubectl":
            _kubectl(arguments)
        case _:
            folder = toolchain.ensure(Progress()).folder
            print(json.dumps({"binaries": str(folder)}) if arguments.output == "json" else folder)
    return 0


def _up(arguments: argparse.Namespace) -> int:
    progress = Progress()
    more: dict[str, Image] = images.load(arguments.images) if arguments.images else {}
    if arguments.detach:
        found = cluster.start_detached(arguments.name, arguments.nodes, more, progress)
        _announce(found.status(), arguments.output)
        return 0
    settings = Settings(
        name=arguments.name,
        nodes=nodes.load(arguments.nodes or nodes.default_file()),
        images={**default_images(), **more},
        binaries=toolchain.ensure(progress),
        until_eof=arguments.until_eof,
    )
    Supervisor(settings, progress).run(lambda status: _announce(status, arguments.output))
    return 0


def _announce(status: dict[str, Any], output: str) -> None:
    if output == "json":
        print(json.dumps(status), flush=True)
        return
    name = "" if status["name"] == "default" else f" --name {status['name']}"
    print(f"export KUBECONFIG={status['kubeconfig']}")
    print(f"export PATH={status['binaries']}:$PATH  # kubectl")
    print(f"# stop it with: python -m twinpool.localcluster down{name}", flush=True)


def _show_status(arguments: argparse.Namespace) -> None:
    status = cluster.status_of(arguments.name)
    if status is None:
        LocalCluster.find(arguments.name)  # says what to do
    assert status
    if arguments.output == "json":
        print(json.dumps(status))
        return
    print(f"cluster {status['name']} is {'ready' if status['ready'] else 'starting'} at {status['server']}")
    print(f"kubeconfig {status['kubeconfig']}\nlogs       {status['logs']}")
    for name, pid in {"supervisor": status["pid"], **status["components"]}.items():
        print(f"  {name:26} {_process(pid)}")
    for name, node in status["nodes"].items():
        print(f"  {'node ' + name:26} {_process(node['pid'])} at {node['address']}")


def _process(pid: int | None) -> str:
    return f"process {pid}" if pid else "not running"


def _show_nodes(arguments: argparse.Namespace) -> None:
    found = LocalCluster.find(arguments.name).status()["nodes"]
    if arguments.output == "json":
        print(json.dumps(found))
        return
    for name, node in found.items():
        print(f"{name:20} {node['address']:16} {_process(node['pid'])}")


def _kubectl(arguments: argparse.Namespace) -> None:
    found = LocalCluster.find(arguments.name)
    words = arguments.arguments[1:] if arguments.arguments[:1] == ["--"] else arguments.arguments
    os.execve(found.kubectl_path, ["kubectl", *words], found.environment)  # noqa: S606
