"""What batches take on disk, file descriptors and memory is bounded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import trio
from openai.types import Batch

from tests.web.batching import ended, lines, output, request, started, strict
from tests.web.serving import (
    Served,
    eventually,
    exchange,
    get,
    open_files,
    post,
    receive_all,
    serving,
)
from tests.web.test_batches import END, FORM, PURPOSE, using
from tests.web.test_key_limits import FastClock
from tests.web.test_key_rights import key_file
from trouper.web.batches import batch_routes, batch_storage, batch_worker
from trouper.web.batches.batch_storage import BatchStorage
from trouper.web.batches.batch_table import BatchTable, LineAnswer
from trouper.web.batches.stored_files import FileStore, StoredFile
from trouper.web.serving.state_database import StateDatabase

UPLOAD = PURPOSE + b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'


async def batches_of(served: Served) -> dict[str, Any]:
    health: dict[str, Any] = json.loads((await exchange(served, get("/health")))[2])["batches"]
    return health


async def test_uploads_at_the_same_time_share_the_room(tmp_path: Path) -> None:
    body = UPLOAD + b"x" * 3000 + b"\r\n" + END
    async with (
        serving(batch_dir=tmp_path, batch_max_bytes=5000) as served,
        await served.connect() as first,
    ):
        await first.send_all(post("/v1/files", body, FORM + "Connection: close\r\n")[:-100])
        with trio.fail_after(60):
            # Sockets announce nothing
            while (await batches_of(served))["bytes"] < 2500:  # noqa: ASYNC110
                await trio.sleep(0.01)
        status, _, answer = await exchange(served, post("/v1/files", body, FORM))
        assert (status, json.loads(answer)["error"]["code"]) == (413, "no_room_for_file")
        await first.send_all(body[-100:])
        assert (await receive_all(first)).startswith(b"HTTP/1.1 200")
        assert (await batches_of(served))["bytes"] == 3000


def taken(directory: Path, answer_bytes: int) -> int:
    """Bytes of files and answers, and of the output files that will be made of these."""
    return 2 * answer_bytes + sum(path.stat().st_size for path in (directory / "files").iterdir())


async def test_answers_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_storage, "ROOM_S", 0.01)
    answered, store_answers = list[LineAnswer](), BatchTable.store_answers

    async def noted(table: BatchTable, batch: Any, answers: Sequence[LineAnswer]) -> None:
        await store_answers(table, batch, answers)
        answered.extend(answers)

    monkeypatch.setattr(BatchTable, "store_answers", noted)
    requests, limit, taken_bytes = (
        [request(f"r{number}") for number in range(20)],
        50_000,
        list[int](),
    )

    async with serving(batch_dir=tmp_path, batch_max_bytes=limit, batch_rows=1) as served:
        with strict(served.base_url) as client:
            filler = await trio.to_thread.run_sync(
                lambda: client.files.create(
                    file=b"x" * (limit - len(lines(requests)) - 8000), purpose="batch"
                )
            )
            batch = await trio.to_thread.run_sync(started, client, requests)
            with trio.fail_after(60):
                while not (problem := (await batches_of(served))["problem"]):
                    pass
            assert "--batch-max-bytes" in problem
            assert len(requests) > len(answered) > 0
            taken_bytes.append(taken(tmp_path, sum(len(each.output) for each in answered)))
            await trio.to_thread.run_sync(client.files.delete, filler.id)
            batch = await trio.to_thread.run_sync(ended, client, batch)
            found = await trio.to_thread.run_sync(output, client, batch.output_file_id)
        assert (batch.status, len(found)) == ("completed", len(requests))
        assert (await batches_of(served))["problem"] == ""
        taken_bytes.append(taken(tmp_path, 0))
    assert max(taken_bytes) <= limit


async def test_a_batch_that_waits_for_room_can_be_cancelled(tmp_path: Path) -> None:
    requests = [request(f"r{number}") for number in range(3)]
    async with serving(batch_dir=tmp_path, batch_max_bytes=len(lines(requests)) + 500) as served:
        with strict(served.base_url) as client:
            batch = await trio.to_thread.run_sync(started, client, requests)
            with trio.fail_after(60):
                while not (await batches_of(served))["problem"]:
                    pass
            await trio.to_thread.run_sync(client.batches.cancel, batch.id)
            assert (await trio.to_thread.run_sync(ended, client, batch)).status == "cancelled"
        assert (await batches_of(served))["problem"] == ""


def again(client: openai.OpenAI, file_id: str) -> Batch:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
    )


async def test_batches_that_wait_hold_no_files_and_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_worker, "AGAIN_S", 600)
    monkeypatch.setattr(batch_routes, "MAX_UNFINISHED", 20)
    file = key_file(tmp_path, "sk-a requests_per_minute=1\nsk-b\n")
    async with serving(
        api_key_file=file, clock=FastClock(), batch_dir=tmp_path / "batches", batch_rows=2
    ) as served:

        def use(limited: openai.OpenAI) -> None:
            assert ended(limited, started(limited, [request("r")])).status == "completed", (
                "all that the key may"
            )
            batches = [started(limited, [request("r")])]
            before = open_files()
            batches += [again(limited, batches[0].input_file_id) for _ in range(19)]
            assert open_files() <= before + 5
            with pytest.raises(openai.RateLimitError, match="20 batches") as refused:
                started(limited, [request("r")])
            assert refused.value.code == "too_many_batches"
            with strict(served.base_url, "sk-b") as other:
                assert ended(other, started(other, [request("r")])).status == "completed"
            limited.batches.cancel(batches[5].id)
            ended(limited, batches[5])
            started(limited, [request("r")])

        await using(served, use, "sk-a")


async def test_a_batch_that_has_ended_holds_nothing_of_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of the requests of all batches since the start would be memory that grows for
    ever."""
    storages, load = list[BatchStorage](), BatchStorage._load

    async def noted(storage: BatchStorage) -> None:
        await load(storage)
        storages.append(storage)

    monkeypatch.setattr(BatchStorage, "_load", noted)

    def use(client: openai.OpenAI) -> None:
        ended(client, started(client, [request(f"r{number}") for number in range(3)]))

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)
        [kept] = storages[0].batches.values()
        await eventually(lambda: kept.ended and not kept.answered)
        shown = kept.body()
    assert (shown["status"], shown["request_counts"]) == (
        "completed",
        {"total": 3, "completed": 3, "failed": 0},
    )
    assert shown["in_progress_at"] and shown["finalizing_at"] and shown["completed_at"]


class Unlooked(dict[str, StoredFile]):
    """Files that are not to be looked at one by one."""

    def values(self) -> Any:
        raise AssertionError("each slice of an upload would cost as much as there are files")


async def test_the_bytes_of_all_files_are_known_without_a_look_at_each(tmp_path: Path) -> None:
    database = StateDatabase(tmp_path)
    await database.open(create=True)
    store = FileStore(tmp_path / "files", database)
    await store.load()
    store._files = Unlooked()
    seen = []
    for owner, content in (("a", b"12345"), ("b", b"678"), ("a", b"1")):
        upload = await store.begin(owner, f"file-{owner}-{len(content)}")
        upload.content.write(content)
        await store.keep(upload, "name", 1)
        await store.end(upload)
        seen.append((store.total_bytes, store.bytes_of(owner)))
    again = FileStore(tmp_path / "files", database)
    await again.load()
    [first, *_] = store._files
    for _ in range(2):
        await store.remove(again.get(first, None))
        seen.append((store.total_bytes, store.number_of("a")))
    assert seen == [(5, 5), (8, 3), (9, 6), (4, 1), (4, 1)] and again.total_bytes == 9
    await database.close()
