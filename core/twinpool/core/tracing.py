"""The ``tracing`` block of a pool: where spans go, and of how many requests."""

from __future__ import annotations

from pydantic import Field

from twinpool.core.fields import Part, rule, rules

_ENDPOINT = r"^https?://[A-Za-z0-9._:\[\]-]+(/[A-Za-z0-9._/-]*)?$"

#: Where a collector takes spans below its address (OTLP/HTTP specification).
_PATH = "/v1/traces"


class Tracing(Part):
    """Spans of requests, sent as OpenTelemetry's OTLP over HTTP."""

    endpoint: str = Field(
        max_length=512,
        pattern=_ENDPOINT,
        description="Address of a collector, such as http://otel-collector.monitoring.svc:4318; /v1/traces is added.",
        json_schema_extra=rules(
            rule(
                f"self.matches(r'{_ENDPOINT}')",
                "must be the http or https address of a collector (http://otel-collector.monitoring:4318)",
            )
        ),
    )
    sampling: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of requests that are traced; one whose client traces it (traceparent) always is.",
    )

    @property
    def url(self) -> str:
        """Return where spans are posted."""
        return self.endpoint.rstrip("/").removesuffix(_PATH) + _PATH
