"""Spans of sampled requests: one for the request, one for the queue, one for each leg; engines add theirs to a leg's.

OpenTelemetry is only imported where a pool asks for tracing: it costs memory in every data process. Spans are sent by
a thread of its own; when the collector does not keep up they are dropped, and no request waits.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from twinpool.router.logic import trace

if TYPE_CHECKING:
    from random import Random

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

    from twinpool.core.protocol import RouterConfig
    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.shell.call import Call

#: Seconds for one batch, and for the last one when the process ends.
_EXPORT_SECONDS = 5.0
_NANOSECONDS = 1e9


class Tracing:
    """Where spans go, and which requests have some. ``exporter`` replaces the collector in tests."""

    def __init__(self, config: RouterConfig, rng: Random, exporter: SpanExporter | None = None) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # A collector that is away is not worth a line for every batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        resource = Resource.create(
            {
                "service.name": "twinpool-router",
                "service.namespace": config.namespace,
                "twinpool.pool": config.pool,
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        chosen = exporter or OTLPSpanExporter(endpoint=config.tracing_url, timeout=_EXPORT_SECONDS)
        self._provider.add_span_processor(BatchSpanProcessor(chosen, export_timeout_millis=_EXPORT_SECONDS * 1000))
        self._tracer = self._provider.get_tracer("twinpool.router")
        self._sampling, self._rng = config.tracing_sampling, rng

    def begin(self, call: Call, age: float) -> Trace | None:
        """Begin the trace of a request that was complete ``age`` seconds ago; None when it has none."""
        header = call.forwarded.traceparent
        parent = trace.parent(header) if header else None
        if not (parent.sampled if parent else self._rng.random() < self._sampling):
            return None
        return Trace(self._tracer, call, parent, time.time_ns() - int(age * _NANOSECONDS))

    def close(self) -> None:
        """Send what is left; takes some seconds at most, so it is for a thread."""
        self._provider.force_flush(int(_EXPORT_SECONDS * 1000))
        self._provider.shutdown()


class Trace:
    """The spans of one request. Its legs follow each other: a new one ends the one before."""

    __slots__ = ("_begun", "_context", "_leg", "_root", "_tracer")

    def __init__(self, tracer: Tracer, call: Call, parent: trace.Parent | None, begun: int) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context

        self._tracer = tracer
        self._begun = begun
        attributes: dict[str, AttributeValue] = {
            "http.request.method": "POST",
            "url.path": call.route.value,
            "twinpool.request_id": call.forwarded.request_id.decode(),
            "gen_ai.request.stream": call.request.stream,
        }
        self._root = tracer.start_span(
            f"POST {call.route.value}", _remote(parent), SpanKind.SERVER, attributes, start_time=begun
        )
        self._context = set_span_in_context(self._root)
        self._leg: Span | None = None

    def admitted(self) -> None:
        """There was a place at the workers: what went before was the queue."""
        self._tracer.start_span("queue", self._context, start_time=self._begun).end()

    def begin_leg(self, role: str, endpoint: Endpoint) -> None:
        """A leg goes to ``endpoint``."""
        from opentelemetry.trace import SpanKind

        self.end_leg("superseded")
        attributes: dict[str, AttributeValue] = {"server.address": endpoint.host, "server.port": endpoint.port}
        attributes["k8s.pod.name"] = endpoint.pod
        self._leg = self._tracer.start_span(role, self._context, SpanKind.CLIENT, attributes)

    def header(self) -> bytes:
        """Return the header line that puts the engine's spans below the present leg."""
        context = (self._leg or self._root).get_span_context()
        return trace.line(context.trace_id, context.span_id)

    def first_piece(self) -> None:
        """The first piece of the answer came over the present leg."""
        if self._leg is not None:
            self._leg.add_event("first token")

    def end_leg(self, error: str = "") -> None:
        """The present leg is over, for the reason ``error`` when it brought nothing."""
        from opentelemetry.trace import StatusCode

        leg, self._leg = self._leg, None
        if leg is not None:
            if error:
                leg.set_attribute("error.type", error)
                leg.set_status(StatusCode.ERROR)
            leg.end()

    def end(self, status: int, handoff: str, reason: str, prompt_tokens: int, events: int) -> None:
        """The request is over."""
        from opentelemetry.trace import StatusCode

        self.end_leg("dropped")
        self._root.set_attributes(
            {
                "http.response.status_code": status,
                "twinpool.handoff": handoff,
                "twinpool.reason": reason,
                "twinpool.prompt_tokens.estimated": prompt_tokens,
                "twinpool.events": events,
            }
        )
        if status >= 500:
            self._root.set_status(StatusCode.ERROR)
        self._root.end()


def _remote(parent: trace.Parent | None) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        # Empty, and not the context of this thread: what else is traced here is not the request's parent.
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED)
    return set_span_in_context(NonRecordingSpan(SpanContext(parent.trace, parent.span, True, flags)), Context())
