"""``twinpool-worker``: run an engine as PID 1, inject the launcher into a pod, or be the simulated engine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.core.errors import InvalidValue, TwinpoolError
from twinpool.core.protocol import WorkerConfig
from twinpool.worker.release import version

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if argv[:1] == ["simulate"]:
        return _simulate(argv[1:])
    options = _parser().parse_args(argv)
    if options.command == "version":
        print(version())
        return 0
    if options.command == "inject":
        return _inject(options.directory)
    if options.command == "weights":
        return _weights(options.file)
    if options.command == "render":
        return _serve(_renderer)
    if options.command == "preflight-rank":
        return _preflight_rank(options)
    if options.command == "preflight":
        return _preflight(options)
    return _serve(_worker)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="twinpool-worker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("run", help=f"run the engine that {protocol.WORKER_CONFIG_ENV} describes, as PID 1 of its pod")
    commands.add_parser("render", help="be the renderer of the pool: texts and chats in, token ids out")
    inject = commands.add_parser("inject", help="write the launcher, one file, into a directory")
    inject.add_argument("directory", type=Path, help="an existing directory that the engine's container mounts")
    # Only for the help text: its own arguments are parsed by the engine.
    commands.add_parser("simulate", help="be an engine that invents tokens and times", add_help=False)
    _add_preflight(commands)
    commands.add_parser("version", help="print the version")
    weights = commands.add_parser("weights", help="fetch and check the model before the engine starts")
    weights.add_argument("file", type=Path, help="where progress is written")
    return parser


def _add_preflight(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add what the launcher starts in the engine's place, and what that starts for each rank."""
    whole = commands.add_parser("preflight", help="measure the links between the ranks of a group, then be the engine")
    for name in ("python", "pod", "leader"):
        whole.add_argument(f"--{name}", required=True)
    for name in ("local", "first", "world", "port"):
        whole.add_argument(f"--{name}", type=int, required=True)
    whole.add_argument("--result", type=Path, required=True)
    whole.add_argument("--meet", type=float, default=120.0, help="seconds until all ranks have come")
    whole.add_argument("--budget", type=float, default=20.0, help="seconds for the measurement after that")
    whole.add_argument("engine", nargs="+", help="the engine's command line, after --")
    rank = commands.add_parser("preflight-rank", help="be one rank of a preflight")
    for name in ("pod", "leader"):
        rank.add_argument(f"--{name}", required=True)
    for name in ("rank", "world", "local", "port"):
        rank.add_argument(f"--{name}", type=int, required=True)
    for name in ("meet", "budget"):
        rank.add_argument(f"--{name}", type=float, required=True)
    rank.add_argument("file", type=Path)


def _preflight(options: argparse.Namespace) -> int:
    from twinpool.worker.shell import preflight

    values = {key: value for key, value in vars(options).items() if key not in ("command", "engine")}
    return preflight.run(preflight.Plan(**values), options.engine)


def _preflight_rank(options: argparse.Namespace) -> int:
    from twinpool.worker.shell import preflight_rank

    values = {key: value for key, value in vars(options).items() if key not in ("command", "file")}
    preflight_rank.run(preflight_rank.Seat(**values), options.file)
    return 0


def _simulate(argv: Sequence[str]) -> int:
    # Imported here because the zipapp does not carry it, nor what it depends on.
    from twinpool.worker.engines.simulated.server import main as simulate

    return int(simulate(argv) or 0)


def _inject(directory: Path) -> int:
    from twinpool.worker.inject import inject

    try:
        print(f"wrote {inject(directory)}")
    except TwinpoolError as error:
        print(f"twinpool-worker: {error}", file=sys.stderr)
        return 1
    return 0


def _weights(file: Path) -> int:
    from twinpool.worker.shell import weights

    return weights.run(_config(), os.environ, file)


def _config() -> WorkerConfig:
    text = os.environ.get(protocol.WORKER_CONFIG_ENV)
    if text is None:
        raise InvalidValue(f"{protocol.WORKER_CONFIG_ENV} is not set", "let the operator set it")
    return WorkerConfig.from_json(text)


def _worker(config: WorkerConfig) -> int:
    from twinpool.worker.shell.launcher import run

    return run(config)


def _renderer(config: WorkerConfig) -> int:
    from twinpool.worker.shell.renderer import become

    return become(config, os.environ)


def _serve(run: Callable[[WorkerConfig], int]) -> int:
    from twinpool.worker.shell.host import log, write_termination_message

    try:
        return run(_config())
    except TwinpoolError as error:
        log(str(error))
        write_termination_message(str(error), os.environ)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
