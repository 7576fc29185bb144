"""Models in the feed of the live page: their states, and which viewers may change them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.actors.test_model_manager import manager_of
from tests.web.serving import serving_manager
from tests.web.test_live import WATCH, told, until
from trouper import ModelFiles, ServerSettings
from trouper.web.live.site import Feed
from trouper.web.serving.running_requests import RunningRequests

KEYS = (
    "name-of-boss-key name=boss observability=true admin=true\nname-of-viewer-key name=viewer "
    "observability=true\n"
)


@pytest.mark.parametrize(
    ("key", "manages"), [("name-of-boss-key", True), ("name-of-viewer-key", False)]
)
async def test_a_viewer_hears_first_whether_its_key_manages_models(
    tmp_path: Path, key: str, manages: bool
) -> None:
    (tmp_path / "keys").write_text(KEYS)
    settings = ServerSettings(port=0, api_key_file=tmp_path / "keys")
    watch = WATCH.replace(b"Accept", f"Authorization: Bearer {key}\r\nAccept".encode())
    async with (
        manager_of("small", "middle") as (manager, _),
        serving_manager(manager, settings) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        await stream.send_all(watch)
        [(name, viewer), *_] = told(await until(stream, b"event: snapshot"))
    assert (name, viewer) == ("viewer", {"manages_models": manages})


async def test_models_that_were_only_found_are_told_of_apart(tmp_path: Path) -> None:
    async with manager_of("small", "middle", "large", room=70) as (manager, _):
        feed = Feed(manager, (), RunningRequests())
        [(_, before)] = told(feed.snapshot()[1])
        manager.models[2].files = ModelFiles(
            name="large",
            directory=tmp_path,
            kind="generator",
            architecture="llama",
            context_length=1,
            quantization="",
            stored_bytes=60,
            float32_bytes=60,
            chats=True,
            created_at=0,
            used_at=0.0,
        )
        manager.control.pin("small", pinned=True)
        await trio.sleep(1.0)
        [(_, after)] = told(feed.snapshot()[1])
    assert [model["name"] for model in before["models"]] == ["small", "middle", "large"] and before[
        "found"
    ] == []
    assert [(model["name"], model["pinned"]) for model in after["models"]] == [
        ("small", True),
        ("middle", False),
    ]
    assert [each["name"] for each in after["found"]] == ["large"] and after["number"] == before[
        "number"
    ] + 1
