"""The operator's own HTTP endpoint: ``/healthz``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.operator.shell.metrics import Metrics

#: Seconds after which a reconciliation that has not ended counts as stuck; each request ends after 10.
STUCK_AFTER = 300.0


def health_application(ready: Callable[[], str], alive: Callable[[], str], metrics: Metrics) -> web.Application:
    """Return the application; ``ready`` and ``alive`` return what is wrong, empty when nothing is."""

    def probe(check: Callable[[], str]) -> Callable[[web.Request], object]:
        async def handler(_: web.Request) -> web.Response:
            problem = check()
            return web.Response(text=(problem or "ok") + "\n", status=503 if problem else 200)

        return handler

    async def metrics_handler(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    application = web.Application(client_max_size=1024)
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
