"""Batches beside what goes wrong: a device without memory, a key at its limit, a cancel at the
wrong moment, threads that change what is read."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import httpx2
import openai
import pytest
import trio
from quart import has_request_context

from tests.fakes import FakeEngine, FakeRow, card
from tests.web.batching import ended, lines, output, request, started, strict
from tests.web.serving import (
    PATIENCE_S,
    Served,
    ask,
    eventually,
    exchange,
    get,
    pace,
    post,
    serving,
)
from tests.web.test_batch_room import UPLOAD
from tests.web.test_batches import END, FORM, using
from tests.web.test_key_limits import FastClock
from tests.web.test_key_rights import bearer, key_file
from trouper.protocol import paths
from trouper.protocol.model import AdapterCard, LoadedModel
from trouper.protocol.problems import OutOfDeviceMemory
from trouper.protocol.setting_fields import ByteSize
from trouper.web.batches import batch_storage, batch_table, batch_worker, stored_files
from trouper.web.batches.batch_storage import BatchStorage
from trouper.web.batches.batch_table import Batch, BatchTable
from trouper.web.batches.batch_worker import MAX_ATTEMPTS
from trouper.web.batches.input_lines import validated
from trouper.web.batches.stored_files import FileStore, Upload
from trouper.web.serving import state_database
from trouper.web.serving.state_database import NAME, StateDatabase
from trouper.web.streaming import response_streams

HEAVY = "heavy" * 20


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that were refused for the moment run again at once."""
    monkeypatch.setattr(batch_worker, "AGAIN_S", 0.005)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("batch_rows", [1, 8])
async def test_a_request_for_which_there_is_no_memory_ends_with_that(
    tmp_path: Path, batch_rows: int
) -> None:
    crashes, lines = 0, ["a", HEAVY, *(f"r{place}" for place in range(3 * batch_rows))]

    def dies(rows: Sequence[FakeRow]) -> bool:
        nonlocal crashes
        crashes += (heavy := any(len(row.prompt) > len(HEAVY) for row in rows))
        return heavy

    def use(client: openai.OpenAI) -> None:
        batch = ended(client, started(client, [request(custom_id) for custom_id in lines]))
        assert batch.status == "completed"
        assert output(client, batch.output_file_id).keys() == {*lines} - {HEAVY}
        [line] = output(client, batch.error_file_id).values()
        assert (line["custom_id"], line["response"]["status_code"]) == (HEAVY, 503)
        assert line["response"]["body"]["error"]["code"] == "out_of_memory"

    engine = FakeEngine(before_step=pace, dies=dies, death=OutOfDeviceMemory)
    settings = {"kv_memory": ByteSize(10**6), "speculation": "off"}
    async with serving(engine, settings, batch_dir=tmp_path, batch_rows=batch_rows) as served:
        await using(served, use)
    assert MAX_ATTEMPTS <= crashes <= MAX_ATTEMPTS + (1 if batch_rows == 1 else 5)


async def test_a_full_disk_is_named_to_who_would_write_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by use: each was a 500 of an internal error."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def use(client: openai.OpenAI) -> None:
        data = ("in.jsonl", lines([request("a")]))
        file = client.files.create(file=data, purpose="batch")

        def start() -> Any:
            return client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )

        with monkeypatch.context() as patch:
            patch.setattr(stored_files, "write_all", full)
            patch.setattr(batch_table, "insert_batch", full)
            for ask in (lambda: client.files.create(file=data, purpose="batch"), start):
                with pytest.raises(openai.InternalServerError) as refused:
                    ask()
                assert (refused.value.status_code, refused.value.code) == (
                    503,
                    "batches_unavailable",
                )
                assert "cannot be written: No space left on device" in refused.value.message
                health = httpx2.get(str(client.base_url).replace("/v1/", "/health")).json()
                assert "failed: No space left on device" in health["batches"]["problem"]
        assert ended(client, start()).status == "completed"
        assert [each.id for each in client.files.list().data if each.purpose == "batch"] == [
            file.id
        ]

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)


