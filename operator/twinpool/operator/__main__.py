"""``twinpool-operator``: makes ``InferencePool`` objects run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import uuid
from importlib import metadata
from typing import TYPE_CHECKING

from twinpool.core.errors import InvalidValue, TwinpoolError
from twinpool.core.links import LINKS_HELP, with_links
from twinpool.core.pod_defaults import parse as parse_pods
from twinpool.core.topology import AUTO, PRESETS
from twinpool.core.topology import parse as parse_topology
from twinpool.operator.logic.settings import Settings
from twinpool.operator.shell.operator import Options, run_operator

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse(arguments: Sequence[str], environment: dict[str, str]) -> tuple[Options, str]:
    """Return the options and the log level that flags and environment say; flags win."""
    defaults = Settings()
    parser = argparse.ArgumentParser("twinpool-operator", description="Makes InferencePool objects run.")

    def add(flag: str, variable: str, default: str, text: str) -> None:
        value = environment.get(variable) or default
        shown = f" [{variable}; default: {default or 'empty'}]"
        parser.add_argument(flag, default=value, help=text + shown)

    add("--worker-image", "TWINPOOL_WORKER_IMAGE", defaults.worker_image, "image that carries the launcher")
    add("--router-image", "TWINPOOL_ROUTER_IMAGE", defaults.router_image, "image of the router")
    add("--vllm-image", "TWINPOOL_VLLM_IMAGE", defaults.vllm_image, "image of vLLM for pools that name none")
    levels = f"node labels of the network's levels: {', '.join((AUTO, *PRESETS))}, or LEVEL=LABEL,LEVEL=LABEL"
    add("--topology", "TWINPOOL_TOPOLOGY", AUTO, levels)
    add("--links", "TWINPOOL_LINKS", "", LINKS_HELP)
    add("--pods", "TWINPOOL_PODS", "", "defaults of all pools' pods, JSON: labels, pull secrets, tolerations, ...")
    add("--namespace", "TWINPOOL_NAMESPACE", "", "serve only this namespace (empty: all)")
    add("--lease-namespace", "POD_NAMESPACE", "twinpool-system", "namespace of the Lease")
    add("--lease-name", "TWINPOOL_LEASE_NAME", "twinpool-operator", "name of the Lease")
    add("--host", "POD_IP", "0.0.0.0", "address for /healthz, /readyz and /metrics")  # noqa: S104
    add("--log-level", "TWINPOOL_LOG_LEVEL", "info", "debug, info, warning or error")
    parser.add_argument("--port", type=int, default=8080, help="port for /healthz, /readyz and /metrics [8080]")
    given = parser.parse_args(arguments)
    if given.log_level not in ("debug", "info", "warning", "error"):
        parser.error(f"--log-level {given.log_level}: must be debug, info, warning or error")
    try:
        topology = with_links(parse_topology(given.topology), given.links)
        pods = parse_pods(given.pods)
    except InvalidValue as error:
        parser.error(str(error))
    options = Options(
        identity=f"{environment.get('POD_NAME') or os.uname().nodename}-{uuid.uuid4().hex[:8]}",
        host=given.host,
        port=given.port,
        namespace=given.namespace,
        lease_namespace=given.lease_namespace,
        lease_name=given.lease_name,
        settings=Settings(
            given.worker_image,
            given.router_image,
            given.vllm_image,
            topology,
            version=metadata.version("twinpool"),
            pods=pods,
        ),
    )
    return options, given.log_level


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operator until it is stopped; return the exit code."""
    options, level = parse(sys.argv[1:] if arguments is None else arguments, dict(os.environ))
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
    # kopf reports every event it dispatches; our own lines say what was done.
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        asyncio.run(run_operator(options))
    except TwinpoolError as error:
        print(f"twinpool-operator: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
