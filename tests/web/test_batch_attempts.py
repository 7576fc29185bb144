"""What counts as an attempt of a batch's request: not that the server left while it ran."""

from __future__ import annotations

from pathlib import Path

import trio

from tests.fakes import FakeEngine
from tests.web.batching import ended, output, request, started, strict
from tests.web.serving import Served, eventually, serving
from trouper.web.batches.batch_worker import MAX_ATTEMPTS

LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "ignore_eos": True}


def decodes(served: Served) -> bool:
    return served.runtime.health().scheduler.active_sequences > 0


async def test_a_request_that_each_drain_interrupts_has_its_answer_in_the_end(tmp_path: Path) -> None:
    """Found by use: drained in the middle for the fourth time, it had `request_crashes_server` as its answer."""
    async with serving(batch_dir=tmp_path) as served:
        batch = await trio.to_thread.run_sync(started, strict(served.base_url), [request("long", LONG)])
        await eventually(lambda: decodes(served))
    for _ in range(MAX_ATTEMPTS):
        async with serving(batch_dir=tmp_path) as served:
            await eventually(lambda: decodes(served))
    async with serving(FakeEngine(), batch_dir=tmp_path) as served:
        client = strict(served.base_url)
        seen = await trio.to_thread.run_sync(ended, client, batch)
        assert seen.error_file_id is None
        answer = (await trio.to_thread.run_sync(output, client, seen.output_file_id))["long"]
    assert answer["response"]["body"]["usage"]["completion_tokens"] == LONG["max_tokens"]
