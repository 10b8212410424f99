"""``twinpool-router``: the HTTP endpoint of a pool."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import resource
import sys
from typing import TYPE_CHECKING, get_args

import uvloop

from twinpool.core.errors import InvalidValue, TwinpoolError
from twinpool.core.protocol import (
    ROUTER_ADMIN_PORT,
    ROUTER_CONFIG_ENV,
    ROUTER_KEYS_DIRECTORY,
    ROUTER_PORT,
    ROUTER_TLS_DIRECTORY,
    Policy,
    RouterConfig,
)
from twinpool.router.settings import Limits, Settings
from twinpool.router.shell.control import Control
from twinpool.router.shell.listening import listen
from twinpool.router.shell.secrets import Certificate

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence

_POLICIES = get_args(Policy)


def parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the command line of the router; ``environment`` gives the defaults."""
    result = argparse.ArgumentParser(
        prog="twinpool-router",
        description="OpenAI-compatible endpoint in front of the prefill and decode workers of one pool.",
        epilog=f"In a pod everything comes from {ROUTER_CONFIG_ENV} (JSON), POD_IP and the Kubernetes API. Without "
        "Kubernetes, list the workers in a file: --endpoints workers.json --model NAME",
    )
    host = environment.get("POD_IP") or "127.0.0.1"
    result.add_argument("--host", default=host, help="address to listen on (default: $POD_IP, else %(default)s)")
    result.add_argument("--port", type=int, default=ROUTER_PORT, help="port for clients (default: %(default)s)")
    result.add_argument(
        "--admin-port",
        type=int,
        default=ROUTER_ADMIN_PORT,
        help="port for /metrics and /ready (default: %(default)s)",
    )
    result.add_argument(
        "--workers", type=int, help="data processes (default: one for each core that the pool asks for)"
    )
    result.add_argument(
        "--endpoints",
        metavar="FILE",
        help='JSON list of workers in place of Kubernetes: [{"role": "prefill|decode", "host": ..., "port": ...}]',
    )
    result.add_argument(
        "--copy", action="append", default=[], metavar="HOST:PORT",
        help="admin port of another router of the same workers, in place of Kubernetes; may be repeated",
    )  # fmt: skip
    result.add_argument("--model", action="append", default=[], help="model id to serve; may be repeated")
    result.add_argument("--policy", choices=_POLICIES, help="how a worker is chosen (default: least-load)")
    result.add_argument(
        "--lame-duck", type=float, default=3.0, metavar="SECONDS",
        help="how long connections are still taken after SIGTERM (default: %(default)s)",
    )  # fmt: skip
    result.add_argument("--api-keys", metavar="DIRECTORY", help="one file for each key: a client must send one of them")
    result.add_argument("--tls", metavar="DIRECTORY", help="tls.crt and tls.key: serve HTTPS")
    result.add_argument("--max-body-bytes", type=int, default=Limits().body, help="default: 64 MiB")
    return result


def settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Put flags and environment together.

    Raises
    ------
    InvalidValue
        When something needed is missing or a number is out of range.
    """
    if ROUTER_CONFIG_ENV in environment:
        config = RouterConfig.from_json(environment[ROUTER_CONFIG_ENV])
    elif arguments.endpoints and arguments.model:
        config = RouterConfig(pool="static", namespace="default", models=())
    else:
        raise InvalidValue(
            f"the environment variable {ROUTER_CONFIG_ENV} is not set",
            "let the operator set it, or give --endpoints FILE and --model NAME",
        )
    changes = {"models": tuple(arguments.model)} if arguments.model else {}
    if arguments.policy:
        changes["policy"] = arguments.policy
    config = RouterConfig(**{**{f: getattr(config, f) for f in config.__slots__}, **changes})
    workers = config.processes if arguments.workers is None else arguments.workers
    if workers < 1:
        raise InvalidValue(f"--workers is {workers}", "give at least 1")
    if arguments.max_body_bytes < 1 or arguments.lame_duck < 0:
        raise InvalidValue("--max-body-bytes and --lame-duck must be positive", "leave them away for the defaults")
    body = arguments.max_body_bytes
    return Settings(
        config=config,
        host=arguments.host,
        port=arguments.port,
        admin_port=arguments.admin_port,
        workers=workers,
        endpoints=arguments.endpoints,
        copies=tuple(map(_address, arguments.copy)),
        lame_duck=arguments.lame_duck,
        keys=arguments.api_keys or (ROUTER_KEYS_DIRECTORY if config.auth else None),
        tls=arguments.tls or (ROUTER_TLS_DIRECTORY if config.tls else None),
        limits=Limits(body=body, bodies=max(Limits().bodies, 2 * body)),
    )


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidValue(f"--copy is {text!r}", "write the host and the admin port of a router, as in 10.0.0.1:8081")
    return host, int(port)


def allow_connections() -> int:
    """Raise this process's limit of open files to what it may have, for the data processes too; return it.

    Container runtimes start processes with 1024, which are 512 streams: each holds a client and an engine.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until it is told to stop; return the exit status."""
    arguments = parser(os.environ).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        chosen = settings(arguments, os.environ)
        allow_connections()
        if chosen.tls is not None:
            Certificate(chosen.tls)  # said once here, not by every data process again and again
        with listen(chosen.host, chosen.port) as listener:
            uvloop.run(_run(chosen, listener))
    except TwinpoolError as error:
        print(f"twinpool-router: {error}", file=sys.stderr)
        return 2
    return 0


#: Objects made and not freed after which cycles among the young are looked for: engines' messages are thousands of
#: small ones without any, which live until their message was taken.
_YOUNG = 20_000


async def _run(chosen: Settings, listener: socket.socket) -> None:
    gc.freeze()
    gc.set_threshold(_YOUNG)
    await Control(chosen, listener).run()


if __name__ == "__main__":
    sys.exit(main())
