"""Requests of a batch are their key's: its limits, its usage, its cached prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import trio

from tests.fakes import FakeEngine
from tests.web.batching import ended, output, request, started, strict
from tests.web.serving import Served, exchange, get, pace, serving
from tests.web.test_key_limits import FastClock
from tests.web.test_key_rights import bearer, key_file
from trouper.web.batches import batch_worker
from trouper.web.keys.key_limits import WINDOW_S

COMPLETIONS = "/v1/completions"
PROMPT = "the same long prompt for each of the keys, which has several blocks of tokens " * 2


async def using(served: Served, key: str, function: Callable[[openai.OpenAI], Any]) -> Any:
    with strict(served.base_url, key) as client:
        return await trio.to_thread.run_sync(function, client)


@pytest.mark.parametrize("limit", ["requests_per_minute=2", "tokens_per_minute=10"])
async def test_a_batch_goes_on_with_the_next_minute_of_its_key(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of 5 tokens fit in a minute. The others are no errors: they are tried again, and
    answered then."""
    monkeypatch.setattr(batch_worker, "AGAIN_S", 0.005)
    monkeypatch.setattr(batch_worker, "MAX_AGAIN_S", 0.01)
    file, clock = (
        key_file(tmp_path, f"sk-a name=alice {limit}\nsk-b name=bob observability=true\n"),
        FastClock(),
    )
    async with serving(
        FakeEngine(before_step=pace), api_key_file=file, clock=clock, batch_dir=tmp_path / "batches"
    ) as served:
        requests = [
            request(f"r{number}", {"prompt": "x", "max_tokens": 4}, COMPLETIONS)
            for number in range(6)
        ]
        batch = await using(served, "sk-a", lambda client: started(client, requests, COMPLETIONS))

        def counts() -> tuple[int, int]:
            with strict(served.base_url, "sk-a") as client:
                seen = client.batches.retrieve(batch.id).request_counts
            assert seen is not None
            return seen.completed, seen.failed

        for minute in range(1, 4):
            with trio.fail_after(30):
                # Sockets announce nothing
                while (await trio.to_thread.run_sync(counts))[0] < 2 * minute:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            again = await outcomes(served)
            await until_again(served, again + 5 if minute < 3 else 0)
            assert await trio.to_thread.run_sync(counts) == (2 * minute, 0)
            clock.now += WINDOW_S + 1
        assert (
            await using(served, "sk-a", lambda client: ended(client, batch))
        ).status == "completed"
        usage = (await exchange(served, get("/v1/usage", bearer("sk-a"))))[2]
        assert b'"alice"' in usage and b'"bob"' not in usage


async def outcomes(served: Served) -> int:
    """How often a request was refused for the moment."""
    text = (await exchange(served, get("/metrics", bearer("sk-b"))))[2].decode()
    [line] = [
        line
        for line in text.splitlines()
        if line.startswith('trouper_batch_requests_total{outcome="again"}')
    ]
    return int(float(line.rpartition(" ")[2]))


async def until_again(served: Served, count: int) -> None:
    with trio.fail_after(30):
        while await outcomes(served) < count:  # noqa: ASYNC110 - as above
            await trio.sleep(0.01)


async def test_lines_share_cached_prompts_with_their_key_and_its_group_only(tmp_path: Path) -> None:
    file = key_file(
        tmp_path,
        "sk-a name=a\nsk-b name=b\nsk-red name=red cache=team\nsk-blue name=blue cache=team\n",
    )
    settings = {"block_size": 16}
    async with serving(
        settings=settings, api_key_file=file, batch_dir=tmp_path / "batches"
    ) as served:
        line = request("r", {"prompt": PROMPT, "max_tokens": 2}, COMPLETIONS)

        async def cached_tokens(key: str) -> int:
            def run(client: openai.OpenAI) -> int:
                batch = ended(client, started(client, [line], COMPLETIONS))
                answer = output(client, batch.output_file_id)["r"]["response"]["body"]
                return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

            return int(await using(served, key, run))

        found = {
            key: [await cached_tokens(key) for _ in range(2)]
            for key in ("sk-a", "sk-b", "sk-red", "sk-blue")
        }
    assert [first for first, _ in found.values()][:3] == [0, 0, 0], "another key's prompt"
    assert all(second >= 128 for _, second in found.values()), "its own"
    assert found["sk-blue"][0] >= 128, "its group's"


async def test_the_priority_of_a_line_has_no_effect_also_where_its_key_may_not_send_it(
    tmp_path: Path,
) -> None:
    """By HTTP it is refused. A file of a thousand lines with it would be a file of a thousand
    errors."""
    file = key_file(tmp_path, "sk-late min_priority=5\n")
    async with serving(api_key_file=file, batch_dir=tmp_path / "batches") as served:
        line = request("r", {"prompt": "x", "max_tokens": 2, "priority": 0}, COMPLETIONS)
        batch = await using(
            served, "sk-late", lambda client: ended(client, started(client, [line], COMPLETIONS))
        )
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
        "completed",
        1,
        0,
    )


async def test_a_key_that_is_given_a_name_keeps_its_files_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it made while it had none bears a digest of it. The rest of its batch would have been a
    401 for each line."""
    monkeypatch.setattr(batch_worker, "AGAIN_S", 0.005)
    monkeypatch.setattr(batch_worker, "MAX_AGAIN_S", 0.01)
    file, clock = key_file(tmp_path, "sk-a requests_per_minute=1\nsk-b\n"), FastClock()
    async with serving(api_key_file=file, clock=clock, batch_dir=tmp_path / "batches") as served:
        lines = [
            request(f"r{number}", {"prompt": "x", "max_tokens": 2}, COMPLETIONS)
            for number in range(2)
        ]

        def start(client: openai.OpenAI) -> str:
            batch = started(client, lines, COMPLETIONS)
            while (
                counts := client.batches.retrieve(batch.id).request_counts
            ) is None or not counts.completed:
                pass
            return batch.id

        def finish(client: openai.OpenAI) -> set[str]:
            batch = ended(client, client.batches.retrieve(batch_id))
            assert [each.id for each in client.batches.list()] == [batch_id]
            assert batch.input_file_id in {each.id for each in client.files.list()}
            return {*output(client, batch.output_file_id)}

        batch_id = await using(served, "sk-a", start)
        file.write_text("sk-new name=alice\nsk-a name=alice\nsk-b name=bob\n")
        with trio.fail_after(30):
            # As above
            while (await exchange(served, get("/v1/models", bearer("sk-new"))))[0] != 200:  # noqa: ASYNC110
                await trio.sleep(0.01)
        assert await using(served, "sk-new", finish) == {"r0", "r1"}
        assert (
            await using(
                served, "sk-b", lambda client: [*client.batches.list(), *client.files.list()]
            )
            == []
        )
