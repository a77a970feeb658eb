"""Where spans go. Nothing of OpenTelemetry is loaded unless they go somewhere."""

import os
import re
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from penstock.schemas.process.start import Settings

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Tracing

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class TracingSettings(Settings):
    """Where spans go. The SDK's own variables choose the rest, as OTEL_TRACES_SAMPLER."""

    otlp_traces_endpoint: str | None = Field(
        None,
        description="spans go there by OTLP over HTTP, as to http://127.0.0.1:4318/v1/traces;"
        " unset: where OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere",
    )

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def is_a_url(cls, url: str | None) -> str | None:
        if url is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
            raise ValueError("must be a URL of OTLP over HTTP, as http://127.0.0.1:4318/v1/traces")
        return url


def tracing(settings: TracingSettings, service: str) -> "Tracing | None":
    """Return what makes spans, or None where no setting says where they go, or one forbids them."""
    endpoint = settings.otlp_traces_endpoint
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    from penstock.schemas.process.spans import Tracing

    return Tracing(endpoint, service)