async def test_an_upload_is_dropped_on_a_thread_and_its_error_is_that_of_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system whose disk fails becomes read-only: it takes neither bytes nor removals."""
    threads = set[int]()

    def read_only(*_: object, **__: object) -> None:
        threads.add(threading.get_ident())
        raise OSError(errno.EROFS, "Read-only file system")

    async with serving(batch_dir=tmp_path) as served:
        monkeypatch.setattr(stored_files, "write_all", read_only)
        monkeypatch.setattr(Path, "unlink", read_only)
        body = UPLOAD + b"x\r\n" + END
        status, _, answer = await exchange(served, post("/v1/files", body, FORM))
        monkeypatch.undo()
    error = json.loads(answer)["error"]
    assert (status, error["code"]) == (503, "batches_unavailable")
    assert "cannot be written: Read-only file system" in error["message"]
    assert threads and threading.get_ident() not in threads


async def problem(served: Served, *, waits: bool) -> str:
    """Look until there is a problem, or none."""
    with trio.fail_after(PATIENCE_S):
        while True:
            health = json.loads((await exchange(served, get("/health")))[2])
            if bool(said := health["batches"]["problem"]) is waits:
                return str(said)


async def test_health_says_that_a_batch_waits_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_worker, "RETRY_S", 0.005)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async with serving(batch_dir=tmp_path) as served:
        with monkeypatch.context() as patch:
            patch.setattr(batch_table, "enter_status", full)
            await using(served, lambda client: started(client, [request("a")]))
            said = await problem(served, waits=True)
        assert "failed: No space left on device; make room there" in said and str(tmp_path) in said
        assert said.endswith("Batches that wait for it: 1")
        await problem(served, waits=False)


async def test_the_limit_of_a_key_does_not_hold_up_the_batches_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_worker, "AGAIN_S", 600)
    file = key_file(tmp_path, "sk-a requests_per_minute=1\nsk-b observability=true\n")
    requests = [request(f"r{number}") for number in range(8)]
    async with serving(
        api_key_file=file, clock=FastClock(), batch_dir=tmp_path / "batches", batch_rows=2
    ) as served:

        def use(limited: openai.OpenAI) -> None:
            waiting = started(limited, requests)
            with strict(served.base_url, "sk-b") as other:
                assert ended(other, started(other, requests)).status == "completed"
            seen = limited.batches.retrieve(waiting.id)
            assert seen.status == "in_progress"
            assert seen.request_counts is not None and seen.request_counts.completed <= 1
            assert limited.batches.cancel(waiting.id).cancelling_at
            assert ended(limited, waiting).status == "cancelled", "requests that wait end with it"

        await using(served, use, "sk-a")
        health = json.loads((await exchange(served, get("/health", bearer("sk-b"))))[2])
    assert 1 <= health["batches"]["requests"]["again"] <= 2, "no more begin than --batch-rows"


async def test_a_cancel_while_validation_ends_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_validate, validation_ended, cancels = (
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )
    enter, enter_status = BatchTable.enter, batch_table.enter_status

    def wait_and_validate(*args: Any) -> Any:
        assert may_validate.wait(60)
        return validated(*args)

    async def tell_and_enter(table: BatchTable, batch: Batch, status: str, at: int) -> None:
        if status in ("in_progress", "finalizing"):
            validation_ended.set()
        await enter(table, batch, status, at)

    def enter_slowly(connection: sqlite3.Connection, *, status: str, **more: Any) -> Any:
        if status == "cancelling":
            cancels.set()
            assert validation_ended.wait(60)
        return enter_status(connection, status=status, **more)

    monkeypatch.setattr(batch_worker, "validated", wait_and_validate)
    monkeypatch.setattr(BatchTable, "enter", tell_and_enter)
    monkeypatch.setattr(batch_table, "enter_status", enter_slowly)

    def let_validation_end() -> None:
        assert cancels.wait(60)
        may_validate.set()

    def use(client: openai.OpenAI) -> None:
        batch = started(client, [request("a")])
        helper = threading.Thread(target=let_validation_end)
        helper.start()
        assert client.batches.cancel(batch.id).status == "cancelling"
        helper.join()
        batch = ended(client, batch)
        assert (batch.status, batch.output_file_id) == ("cancelled", None)

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)


class WithAdapter(FakeEngine):
    async def load(self) -> LoadedModel:
        adapter = AdapterCard(name="sql", directory="/adapters/sql", rank=8, fingerprint="ada9")
        return LoadedModel(attrs.evolve(card(), adapters=(adapter,)), self.tokenizer)


async def test_requests_of_a_batch_name_adapters_and_only_models_of_their_key(
    tmp_path: Path,
) -> None:
    def batch_of(client: openai.OpenAI, *models: str) -> Any:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        return ended(
            client, started(client, [request(model, body | {"model": model}) for model in models])
        )

    file = key_file(tmp_path, "sk-a models=fake\nsk-b models=other\n")
    async with serving(
        WithAdapter(before_step=pace),
        strict=True,
        api_key_file=file,
        batch_dir=tmp_path / "batches",
    ) as served:

        def use(client: openai.OpenAI) -> None:
            batch = batch_of(client, "fake", "sql", "fake:sql")
            found = output(client, batch.output_file_id)
            assert batch.errors is None and batch.status == "completed"
            assert [found[name]["response"]["body"]["model"] for name in ("sql", "fake:sql")] == [
                "fake:sql"
            ] * 2
            check_refused(batch_of(client, "fake", "fake:other"))
            with strict(served.base_url, "sk-b") as other:
                check_refused(batch_of(other, "fake"))

        def check_refused(batch: Any) -> None:
            assert batch.status == "failed"
            assert [error.code for error in batch.errors.data] == ["model_not_found"]

        await using(served, use, "sk-a")


async def test_a_batch_does_not_belong_to_the_request_that_created_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def look_and_validate(*args: Any) -> Any:
        seen.append(has_request_context())
        return validated(*args)

    monkeypatch.setattr(batch_worker, "validated", look_and_validate)
    async with serving(batch_dir=tmp_path) as served:
        await using(served, lambda client: ended(client, started(client, [request("a")])))
    assert seen == [False]


class Index(dict[str, Any]):
    """Notes the threads that change it."""

    threads: set[int]

    def __setitem__(self, key: str, value: Any) -> None:
        self.threads.add(threading.get_ident())
        super().__setitem__(key, value)

    def pop(self, *args: Any) -> Any:
        self.threads.add(threading.get_ident())
        return super().pop(*args)


async def test_the_event_loop_alone_changes_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a file that is added while the files are listed or counted is a 500."""
    monkeypatch.setattr(Index, "threads", set(), raising=False)
    load, load_files = BatchStorage._load, FileStore.load

    async def load_index(storage: BatchStorage) -> None:
        await load(storage)
        storage.batches = Index(storage.batches)

    async def load_file_index(store: FileStore) -> None:
        await load_files(store)
        store._files = Index(store._files)

    monkeypatch.setattr(BatchStorage, "_load", load_index)
    monkeypatch.setattr(FileStore, "load", load_file_index)

    def use(client: openai.OpenAI) -> None:
        batch = ended(client, started(client, [request("a")]))
        assert client.files.delete(batch.input_file_id).deleted
        assert len(client.files.list().data) == len(client.batches.list().data) == 1

    async with serving(batch_dir=tmp_path) as served:
        await using(served, use)
    assert Index.threads == {threading.get_ident()}


