"""Serves the page and its frames on loopback. Read-only; nothing is loaded from anywhere else.

Other pages in the same browser may not read it: what does not ask for this machine by its own name or address is
refused, so that a name of somebody else's that leads here (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import json
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import TYPE_CHECKING

from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from twinpool.cli.live.watcher import Watcher

_HOST = "127.0.0.1"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Server(ThreadingHTTPServer):
    """The page of one watcher.

    Raises
    ------
    TwinpoolError
        When the port is taken.
    """

    daemon_threads = True

    def __init__(self, port: int, watcher: Watcher) -> None:
        self.watcher = watcher
        self.content = files("twinpool.cli.live").joinpath("page.html").read_bytes()
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            raise TwinpoolError(f"port {port} cannot be used: {error.strerror}", "give another --port") from None

    @property
    def url(self) -> str:
        """Return where the page is."""
        return f"http://{_HOST}:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if (self.headers.get("Host") or "").rpartition(":")[0] not in (_HOST, "localhost"):
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for the machine that it runs on\n")
        elif self.path == "/":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.content)
        elif self.path == "/frame":
            watcher = self.server.watcher
            body = json.dumps({"problem": watcher.problem, "frame": watcher.frame}).encode()
            self._answer(HTTPStatus.OK, "application/json", body)
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there are / and /frame\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing: there is a request every second."""
