"""The launcher's HTTP endpoint: its paths are ``/healthz``, ``/readyz``, ``/status``, ``/preflight`` and ``/metrics``,
and ``/group`` for other ranks.

Small on purpose: one answer per connection, at most :data:`MAX_CONNECTIONS` at once, so that nobody on the
pod network can hold up the kubelet's probes or the launcher's memory.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import AF_INET6
from typing import TYPE_CHECKING, Any

from twinpool.core.errors import TwinpoolError
from twinpool.worker.logic import report

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from twinpool.worker.logic.report import Snapshot

MAX_CONNECTIONS = 16
#: Longest report of another rank, in bytes.
MAX_REPORT = 65536
#: Seconds a client has to send its request and take the answer.
CLIENT_TIMEOUT = 5.0


class PortTaken(TwinpoolError):
    """The launcher's port cannot be bound."""


class Endpoint:
    """Serves the snapshot that ``read`` returns, on threads of its own, until :meth:`close`.

    ``hear`` answers ``POST /group``; without it there is no such path.

    Raises
    ------
    PortTaken
        When the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        read: Callable[[], Snapshot],
        hear: Callable[[bytes], tuple[int, str]] | None = None,
    ) -> None:
        members = {"read": staticmethod(read), "hear": staticmethod(hear) if hear else None}
        handler = type("Handler", (_Handler,), members)
        server = type("Server", (_Server,), {"address_family": AF_INET6}) if ":" in host else _Server
        try:
            self._server = server((host, port), handler)
        except OSError as error:
            raise PortTaken(
                f"the launcher cannot listen on {host} port {port}: {error.strerror}",
                "pods with hostNetwork collide on one node; by hand, choose another POD_IP such as 127.0.0.2",
            ) from None
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 32

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve the connection, or drop it when too many are open."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any) -> None:
        """Serve one connection and make room for the next."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that go away; the engine's log is not the place for them."""


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_TIMEOUT
    server_version = "twinpool-worker"
    sys_version = ""
    read: Callable[[], Snapshot]
    hear: Callable[[bytes], tuple[int, str]] | None

    def do_POST(self) -> None:
        """Answer the report of another rank."""
        length = self.headers.get("Content-Length", "")
        if self.hear is None or self.path != "/group":
            self._answer(404, "no rank of a group is expected here\n", "text/plain; charset=utf-8")
        elif not length.isdecimal() or int(length) > MAX_REPORT:
            self._answer(400, f"a report has at most {MAX_REPORT} bytes\n", "text/plain; charset=utf-8")
        else:
            self._answer(*self.hear(self.rfile.read(int(length))), "application/json")

    def do_GET(self) -> None:
        """Answer one of the five paths."""
        snapshot = self.read()
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(200, "ok\n", "text/plain; charset=utf-8")
        elif path == "/readyz":
            self._answer(*report.readyz(snapshot), "application/json")
        elif path == "/status":
            self._answer(200, report.status(snapshot), "application/json")
        elif path == "/preflight":
            self._answer(*report.preflight(snapshot), "application/json")
        elif path == "/metrics":
            self._answer(200, report.metrics(snapshot), "text/plain; version=0.0.4; charset=utf-8")
        else:
            self._answer(
                404,
                "the paths here are /healthz, /readyz, /status, /preflight and /metrics\n",
                "text/plain; charset=utf-8",
            )

    def _answer(self, code: int, body: str, content_type: str) -> None:
        data = body.encode()
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing: a probe every few seconds would bury the engine's log."""
