"""The live page's files, and the snapshots that it is fed with."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.actors.bench import generate, running
from tests.fakes import FakeEngine
from tests.web.serving import PATIENCE_S, Served, eventually, exchange, get, pace, post, serving
from tests.web.test_openapi import data_of, described, validator
from trouper import Runtime
from trouper.actors.runtime.served_models import Lease, ModelEntry, OneModel
from trouper.protocol.batch import NOTHING_SHOWN
from trouper.protocol.plans import Plan
from trouper.protocol.record import RequestRecord
from trouper.protocol.setting_fields import ByteSize
from trouper.web.live.site import QUIET_S, RECENT, TICK_S, Feed, watched
from trouper.web.serving.running_requests import RunningRequests

Json = dict[str, Any]
WATCH = get("/v1/live", "Accept: text/event-stream\r\n").replace(b"Connection: close\r\n", b"")


async def slowly(_: Plan) -> None:
    await trio.sleep(0.05)


def record(name: str) -> RequestRecord:
    return RequestRecord(request_id=name, reason="stop", arrived_at=0, ended_at=1)


def told(data: bytes) -> list[tuple[str, Any]]:
    """Events of a stream, chunked or not, as (name, data)."""
    found = re.findall(rb"event: (\w+)\ndata: (.*?)\n\n", data)
    return [(name.decode(), json.loads(body)) for name, body in found]


@asynccontextmanager
async def looking(runtime: Runtime, recent: Sequence[RequestRecord] = ()) -> AsyncIterator[Feed]:
    """At the beginning of a tick, so that each test knows how many there are."""
    await trio.sleep_until((int(trio.current_time() / TICK_S) + 1) * TICK_S)
    yield Feed(OneModel(runtime), recent, RunningRequests())


# -- what it costs -------------------------------------------------------------------------------


async def test_a_snapshot_is_made_once_for_all_viewers_and_none_without(
    autojump_clock: MockClock,
) -> None:
    async with running(FakeEngine(before_step=slowly)) as runtime:
        with await runtime.submit(generate(max_tokens=2000)) as answer:
            await answer.next()
            async with looking(runtime) as feed:
                await trio.sleep(10)
                assert feed.number == 0 and runtime.view_batch() is NOTHING_SHOWN, (
                    "nothing is made while nobody looks"
                )
                seen: list[list[bytes]] = [[] for _ in range(5)]

                async def view(mine: list[bytes]) -> None:
                    async with aclosing(watched(feed)) as viewer:
                        while len(mine) < 9:
                            mine.append(await anext(viewer))

                async with trio.open_nursery() as nursery:
                    for mine in seen:
                        nursery.start_soon(view, mine)
                assert feed.number == 9, "five viewers, nine ticks"
                assert all(mine == seen[0] for mine in seen)
                await trio.sleep(10)
                assert feed.number == 9
                assert runtime.view_batch() is NOTHING_SHOWN, (
                    "the scheduler has stopped showing its rows"
                )


async def test_rows_are_copied_once_a_snapshot_not_once_a_step(autojump_clock: MockClock) -> None:
    async with running(FakeEngine(before_step=slowly)) as runtime:
        with await runtime.submit(generate(max_tokens=2000)) as answer:
            await answer.next()
            async with looking(runtime) as feed, aclosing(watched(feed)) as viewer:
                shown = set()
                for _ in range(8):
                    [*_, (_, body)] = told(await anext(viewer))
                    shown.add(body["models"][0]["batch"]["at"])
                steps = runtime.health().scheduler.steps
                assert len(shown) == 8 and steps > 8 * 4


async def test_each_gap_is_told_once_and_old_ones_never(autojump_clock: MockClock) -> None:
    async with running(FakeEngine(before_step=slowly)) as runtime:
        with await runtime.submit(generate(max_tokens=2000)) as answer:
            await answer.next()
            async with looking(runtime) as feed, aclosing(watched(feed)) as viewer:
                gaps = []
                for _ in range(9):
                    [*_, (_, body)] = told(await anext(viewer))
                    batch = body["models"][0]["batch"]
                    gaps.append(batch["gaps"])
                    assert batch["gap_median_s"] is None or batch["gap_median_s"] == pytest.approx(
                        0.05
                    )
                assert gaps[:2] == [0, 0] and abs(sum(gaps) - 7 * TICK_S / 0.05) <= 1, gaps
                await trio.sleep(30)
                async with aclosing(watched(feed)) as again:
                    [*_, (_, body)] = told(await anext(again))
                assert body["models"][0]["batch"]["gaps"] == 0


# -- who looks -----------------------------------------------------------------------------------


async def heard_at(feed: Feed, times: int = 4) -> list[float]:
    """When a new viewer hears something, from now on."""
    began = trio.current_time()
    heard = []
    async with aclosing(watched(feed)) as viewer:
        for _ in range(times):
            await anext(viewer)
            heard.append(trio.current_time() - began)
    return heard


async def test_a_viewer_hears_at_once_then_at_every_tick(autojump_clock: MockClock) -> None:
    async with running(FakeEngine(before_step=slowly)) as runtime:
        with await runtime.submit(generate(max_tokens=2000)) as answer:
            await answer.next()
            async with looking(runtime) as feed:
                assert await heard_at(feed) == [0, TICK_S, 2 * TICK_S, 3 * TICK_S]


async def test_while_nothing_changes_a_viewer_hears_only_that_it_is_so(
    autojump_clock: MockClock,
) -> None:
    recent: deque[RequestRecord] = deque(maxlen=RECENT)
    async with running() as runtime, looking(runtime, recent) as feed:
        # Longer than an idle scheduler sleeps.
        assert await heard_at(feed, 20) == [number * QUIET_S for number in range(20)]
        number = feed.number
        await trio.sleep(TICK_S)
        recent.append(record("a"))
        assert feed.snapshot()[0] == number + 1, "what ended is told at the next tick"


async def test_requests_that_ended_are_told_once_and_to_whoever_missed_some_again(
    autojump_clock: MockClock,
) -> None:
    recent = deque([record("a")], maxlen=RECENT)
    async with (
        running() as runtime,
        looking(runtime, recent) as feed,
        aclosing(watched(feed)) as quick,
        aclosing(watched(feed)) as slow,
    ):
        (viewer, _), (name, first), (_, body) = told(await anext(quick))
        assert (viewer, name, [one["request_id"] for one in first]) == ("viewer", "recent", ["a"])
        await anext(slow)
        for new in ("b", "c"):
            recent.append(record(new))
            [(_, body)] = told(await anext(quick))
            assert [one["request_id"] for one in body["ended"]] == [new]
        (name, again), (_, body) = told(await anext(slow))
        assert (name, [one["request_id"] for one in again]) == ("recent", ["a", "b", "c"])
        [(_, body)] = told(await anext(slow))
        assert body["ended"] == []


async def test_a_viewers_stream_ends_with_the_runtime_not_a_tick_later(
    autojump_clock: MockClock,
) -> None:
    async with (
        running() as runtime,
        looking(runtime) as feed,
        aclosing(watched(feed)) as viewer,
    ):
        await anext(viewer)
        async with trio.open_nursery() as nursery:
            began = trio.current_time()

            async def until_over() -> None:
                with pytest.raises(StopAsyncIteration):
                    await anext(viewer)

            nursery.start_soon(until_over)
            await wait_all_tasks_blocked()
            await runtime.drain(1)
        assert trio.current_time() == began


@attrs.frozen
class Two:
    """A loaded model and one that is not."""

    runtime: Runtime
    draining: bool = False
    control: None = None

    @property
    def finished(self) -> trio.Event:
        return self.runtime.finished

    def entries(self) -> Sequence[ModelEntry]:
        return ModelEntry(("big",), "ready", self.runtime), ModelEntry(("small",), "unloaded", None)

    async def lease(self, name: str | None) -> Lease:
        raise NotImplementedError


async def test_a_model_that_is_not_loaded_is_told_of_too() -> None:
    async with running() as runtime:
        [*_, (_, body)] = told(Feed(Two(runtime), (), RunningRequests()).snapshot()[1])
    assert [(model["name"], model["state"]) for model in body["models"]] == [
        ("big", "ready"),
        ("small", "unloaded"),
    ]
    unloaded = {"pinned": False, "ttl_s": 0.0, "weights_bytes": 0, "waiting": 0}
    assert body["models"][1] == {"name": "small", "state": "unloaded"} | unloaded


# -- over HTTP -----------------------------------------------------------------------------------


async def test_a_running_batch_is_streamed_as_described() -> None:
    async with serving(FakeEngine(before_step=slowly)) as served:
        document = await described(served)
        schema = data_of(
            document["paths"]["/v1/live"]["get"]["responses"]["200"]["content"][
                "text/event-stream"
            ]["schema"]
        )
        async with await served.connect() as client, await served.connect() as stream:
            await client.send_all(
                post("/v1/completions", {"prompt": "hello", "max_tokens": 4000, "stream": True})
            )
            await stream.send_all(WATCH)
            received, generated = b"", [0]
            with trio.fail_after(PATIENCE_S):
                while len(generated) < 4:
                    received += await stream.receive_some()
                    bodies = [body for name, body in told(received) if name == "snapshot"]
                    rows = [row for body in bodies for row in body["models"][0]["batch"]["rows"]]
                    generated = sorted({row["generated_tokens"] for row in rows})
        for body in bodies:
            validator(document, schema).validate(body)
        assert [body for name, body in told(received) if name == "viewer"] == [
            {"manages_models": False}
        ], "embedded"
        assert {row["prompt_tokens"] for row in rows} == {5} and rows[-1]["first_token_at"] > rows[
            -1
        ]["since"]


async def test_a_size_that_was_given_can_be_told() -> None:
    """--cache-memory 4GB, and later --kv-memory, ended every look, here and at /health: such a size
    is an int of a kind of its own."""
    sizes = {
        "cache_memory": ByteSize("4GB"),
        "ssd_max_bytes": ByteSize("1GB"),
        "kv_memory": ByteSize("2GB"),
    }
    async with serving(settings=sizes) as served:
        await exchange(served, post("/v1/completions", {"prompt": "hi", "max_tokens": 3}))
        status, _, body = await exchange(served, get("/v1/live"))
        assert status == 200, body
        assert json.loads(body)["models"][0]["cache"]["capacity_bytes"] == 4_000_000_000
        assert json.loads(body)["models"][0]["scheduler"]["kv_limit_bytes"] == 2_000_000_000
        assert (await exchange(served, get("/health")))[0] == 200


async def test_the_request_of_a_client_is_among_the_recent() -> None:
    async with serving() as served:
        await exchange(
            served,
            post("/v1/completions", {"prompt": "hi", "max_tokens": 3}, "X-Request-Id: mine\r\n"),
        )
        _, _, body = await exchange(served, get("/v1/live"))
    [one] = json.loads(body)["recent"]
    assert (one["request_id"], one["prompt_tokens"], one["generated_tokens"], one["reason"]) == (
        "mine",
        2,
        3,
        "length",
    )


async def test_viewers_who_leave_cost_nothing_and_drain_ends_those_who_stay() -> None:
    async with serving() as served:
        for _ in range(20):
            async with await served.connect() as stream:
                await stream.send_all(WATCH)
                assert b"event: snapshot" in await until(stream, b"event: snapshot")
        await eventually(lambda: served.connections == 0)
        stays = await served.connect()
        await stays.send_all(WATCH)
        await until(stays, b"event: snapshot")
        await served.runtime.drain(0)
        assert await until(stays, b"0\r\n\r\n"), "a whole stream, not a cut one"
        await stays.aclose()


async def until(stream: trio.SocketStream, what: bytes) -> bytes:
    received = b""
    with trio.fail_after(PATIENCE_S):
        while what not in received:
            received += await stream.receive_some()
    return received


# -- the page ------------------------------------------------------------------------------------


async def page_of(served: Served) -> tuple[Json, str, list[str]]:
    """Headers, text, and the paths of its files."""
    status, headers, body = await exchange(served, get("/"))
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    return headers, body.decode(), re.findall(r'(?:src|href)="(live/[^"]+)"', body.decode())


async def test_the_page_and_its_files_are_served_as_what_they_are() -> None:
    kinds = {
        "js": "text/javascript; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "svg": "image/svg+xml",
    }
    async with serving() as served:
        headers, page, paths = await page_of(served)
        assert headers["cache-control"] == "no-cache"
        status, _, body = await exchange(served, get("/", f"If-None-Match: {headers['etag']}\r\n"))
        assert (status, body) == (304, b"")
        assert len(set(paths)) > 15
        for path in set(paths):
            status, headers, body = await exchange(served, get(f"/{path}"))
            assert (status, headers["content-type"]) == (200, kinds[path.rpartition(".")[2]])
            assert (
                headers["x-content-type-options"] == "nosniff"
                and "immutable" in headers["cache-control"]
            )
            for imported in re.findall(r'from "\./([\w.]+)"', body.decode()):
                assert f"/{imported}" in "".join(paths), (
                    "a module that is not preloaded is found late"
                )
        licence = f"{paths[0].rpartition('/')[0]}/uplot-license.txt"
        assert b"MIT" in (await exchange(served, get(f"/{licence}")))[2]
        status, _, _ = await exchange(
            served, get(f"/live/0123456789abcdef/{paths[0].rpartition('/')[2]}")
        )
        assert status == 404, "a page of another version never gets this one's files"
        status, _, _ = await exchange(
            served, get(f"/{paths[0].rpartition('/')[0]}/..%2f..%2fsite.py")
        )
        assert status == 404
    assert "docs" in re.findall(r'href="(\w+)"', page) and 'href="openapi.json"' in page


async def test_nothing_of_the_page_comes_from_elsewhere_or_is_inline() -> None:
    async with serving() as served:
        headers, page, paths = await page_of(served)
        bodies = [
            (await exchange(served, get(f"/{path}")))[2].decode()
            for path in set(paths)
            if "uplot" not in path
        ]
    policy = headers["content-security-policy"]
    assert (
        "default-src 'none'" in policy
        and "unsafe" not in policy
        and "frame-ancestors 'none'" in policy
    )
    assert (
        "://" not in page
        and "<style" not in page
        and not re.search(r"<script(?![^>]* src=)|\son\w+=|style=", page)
    )
    assert {url for body in bodies for url in re.findall(r"\w+://[\w./]+", body)} <= {
        "http://www.w3.org/2000/svg"
    }, "a namespace, not an address"


async def test_with_keys_the_page_is_open_and_empty_and_the_data_is_not() -> None:
    async with serving(api_key=("k",)) as served:
        _, page, paths = await page_of(served)
        assert 'data-keyed="true"' in page and "fake" not in page
        assert (await exchange(served, get(f"/{paths[0]}")))[0] == 200
        for headers in ("", "Accept: text/event-stream\r\n", "Authorization: Bearer wrong\r\n"):
            status, _, body = await exchange(served, get("/v1/live", headers))
            assert status == 401 and b"fake" not in body
        assert (await exchange(served, get("/v1/live?key=k")))[0] == 401, (
            "a key is never part of an address"
        )
        assert (await exchange(served, get("/v1/live", "Authorization: Bearer k\r\n")))[0] == 200
    async with serving() as served:
        assert 'data-keyed="false"' in (await page_of(served))[1]


async def test_what_is_not_asked_for_is_not_ignored() -> None:
    async with serving(FakeEngine(before_step=pace), strict=True) as served:
        status, _, body = await exchange(served, get("/v1/live?interval=1"))
    assert (status, json.loads(body)["error"]["param"]) == (400, "interval")
