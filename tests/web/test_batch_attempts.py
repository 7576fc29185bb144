"""What counts as an attempt of a batch's request: not that the server left while it ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.batching import ended, output, request, started, strict
from tests.web.serving import Served, eventually, serving
from trouper.web.batches.batch_worker import MAX_ATTEMPTS
from trouper.web.batches.line_runner import LineRunner

LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "ignore_eos": True}


def decodes(served: Served) -> bool:
    return served.runtime.health().scheduler.active_sequences > 0


async def test_a_request_that_each_drain_interrupts_has_its_answer_in_the_end(tmp_path: Path) -> None:
    """Found by use: drained in the middle for the fourth time, it had `request_crashes_server` as its answer."""
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
    """Quart runs requests in nurseries: what comes out of a cancelled one is a group, and the attempt counted. Found on a busy machine."""
    begun = 0

    async def waits(*_: Any) -> None:
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
