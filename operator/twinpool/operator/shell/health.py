"""The operator's own HTTP endpoint: ``/healthz``, ``/readyz``, ``/metrics`` and ``/debug/pools``.

It runs in the loop that reconciles: a loop that is blocked answers no probe.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.operator.shell.journal import Journal
    from twinpool.operator.shell.metrics import Metrics

#: Seconds after which a reconciliation that has not ended counts as stuck; each request ends after 10.
STUCK_AFTER = 300.0


def health_application(
    ready: Callable[[], str], alive: Callable[[], str], metrics: Metrics, journal: Journal
) -> web.Application:
    """Return the application; ``ready`` and ``alive`` return what is wrong, empty when nothing is."""

    def probe(check: Callable[[], str]) -> Callable[[web.Request], object]:
        async def handler(_: web.Request) -> web.Response:
            problem = check()
            return web.Response(text=(problem or "ok") + "\n", status=503 if problem else 200)

        return handler

    async def metrics_handler(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def pools_handler(_: web.Request) -> web.Response:
        return web.json_response(journal.pools())

    async def pool_handler(request: web.Request) -> web.Response:
        namespace, name = request.match_info["namespace"], request.match_info["name"]
        found = journal.show((namespace, name))
        if found is None:
            text = f"this operator has not planned {namespace}/{name}: it does not exist, or another one leads\n"
            return web.Response(text=text, status=404)
        return web.json_response(found, dumps=lambda value: json.dumps(value, indent=2) + "\n")

    application = web.Application(client_max_size=1024)
    application.router.add_get("/debug/pools", pools_handler)
    application.router.add_get("/debug/pools/{namespace}/{name}", pool_handler)
    application.router.add_get("/healthz", probe(alive))  # type: ignore[arg-type]
    application.router.add_get("/readyz", probe(ready))  # type: ignore[arg-type]
    application.router.add_get("/metrics", metrics_handler)
    return application


async def serve(application: web.Application, host: str, port: int) -> web.AppRunner:
    """Start serving and return the runner, whose ``cleanup`` stops it."""
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner
