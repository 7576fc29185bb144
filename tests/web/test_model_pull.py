"""POST /v1/models/pull: progress, what becomes of it, and where nothing is downloaded."""

from __future__ import annotations

import errno
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio

from tests.actors.test_model_manager import manager_of
from tests.web.serving import post, receive_all, serving_manager
from tests.web.test_model_operations import events_of
from trouper import ModelManager, Settings
from trouper.actors.runtime.managed_model import managed
from trouper.protocol.problems import ModelUnusable
from trouper.system.model_download import Report

NAME = "owner/new"


@attrs.define(eq=False)
class Hub:
    """Downloads when it is let."""

    manager: ModelManager
    has_it: bool = True
    serves_it: bool = True
    may_end: trio.Event = attrs.field(factory=trio.Event)
    names: list[str] = attrs.field(factory=list)

    async def fetch(self, name: str, report: Report) -> None:
        self.names.append(name)
        if not self.has_it:
            raise ModelUnusable(f"the hub has no {name}")
        report(5, 10)
        await self.may_end.wait()
        report(10, 10)
        if self.serves_it:
            self.manager.models.append(managed(Settings(model=name), (name,), 0.0, {}))


@asynccontextmanager
async def hub_behind_a_server() -> AsyncIterator[tuple[Hub, int]]:
    async with (
        manager_of("small") as (manager, _),
        serving_manager(manager) as port,
    ):
        hub = Hub(manager)
        manager.control.fetch = hub.fetch
        yield hub, port
        hub.manager.models[:] = [one for one in hub.manager.models if one.names != (NAME,)]


async def pull(port: int, **body: object) -> bytes:
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        request = post("/v1/models/pull", {"model": NAME} | body, "Connection: close\r\n")
        await stream.send_all(request)
        return await receive_all(stream)


def answer_of(response: bytes) -> tuple[int, dict[str, object]]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


async def test_progress_is_told_and_then_the_model() -> None:
    async with hub_behind_a_server() as (hub, port):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            body = {"model": NAME, "stream": True}
            await stream.send_all(post("/v1/models/pull", body, "Connection: close\r\n"))
            received = b""
            with trio.fail_after(60):
                while b'"done":5' not in received:
                    received += await stream.receive_some()
            hub.may_end.set()
            received += await receive_all(stream)
        events = events_of(received)
        assert events[0][0] == "progress"
        downloading = {"id": NAME, "state": "unloaded", "stage": "downloading"}
        assert ("progress", downloading | {"done": 5, "total": 10, "unit": "bytes"}) in events
        name, model = events[-1]
        assert (name, model["id"], model["state"]) == ("model", NAME, "unloaded")


async def test_two_who_want_it_wait_for_one_download() -> None:
    async with hub_behind_a_server() as (hub, _):
        operation = hub.manager.control.pull(NAME)
        assert hub.manager.control.pull(NAME) is operation
        hub.may_end.set()
        await operation.done.wait()
        assert (operation.problem, hub.names) == (None, [NAME])


async def test_ended_downloads_are_forgotten() -> None:
    async with hub_behind_a_server() as (hub, _):
        hub.serves_it = False
        hub.may_end.set()
        for name in ("owner/one", "owner/two"):
            operation = hub.manager.control.pull(name)
            await operation.done.wait()
        assert [*hub.manager.control._pulls] == ["owner/two"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (OSError(errno.EAGAIN, "no process is left"), 503, "no process is left"),
        (OSError(errno.EIO, "Input/output error"), 500, "OSError: [Errno 5] Input/output error"),
        (ExceptionGroup("", [KeyError("x")]), 500, "KeyError: 'x'"),
    ],
)
async def test_an_unforeseen_error_is_the_answer_and_ends_no_model(
    error: Exception, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a process that cannot be started, or a directory that cannot be read."""

    async def fails(_hub: Hub, _name: str, _report: Report) -> None:
        await trio.lowlevel.checkpoint()
        raise error

    monkeypatch.setattr(Hub, "fetch", fails)
    async with hub_behind_a_server() as (hub, port):
        answered, body = answer_of(await pull(port))
        assert (answered, message in str(body["error"])) == (status, True), body
        assert hub.manager.models[0].runtime is not None


@pytest.mark.parametrize(
    ("facts", "status", "message"),
    [
        ({"has_it": False}, 500, "the hub has no owner/new"),
        ({"serves_it": False}, 422, "was downloaded, and cannot be served"),
    ],
)
async def test_why_it_is_not_there_is_the_error(
    facts: dict[str, bool], status: int, message: str
) -> None:
    async with hub_behind_a_server() as (hub, port):
        hub.has_it = facts.get("has_it", True)
        hub.serves_it = facts.get("serves_it", True)
        hub.may_end.set()
        answered, body = answer_of(await pull(port))
        assert (answered, message in str(body)) == (status, True), body
        assert b"event: error" in await pull(port, stream=True)


async def test_nothing_is_downloaded_by_a_server_of_its_own_models_nor_for_no_id() -> None:
    async with hub_behind_a_server() as (hub, port):
        status, body = answer_of(await pull(port, model="/etc"))
        assert (status, hub.names) == (400, []), body
        hub.manager.control.fetch = None
        status, body = answer_of(await pull(port))
        assert (status, "--models-from hub-cache" in str(body)) == (409, True), body
