"""What `chat`, `top` and `bench` say where something else than a Trouper server listens."""

from __future__ import annotations

import inspect
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpcore2
import httpx2
import pytest
import trio
from click.testing import CliRunner, Result

from tests.http_threads import served_in_thread
from tests.media_servers import CERTIFICATES
from trouper import cli
from trouper.cli.client import NotTrouper, first_model
from trouper.cli.commands import chat
from trouper.cli.commands.top import Watching
from trouper.cli.conversation import Conversation
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.streamed_answer import StreamedAnswer, stream

MODELS = json.dumps({"data": [{"id": "other"}]})
OPENAPI = json.dumps({"info": {"version": "1"}})
EVENTS = [
    "{",
    "[]",
    "5",
    '{"choices": 5}',
    '{"choices": [{"delta": []}]}',
    '{"choices": [], "usage": {"a": 1}}',
]
USAGE = (
    'data: {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9}}\n\ndata: [DONE]\n'
    "\n"
)


def of_tls(listener: socket.socket) -> None:
    """Two handshakes, whatever becomes of them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "server.pem")
    for _ in range(2):
        connection, _ = listener.accept()
        with suppress(OSError), connection, context.wrap_socket(connection, server_side=True):
            pass


def test_what_is_wrong_with_tls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = inspect.unwrap(httpcore2.default_ssl_context)  # tests/machine.py keeps one.
    monkeypatch.setattr(httpcore2, "default_ssl_context", fresh)

    def refusal(port: int) -> str:
        url = f"https://127.0.0.1:{port}"
        outcome = CliRunner().invoke(cli.main, ["top", "--once", "--url", url])
        assert outcome.exit_code == USAGE_ERROR
        return outcome.stderr.splitlines()[-1]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=of_tls, args=(listener,))
        thread.start()
        untrusted = refusal(port)
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATES / "ca.pem"))
        of_another_name = refusal(port)
        thread.join()
    assert "its certificate is not trusted" in untrusted and "SSL_CERT_FILE" in untrusted
    assert "IP address mismatch" in of_another_name, "the authority of the file is trusted"
    with served_in_thread(HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)) as server:
        assert "without TLS its URL begins with http://" in refusal(server.server_port)


@asynccontextmanager
async def saying(**bodies: str | None) -> AsyncIterator[str]:
    """A server that answers 200, by the last part of what it is asked for, one request a
    connection; 404 where the body is None."""

    async def answer(stream: trio.SocketStream) -> None:
        async with stream:
            received = b""
            while b"\r\n\r\n" not in received:
                received += await stream.receive_some()
            path = received.split()[1].decode().rsplit("/", 1)[-1]
            text = bodies.get(path.replace(".", "_"), "")
            status = "404 Not Found" if text is None else "200 OK"
            body = (text or "").encode()
            kind = "application/json" if received.startswith(b"GET") else "text/event-stream"
            head = (
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n"
            )
            await stream.send_all(head.encode() + body)

    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, answer, [listener])
        yield f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel(reason="the test is over")


async def invoke(*arguments: str) -> Result:
    return await trio.to_thread.run_sync(partial(CliRunner().invoke, cli.main, arguments))


async def refused(*arguments: str, **bodies: str) -> None:
    async with saying(**bodies) as url:
        outcome = await invoke(*arguments, "--url", url)
    assert outcome.exit_code == USAGE_ERROR, outcome.exception
    assert (
        outcome.stderr.splitlines()[-1]
        == f"trouper: {url} answers, but not as a Trouper server does"
    )


@pytest.mark.parametrize(
    "body", ["", "<html>", "[]", "null", "5", '{"cache_stats": {}}', '{"models": [1]}']
)
async def test_top(body: str) -> None:
    await refused("top", "--once", "--interval-s", "0.1", health=body)


@pytest.mark.parametrize("body", ["", "[]", '{"data": []}', '{"data": [{}]}', '{"models": []}'])
async def test_the_list_of_models(body: str, tmp_path: Path) -> None:
    await refused("bench", "--out", str(tmp_path / "x"), models=body)
    with (
        httpx2.Client(transport=always(body), base_url="http://x/") as client,
        pytest.raises(NotTrouper),
    ):
        first_model(client)


async def test_what_it_says_of_itself(tmp_path: Path) -> None:
    await refused("bench", "--out", str(tmp_path / "x"), models=MODELS, openapi_json="[]")


@pytest.mark.parametrize("event", EVENTS)
async def test_events_of_an_answer(event: str) -> None:
    await refused("chat", "hm?", completions=f"data: {event}\n\n")


@pytest.mark.filterwarnings("ignore:Async generator 'http(x|core)2:ResourceWarning")
@pytest.mark.parametrize("event", ["{", '{"choices": 5}', '{"choices": [], "usage": {"a": 1}}'])
async def test_events_of_a_load(event: str, tmp_path: Path) -> None:
    """httpx2 leaves the generator of a stream that is left early to trio, which frowns."""
    flags = ("bench", "--streams", "1", "--out", str(tmp_path / "x"))
    await refused(*flags, models=MODELS, openapi_json=OPENAPI, completions=f"data: {event}\n\n")


async def test_a_load_without_text_is_no_load(tmp_path: Path) -> None:
    async with saying(models=MODELS, openapi_json=OPENAPI, completions=USAGE) as url:
        outcome = await invoke(
            "bench", "--url", url, "--streams", "1", "--out", str(tmp_path / "x")
        )
    assert (outcome.exit_code, "had no text" in outcome.stderr) == (USAGE_ERROR, True)


def always(body: str) -> httpx2.MockTransport:
    event_stream = {"content-type": "text/event-stream"}
    return httpx2.MockTransport(lambda _: httpx2.Response(200, headers=event_stream, text=body))


def test_a_conversation_goes_on() -> None:
    said: list[str] = []
    conversation = Conversation()
    with httpx2.Client(transport=always("data: {\n\n"), base_url="http://x") as client:
        chat.answer_to("hello?", client, conversation, lambda text, **_: said.append(text))
    assert "http://x answers, but not as a Trouper server does" in said[-1]
    assert (conversation.messages, conversation.unanswered) == ([], "hello?")


def test_text_that_is_no_text_does_not_reach_the_terminal() -> None:
    event = '{"choices": [{"delta": {"content": "a\\ud800"}}]}'
    answer = StreamedAnswer()
    with httpx2.Client(
        transport=always(f"data: {event}\n\ndata: [DONE]\n\n"), base_url="http://x"
    ) as client:
        assert [piece.text for piece in stream(client, {}, answer)] == ["a\ufffd"]
    assert answer.text == "a\ufffd"


def test_a_server_that_is_another_meanwhile_is_watched_on() -> None:
    with httpx2.Client(transport=always("[]"), base_url="http://x") as client:
        assert "not as a Trouper server does" in str(text_of(Watching("http://x", client)))


def text_of(watching: Watching) -> str:
    from io import StringIO

    from rich.console import Console

    written = StringIO()
    Console(file=written, width=120).print(watching.frame())
    return written.getvalue()