async def test_a_directory_that_does_not_answer_stops_no_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at on a thread."""
    threads = list[threading.Thread]()

    def noted(path: Path) -> bool:
        threads.append(threading.current_thread())
        return paths.exists(path)

    monkeypatch.setattr(state_database, "exists", noted)
    assert not await StateDatabase(tmp_path / "batches").open(create=False)
    assert len(threads) == 1 and threading.main_thread() not in threads


async def test_a_disk_that_takes_no_more_stops_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More uploads wait for it than there are threads for everything else, on which long answers
    are formatted."""
    goes_on, begun, uploads, begin = threading.Event(), list[FileStore](), 41, FileStore.begin

    def hangs(path: Path) -> int:
        goes_on.wait()
        return os.open(path, os.O_WRONLY | os.O_CREAT)

    async def noted(store: FileStore, owner: str, identifier: str) -> Upload:
        begun.append(store)
        return await begin(store, owner, identifier)

    monkeypatch.setattr(stored_files, "create", hangs)
    monkeypatch.setattr(FileStore, "begin", noted)
    monkeypatch.setattr(response_streams, "LONG_ANSWER", 1)
    statuses: list[int] = []
    async with serving(batch_dir=tmp_path) as served:

        async def upload() -> None:
            statuses.append(
                (await exchange(served, post("/v1/files", UPLOAD + b"x\r\n" + END, FORM)))[0]
            )

        try:
            async with trio.open_nursery() as nursery:
                for _ in range(uploads):
                    nursery.start_soon(upload)
                await eventually(lambda: len(begun) == uploads)
                with trio.fail_after(PATIENCE_S / 2):
                    assert (
                        await ask(served, {"prompt": "x", "max_tokens": 9, "ignore_eos": True})
                    )[0] == 200
                goes_on.set()
        finally:
            goes_on.set()
    assert statuses == [200] * uploads


