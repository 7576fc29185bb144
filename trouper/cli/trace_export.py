"""Export of traces, for a flag or OpenTelemetry's own variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from trouper import __version__
from trouper.protocol.installing import command_for
from trouper.protocol.problems import SettingsInvalid

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from trouper.web.observability.exchange import ExchangeObserver
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
PATH = "/v1/traces"
LAST_SPANS_S = 3.0  # For spans that a collector has not taken


@contextmanager
def tracing(endpoint: str | None) -> Iterator[tuple[ExchangeObserver, ...]]:
    """Yield observers of exchanges. The context surrounds `trio.run`. Raises `SettingsInvalid`."""
    if not _is_enabled(endpoint):
        yield ()
        return
    _check(endpoint)
    try:
        from trouper.web.observability.request_spans import Traces

        provider = _provider(endpoint)
    except ImportError:
        origin = (
            "--otlp-endpoint"
            if endpoint
            else next(name for name in VARIABLES if os.environ.get(name))
        )
        raise SettingsInvalid(
            f"{origin} needs the extra `otel` of trouper: {command_for('otel')}"
        ) from None
    try:
        yield (Traces(provider.get_tracer("trouper", __version__)).observe,)
    finally:
        ending = Thread(target=provider.shutdown, daemon=True)
        ending.start()
        ending.join(LAST_SPANS_S)


def _check(endpoint: str | None) -> None:
    """Errors of these settings would appear with each batch of spans. Raises `SettingsInvalid`."""
    if endpoint and not _is_url(endpoint):
        raise SettingsInvalid(
            f"--otlp-endpoint {endpoint} is no URL; give one as http://127.0.0.1:4318"
        )
    for name in PROTOCOLS:
        if os.environ.get(name, PROTOCOL) != PROTOCOL:
            raise SettingsInvalid(
                f"{name} is {os.environ[name]!r}, and traces are sent by {PROTOCOL} only; unset it"
            )
    if os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp" and not endpoint:
        raise SettingsInvalid("OTEL_TRACES_EXPORTER must be otlp, or none for no traces")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_enabled(endpoint: str | None) -> bool:
    # OpenTelemetry's switches do not apply to the flag.
    if endpoint:
        return True
    off = (
        os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
    )
    return not off and any(os.environ.get(name) for name in VARIABLES)


def _provider(endpoint: str | None) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "trouper")
    resource = Resource.create({"service.name": name, "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(_full(endpoint))))
    return provider


def _full(endpoint: str | None) -> str | None:
    """Return the collector's URL with the path; None: the variables decide."""
    if not endpoint or endpoint.rstrip("/").endswith(PATH):
        return endpoint or None
    return endpoint.rstrip("/") + PATH
