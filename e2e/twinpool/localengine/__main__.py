"""``python -m twinpool.localengine``: install vLLM for CPUs, make the models, say where they are."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import TwinpoolError
from twinpool.localcluster.progress import Progress
from twinpool.localengine import contract
from twinpool.localengine.install import ensure_engine
from twinpool.localengine.layout import engine
from twinpool.localengine.models import MODELS, ensure_model
from twinpool.localengine.newest import fetch_newest

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    progress = Progress()
    try:
        if options.command == "contract":
            return _contract(options.source or fetch_newest(progress)[1], options.output)
        if options.command in ("install", "models"):
            installed = ensure_engine(progress)
            if options.command == "models":
                for name in options.names or MODELS:
                    ensure_model(MODELS[name], installed, progress)
        if options.command == "path" and not engine().installed:
            print("vLLM is not installed - run: python -m twinpool.localengine install", file=sys.stderr)
            return 1
    except TwinpoolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; run it again to go on", file=sys.stderr)
        return 130
    _show(options.command, options.output)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m twinpool.localengine", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in (
        ("install", "install vLLM for CPUs into the cache (once)"),
        ("models", "install vLLM and make the models (once each)"),
        ("status", "say what is there"),
        ("path", "print the folder of the engine's virtual environment"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("-o", "--output", choices=("text", "json"), default="text", help="how to print the result")
        if name == "models":
            text = f"which ({', '.join(MODELS)}); default: all"
            command.add_argument("names", nargs="*", type=_model, metavar="MODEL", help=text)
    command = commands.add_parser("contract", help="say what of vLLM's names that Twinpool needs another version lacks")
    text = "the vllm package of that version, as in its source; default: the newest of the package index"
    command.add_argument("source", type=Path, nargs="?", metavar="DIR", help=text)
    command.add_argument("-o", "--output", choices=("text", "json"), default="text", help="how to print the result")
    return parser


def _contract(source: Path, output: str) -> int:
    """Print what a version lacks and what changed since the installed one; 1 when something needed is gone."""
    other = contract.read(source)
    lacks = contract.missing(contract.needed(), other)
    changed = contract.changes(contract.read(contract.installed_package(engine().venv)), other)
    if output == "json":
        print(json.dumps({"missing": lacks, "changes": changed}, indent=1))
    else:
        for line in (*(f"MISSING {name}" for name in lacks), *changed):
            print(line)
        print(f"{len(lacks)} names that Twinpool needs are gone; {len(changed)} names changed")
    return 1 if lacks else 0


def _model(name: str) -> str:
    if name not in MODELS:
        raise argparse.ArgumentTypeError(f"unknown model {name!r}; there are {', '.join(MODELS)}")
    return name


def status() -> dict[str, Any]:
    """Return what is there and where."""
    wanted = engine()
    return {
        "engine": str(wanted.venv),
        "python": str(wanted.python),
        "installed": wanted.installed,
        **({"facts": wanted.facts()} if wanted.installed else {}),
        "models": {name: {"path": str(model.folder), "made": model.made} for name, model in MODELS.items()},
    }


def _show(command: str, output: str) -> None:
    facts = status()
    if output == "json":
        print(json.dumps(facts, indent=1))
    elif command == "path":
        print(facts["engine"])
    else:
        print(f"engine: {facts['engine']} ({'installed' if facts['installed'] else 'not installed'})")
        for name, model in facts["models"].items():
            print(f"model {name}: {model['path']} ({'made' if model['made'] else 'not made'})")


if __name__ == "__main__":
    raise SystemExit(main())