async def test_a_database_that_cannot_be_opened_for_the_moment_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose description could not be read at the start for want of a descriptor was
    removed."""
    async with serving(batch_dir=tmp_path) as served:
        with strict(served.base_url) as client:
            batch = await trio.to_thread.run_sync(
                ended, client, await trio.to_thread.run_sync(started, client, [request("a")])
            )
    lacking, open_file = [True], os.open

    def opens(path: Any, *arguments: Any, **more: Any) -> int:
        if lacking and str(path) == str(tmp_path / NAME):
            lacking.pop()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_file(path, *arguments, **more)

    monkeypatch.setattr(batch_storage, "RETRY_S", 0.005)
    monkeypatch.setattr(os, "open", opens)
    async with serving(batch_dir=tmp_path) as served:
        await eventually(lambda: not lacking)
        with strict(served.base_url) as client:
            seen = await trio.to_thread.run_sync(ended, client, batch)
            found = await trio.to_thread.run_sync(output, client, seen.output_file_id)
    assert found.keys() == {"a"}


@pytest.mark.parametrize("row", ["of a later version", "damaged"])
async def test_a_row_that_cannot_be_read_refuses_files_and_ends_no_server(
    tmp_path: Path, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is removed: an upgrade may read it again."""
    async with serving(batch_dir=tmp_path) as served:
        assert (await exchange(served, post("/v1/files", UPLOAD + b"x\r\n" + END, FORM)))[0] == 200
    with closing(sqlite3.connect(tmp_path / NAME)) as connection, connection:
        change = "replace(file, 'batch', 'later')" if row == "of a later version" else "x'00'"
        connection.execute(f"UPDATE files SET file = {change}")
    monkeypatch.setattr(batch_storage, "RETRY_S", 0.005)
    async with serving(batch_dir=tmp_path) as served:
        status, _, answer = await exchange(served, get("/v1/files"))
        fault = await problem(served, waits=True)
        assert (await ask(served, {"prompt": "x", "max_tokens": 2}))[0] == 200
    assert (status, json.loads(answer)["error"]["code"]) == (503, "batches_unavailable")
    assert fault.startswith(f"{tmp_path} cannot be used: a row of {NAME} cannot be read")
    assert len([*(tmp_path / "files").iterdir()]) == 1
