"""What counts as an attempt of a batch's request: not that the server left while it ran."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.batching import ended, output, request, started, strict
from tests.web.serving import Served, eventually, serving
from trouper.web.batches.batch_worker import MAX_ATTEMPTS, MAX_UNBEGUN
from trouper.web.batches.line_runner import Begin, LineResponse, LineRunner
from trouper.web.serving.state_database import NAME

LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "ignore_eos": True}


def decodes(served: Served) -> bool:
    return served.runtime.health().scheduler.active_sequences > 0


async def test_a_request_that_each_drain_interrupts_has_its_answer_in_the_end(
    tmp_path: Path,
) -> None:
    """Found by use: drained in the middle for the fourth time, it had `request_crashes_server` as
    its answer."""
    async with serving(batch_dir=tmp_path) as served:
        with strict(served.base_url) as client:
            batch = await trio.to_thread.run_sync(started, client, [request("long", LONG)])
        await eventually(lambda: decodes(served))
    for _ in range(MAX_ATTEMPTS):
        async with serving(batch_dir=tmp_path) as served:
            await eventually(lambda: decodes(served))
    async with serving(FakeEngine(), batch_dir=tmp_path) as served:
        with strict(served.base_url) as client:
            seen = await trio.to_thread.run_sync(ended, client, batch)
            assert seen.error_file_id is None
            answer = (await trio.to_thread.run_sync(output, client, seen.output_file_id))["long"]
    assert answer["response"]["body"]["usage"]["completion_tokens"] == LONG["max_tokens"]


async def test_a_request_that_is_cancelled_within_a_nursery_has_its_answer_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quart runs requests in nurseries: what comes out of a cancelled one is a group, and the
    attempt counted. Found on a busy machine."""
    begun = 0

    async def waits(*_: Any, **__: Any) -> None:
        nonlocal begun
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            begun += 1

    with monkeypatch.context() as patch:
        patch.setattr(LineRunner, "run", waits)
        async with serving(batch_dir=tmp_path) as served:
            with strict(served.base_url) as client:
                batch = await trio.to_thread.run_sync(started, client, [request("a")])
            await eventually(lambda: begun == 1)
        for count in range(MAX_ATTEMPTS):
            async with serving(batch_dir=tmp_path):
                await eventually(lambda count=count: begun == 2 + count)  # type: ignore[misc]
    async with serving(FakeEngine(), batch_dir=tmp_path) as served:
        with strict(served.base_url) as client:
            seen = await trio.to_thread.run_sync(ended, client, batch)
    assert (seen.output_file_id is not None, seen.error_file_id) == (True, None)


@pytest.mark.parametrize(
    ("begins", "kills", "is_answered"),
    [(False, MAX_ATTEMPTS, True), (True, MAX_ATTEMPTS, False), (False, MAX_UNBEGUN, False)],
)
async def test_a_kill_before_a_model_works_for_a_request_says_little_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool, kills: int, is_answered: bool
) -> None:
    """A supervisor that has no patience with a model that is being loaded kills as often as it
    likes."""
    running = trio.Event()

    async def waits(*_: Any, begin: Begin, **__: Any) -> None:
        if begins:
            await begin()
        running.set()
        await trio.sleep_forever()

    with monkeypatch.context() as patch:
        patch.setattr(LineRunner, "run", waits)
        for life in range(kills):
            async with serving(batch_dir=tmp_path / str(life)) as served:
                if life == 0:
                    with strict(served.base_url) as client:
                        batch = await trio.to_thread.run_sync(started, client, [request("a")])
                await running.wait()
                running = trio.Event()
                copytree(tmp_path / str(life), tmp_path / str(life + 1))  # As a kill leaves it.
    async with serving(FakeEngine(), batch_dir=tmp_path / str(kills)) as served:
        with strict(served.base_url) as client:
            seen = await trio.to_thread.run_sync(ended, client, batch)
    assert (seen.output_file_id is not None, seen.error_file_id is None) == (
        is_answered,
        is_answered,
    )


async def test_of_those_that_ran_at_a_kill_the_ones_with_the_fewest_attempts_run_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each kill would be one more attempt of the same request, whatever kills."""
    ran: list[str] = []
    waiting: list[object] = []

    async def waits(*arguments: Any, **__: Any) -> None:
        waiting.append(arguments)
        await trio.sleep_forever()

    async def answers(_: LineRunner, __: str, body: bytes, *___: Any, **____: Any) -> LineResponse:
        await trio.lowlevel.checkpoint()
        ran.append(json.loads(body)["user"])
        return LineResponse(200, b"{}")

    monkeypatch.setattr(LineRunner, "run", waits)
    async with serving(batch_dir=tmp_path) as served:
        with strict(served.base_url) as client:
            requests = [request(name, LONG | {"user": name}) for name in "abc"]
            batch = await trio.to_thread.run_sync(started, client, requests)
        await eventually(lambda: len(waiting) == len(requests))
    with closing(sqlite3.connect(tmp_path / NAME)) as connection, connection:
        count = "UPDATE lines SET attempts = ? WHERE number = ?"
        connection.executemany(count, [(3, 0), (1, 1), (2, 2)])
    monkeypatch.setattr(LineRunner, "run", answers)
    async with serving(batch_dir=tmp_path) as served:
        with strict(served.base_url) as client:
            await trio.to_thread.run_sync(ended, client, batch)
    assert ran == ["b", "c", "a"]
