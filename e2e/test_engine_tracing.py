"""Spans over both hops into the real vLLM: its own span is a child of the leg that the router sent it."""

from __future__ import annotations

import contextlib
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from twinpool.demo.client import post
from twinpool.localcluster.waiting import wait_until
from twinpool.localengine.pod import LauncherPod, end, tiny_config
from twinpool.localengine.router import routing
from twinpool.worker.inject import inject

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from twinpool.localengine.layout import Engine

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collector(ThreadingHTTPServer):
    """Takes spans as OpenTelemetry's collector does."""

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.spans: list[tuple[str, Any]] = []
        self.url = f"http://{address}:{self.server_address[1]}/v1/traces"

    def of(self, service: str) -> list[Any]:
        return [span for name, span in self.spans if name == service and span.trace_id.hex() == TRACE]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in message.resource_spans:
            labels = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
            found = [span for scope in resource.scope_spans for span in scope.spans]
            self.server.spans += [(labels["service.name"], span) for span in found]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def address(number: int) -> str:
    return f"127.{160 + os.getpid() % 16}.{os.getpid() // 16 % 256}.{number}"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector(address(9)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def router(engine: Engine, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A router before a prefill and a decode worker, all of which trace."""
    folder: Path = tmp_path_factory.mktemp("traced")
    zipapp = inject(folder)
    pods = []
    for number, role in enumerate(("prefill", "decode"), 1):
        settings = tiny_config(role=role, python=str(engine.python), tracing_url=collector.url)
        pods.append(LauncherPod(engine, zipapp, folder / role, address(number), settings))
    workers = [{"role": r, "host": p.ip} for r, p in zip(("prefill", "decode"), pods, strict=True)]
    with contextlib.ExitStack() as stack:
        stack.callback(end, *(pod.process for pod in pods))
        for pod in pods:
            pod.wait_ready()
        yield stack.enter_context(routing(folder, address(3), workers, tracing_url=collector.url, tracing_sampling=0.0))


def test_an_engines_span_is_a_child_of_the_leg_that_reached_it(router: str, collector: Collector) -> None:
    body = {"model": "tiny", "prompt": "one two three four five six seven eight", "max_tokens": 8, "temperature": 0}
    reply = post(f"{router}/v1/completions", body, traceparent=f"00-{TRACE}-00f067aa0ba902b7-01")
    assert reply.status == 200

    def complete() -> bool:
        # The router sends a request's spans in one batch or in two, as its clock falls.
        ours = {span.name for span in collector.of("twinpool-router")}
        engines = all(collector.of(service) for service in ("twinpool-prefill", "twinpool-decode"))
        return engines and {"POST /v1/completions", "queue", "prefill", "decode"} <= ours

    wait_until(complete, 60, "router and both engines sent their spans")
    legs = {span.name: span for span in collector.of("twinpool-router")}
    for role in ("prefill", "decode"):
        own = [span for span in collector.of(f"twinpool-{role}") if span.parent_span_id == legs[role].span_id]
        assert own, f"the {role} engine has no span below the router's leg"
        for span in own:
            assert legs[role].start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= legs[role].end_time_unix_nano + 50_000_000


def test_what_the_router_does_not_trace_no_engine_traces(router: str, collector: Collector) -> None:
    before = len(collector.spans)
    body = {"model": "tiny", "prompt": "nobody traces this", "max_tokens": 4, "temperature": 0}
    post(f"{router}/v1/completions", body)
    post(f"{router}/v1/completions", body, traceparent=f"00-{TRACE[::-1]}-00f067aa0ba902b7-01")
    wait_until(lambda: len(collector.spans) >= before + 6, 60, "the second request's spans have come")
    assert {span.trace_id.hex() for _, span in collector.spans[before:]} <= {TRACE, TRACE[::-1]}
