"""The download that a server begins: a process of its own, from a hub on a real socket."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import trio

from tests.cli.fake_hub import hub_of
from tests.families import save
from tests.http_threads import served_in_thread
from trouper.protocol.problems import ModelUnusable
from trouper.system.model_download import download_model


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }.items():
        monkeypatch.setenv(name, value)


async def test_bytes_are_reported_until_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save("llama", tmp_path / "model")
    reports: list[tuple[int, int]] = []
    with hub_of("owner/tiny", directory) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        await download_model("owner/tiny", lambda done, total: reports.append((done, total)))
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert reports == sorted(reports) and len({done for done, _ in reports}) > 1
    done, total = reports[-1]
    assert 0 < done <= total <= size
    assert [*(tmp_path / "hub" / "models--owner--tiny" / "snapshots").glob("*/config.json")]


async def test_why_nothing_came_is_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_of("owner/tiny", save("llama", tmp_path / "model")) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(ModelUnusable, match="the hub has no owner/other"):
            await download_model("owner/other", lambda *_: None)


async def test_a_page_in_place_of_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a proxy's login page."""

    class Page(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Sign in</html>")

    with served_in_thread(HTTPServer(("127.0.0.1", 0), Page)) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", url)
        with pytest.raises(ModelUnusable, match=f"{url} does not answer as a model hub does"):
            await download_model("owner/other", lambda *_: None)


async def test_a_download_that_is_cancelled_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a hub that never answers."""
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        nursery.start_soon(download_model, "owner/tiny", lambda *_: None)
        stream = await listener.accept()
        nursery.cancel_scope.cancel()
    with trio.fail_after(60):
        assert await _rest(stream) is not None, "the connection has ended with its process"
    await listener.aclose()


async def _rest(stream: trio.SocketStream) -> bytes:
    received = b""
    async with stream:
        try:
            async for data in stream:
                received += data
        except trio.BrokenResourceError:
            pass
    return received
