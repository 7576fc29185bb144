"""Where traces go: nowhere unless asked, and to a collector over HTTP, whose silence holds up
nobody."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading

import pytest

from tests.otlp import collecting
from trouper.cli.trace_export import PROTOCOLS, VARIABLES, tracing
from trouper.protocol.installing import command_for
from trouper.protocol.problems import SettingsInvalid
from trouper.web.observability.exchange import Exchange

EXCHANGE = Exchange(
    method="GET", path="/", headers={}, request_id="a", began_at=1.0, ended_at=2.0, unix_offset=1e9
)


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *VARIABLES,
        *PROTOCOLS,
        "OTEL_SDK_DISABLED",
        "OTEL_TRACES_EXPORTER",
        "OTEL_SERVICE_NAME",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
def test_what_is_told_until_the_end_arrives(path: str) -> None:
    with collecting() as collector, tracing(collector.url + path) as observers:
        for observe in observers:
            observe(EXCHANGE)
    assert [path for path, _ in collector.requests] == ["/v1/traces"]
    assert collector.resource["service.name"] == "trouper"
    assert [span.name for span in collector.servers] == ["GET"]


def test_opentelemetrys_own_variables_turn_it_on_and_off(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with tracing(None) as observers:
            for observe in observers:
                observe(EXCHANGE)
        assert [path for path, _ in collector.requests] == ["/v1/traces"]
        for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with tracing(None) as observers:
                    assert observers == ()


def test_nobody_asked() -> None:
    with tracing(None) as observers:
        assert observers == ()


def test_a_collector_that_is_silent_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts and never answers: the end waits for a moment, and leaves what is not
    delivered."""
    monkeypatch.setattr("trouper.cli.trace_export.LAST_SPANS_S", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with tracing(f"http://127.0.0.1:{silent.getsockname()[1]}") as observers:
            for observe in observers:
                observe(EXCHANGE)
        waiting = [thread for thread in threading.enumerate() if "Otel" in thread.name]
        assert waiting, "it still waits, and nobody for it"
    for thread in waiting:  # Nobody listens any more, so it gives up.
        thread.join(20)
        assert not thread.is_alive()


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(
        SettingsInvalid,
        match=(
            f"--otlp-endpoint needs the extra `otel` of trouper: {re.escape(command_for('otel'))}"
        ),
    ):
        enter("http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(SettingsInvalid, match="OTEL_EXPORTER_OTLP_ENDPOINT needs the extra"):
        enter(None)


@pytest.mark.parametrize(
    ("endpoint", "variables", "said"),
    [
        ("localhost:4318", {}, "--otlp-endpoint localhost:4318 is no URL"),
        ("http://", {}, "--otlp-endpoint http:// is no URL"),
        ("http://:4318", {}, "--otlp-endpoint http://:4318 is no URL"),
        ("http://here:port", {}, "--otlp-endpoint http://here:port is no URL"),
        (
            "http://x",
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'",
        ),
        (
            None,
            {VARIABLES[0]: "http://x", "OTEL_TRACES_EXPORTER": "zipkin"},
            "OTEL_TRACES_EXPORTER must be otlp",
        ),
    ],
)
def test_what_could_only_fail_later_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str | None, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsInvalid, match=said):
        enter(endpoint)


def enter(endpoint: str | None) -> None:
    with tracing(endpoint):
        raise AssertionError("it cannot begin")


def test_off_nothing_of_it_is_imported() -> None:
    """Nor is it a dependency."""
    code = (
        "import sys; from trouper.cli.trace_export import tracing; import trouper.web.server\n"
        "with tracing(None): print([name for name in sys.modules if "
        "name.startswith('opentelemetry')])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
