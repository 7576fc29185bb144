"""The database of files, batches and stored responses: commits, what a kill leaves, and disks that
take no more."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any

import openai
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.web.batching import strict
from tests.web.serving import PATIENCE_S, Served, ask, exchange, get, serving
from tests.web.test_batches import using
from tests.web.test_key_rights import bearer, key_file
from trouper import ServerSettings
from trouper.protocol.private_files import make_private
from trouper.web import app
from trouper.web.batches import batch_table
from trouper.web.batches.batch_table import Batch, BatchSpec, BatchState, BatchTable, LineAnswer
from trouper.web.responses.response_store import ResponseStore, StoredResponse
from trouper.web.serving import state_database
from trouper.web.serving.state_database import FORMAT, NAME, StateDatabase, StateRefused

RESPONSE = {"input": "hello", "max_output_tokens": 2}
SPEC = BatchSpec(
    id="batch_1",
    endpoint="/v1/completions",
    input_file_id="file-in",
    completion_window="24h",
    created_at=1,
    expires_at=2,
    output_file_id="file-out",
    error_file_id="file-err",
)


async def opened(directory: Path | None = None) -> StateDatabase:
    database = StateDatabase(directory)
    assert await database.open(create=True)
    return database


def add_file(name: str, connection: Connection) -> str:
    connection.execute("INSERT INTO files (id, file) VALUES (?, ?)", (name, b"{}"))
    return name


def names(connection: Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT id FROM files ORDER BY rowid")]


async def test_one_that_fails_fails_alone_and_the_others_are_committed_together() -> None:
    database, results = await opened(), list[object]()

    async def run(name: str) -> None:
        try:
            results.append(await database.run(partial(add_file, name)))
        except OSError as error:
            results.append(error.errno)

    async with trio.open_nursery() as nursery:
        for name in ("a", "b", "a", "c"):
            nursery.start_soon(run, name)
    assert sorted(results, key=str) == [errno.EIO, "a", "b", "c"]
    assert sorted(await database.run(names)) == ["a", "b", "c"]
    await database.close()


async def test_a_cancelled_write_is_done_and_close_waits_for_it(tmp_path: Path) -> None:
    database = await opened(tmp_path)
    with trio.CancelScope() as scope:
        scope.cancel()
        await database.run(partial(add_file, "a"))
    await database.close()
    with pytest.raises(OSError, match="closed"):
        await database.run(names)
    again = await opened(tmp_path)
    assert await again.run(names) == ["a"]
    await again.close()


async def test_a_database_that_is_closed_while_it_is_opened_leaves_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def waits(directory: Path) -> None:
        assert goes_on.wait(PATIENCE_S)
        make_private(directory)

    monkeypatch.setattr(state_database, "make_private", waits)
    database = StateDatabase(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(database.open, create=True))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    goes_on.set()
    await database.close()
    again = await opened(tmp_path)
    await again.close()


async def test_one_that_waits_for_the_opening_of_a_closed_database_opens_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response that ended at a shutdown was lost, when the database closed before it was open."""
    goes_on = threading.Event()

    def waits(directory: Path) -> None:
        assert goes_on.wait(PATIENCE_S)
        make_private(directory)

    async def add() -> None:
        assert await database.open(create=True)
        assert await database.run(partial(add_file, "a")) == "a"

    monkeypatch.setattr(state_database, "make_private", waits)
    database = StateDatabase(tmp_path)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(add)
            await wait_all_tasks_blocked()
            nursery.start_soon(database.close)
            await wait_all_tasks_blocked()
            goes_on.set()
    assert await database.run(names) == ["a"]
    await database.close()
    with pytest.raises(OSError, match="closed"):
        await database.run(names)


async def test_all_files_are_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        database = await opened(tmp_path / "state")
        await database.run(partial(add_file, "a"))
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "state").iterdir()}
    assert modes == {NAME: 0o600, f"{NAME}-wal": 0o600, "lock": 0o600}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    await database.close()


async def test_a_newer_format_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    database = await opened(tmp_path)
    await database.run(partial(add_file, "a"))
    await database.close()
    with closing(sqlite3.connect(tmp_path / NAME)) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")
    before = contents(tmp_path)
    async with serving(batch_dir=tmp_path) as served:
        status, _, body = await exchange(served, get("/v1/files"))
        message = json.loads(body)["error"]["message"]
        assert status == 503 and str(tmp_path / NAME) in message
        assert f"format {FORMAT + 1}" in message and "upgrade Trouper, or" in message
        status, answer = await ask(served, RESPONSE, "/v1/responses")
        assert status == 200, "responses are kept in memory"
        assert (await exchange(served, get(f"/v1/responses/{answer['id']}")))[0] == 200
    assert contents(tmp_path) == before


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


async def test_a_damaged_database_is_named_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"no database at all" * 100)
    with pytest.raises(StateRefused, match=r"is damaged .*; move it away"):
        await StateDatabase(tmp_path).open(create=True)
    assert (tmp_path / NAME).read_bytes() == b"no database at all" * 100


async def test_a_directory_that_takes_no_files_harms_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(_: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(state_database, "make_private", refuses)
    async with serving(batch_dir=tmp_path) as served:
        status, _, body = await exchange(served, get("/v1/files"))
        assert status == 503 and "Read-only file system; see --batch-dir" in body.decode()
        status, answer = await ask(served, RESPONSE, "/v1/responses")
        assert status == 200
        more = RESPONSE | {"previous_response_id": answer["id"]}
        assert (await ask(served, more, "/v1/responses"))[0] == 200


async def test_a_full_disk_is_named_and_harms_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database may not grow: SQLite's own limit of pages says the same as a full disk."""
    database = StateDatabase(tmp_path)
    monkeypatch.setattr(app, "StateDatabase", lambda _: database)
    async with serving(batch_dir=tmp_path) as served:
        _, kept = await ask(served, RESPONSE, "/v1/responses")
        await database.run(partial(limit_pages, 1))
        large = RESPONSE | {"metadata": {f"key{number}": "x" * 500 for number in range(16)}}
        status, answer = await ask(served, large, "/v1/responses")
        assert (status, answer["status"]) == (200, "incomplete")
        status, _, body = await exchange(served, get(f"/v1/responses/{answer['id']}"))
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "responses_unavailable")
        assert "No space left on device; make room there, or see --batch-dir" in error["message"]
        assert (await exchange(served, get(f"/v1/responses/{kept['id']}")))[0] == 200
        await database.run(partial(limit_pages, 10**6))
        _, answer = await ask(served, large, "/v1/responses")
        assert (await exchange(served, get(f"/v1/responses/{answer['id']}")))[0] == 200


def limit_pages(pages: int, connection: Connection) -> None:
    """At least as many as there are."""
    connection.execute(f"PRAGMA max_page_count = {pages}")


async def test_stored_responses_survive_a_restart_for_their_key_alone(
    tmp_path: Path,
) -> None:
    file = key_file(tmp_path, "sk-a name=a\nsk-b name=b\n")
    keys: dict[str, Any] = {"api_key_file": file, "batch_dir": tmp_path / "state"}
    async with serving(**keys) as served:

        def make(client: openai.OpenAI) -> tuple[Any, list[Any]]:
            create = partial(client.responses.create, input="secret", max_output_tokens=3)
            return create(), [*create(background=True, stream=True)]

        with strict(served.base_url, "sk-a") as client:
            kept, events = await trio.to_thread.run_sync(make, client)
    async with serving(**keys) as served:

        def use(client: openai.OpenAI) -> None:
            assert client.responses.retrieve(kept.id) == kept
            [item] = client.responses.input_items.list(kept.id)
            again = client.responses.retrieve(events[-1].response.id, stream=True, starting_after=1)
            assert [*again] == events[2:]
            following = client.responses.create(
                input=[{"type": "item_reference", "id": item.id}], previous_response_id=kept.id
            )
            assert following.previous_response_id == kept.id
            for name in (kept.id, following.id, events[-1].response.id):
                client.responses.delete(name)
                with pytest.raises(openai.NotFoundError, match="not found"):
                    client.responses.retrieve(name)

        for path in (f"/v1/responses/{kept.id}", f"/v1/responses/{kept.id}/input_items"):
            assert (await exchange(served, get(path, bearer("sk-b"))))[0] == 404
        await using(served, use, "sk-a")
        texts = [path.read_bytes() for path in (tmp_path / "state").glob(f"{NAME}*")]
        assert b"secret" not in b"".join(texts), "what is deleted is in no file"


async def test_another_server_keeps_responses_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(batch_dir=tmp_path) as first:
        await stored_by(first)
        async with serving(batch_dir=tmp_path) as second:
            await stored_by(second)
    assert caplog.text.count("responses are kept in memory only: another server uses") == 1


async def test_responses_that_wait_for_the_directory_together_share_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = await opened(tmp_path)
    store = ResponseStore(ServerSettings(), StateDatabase(tmp_path), lambda: {""})
    names = ["resp_1", "resp_2", "resp_3"]
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(store.add, StoredResponse({"id": name, "output": []}, ()))
    assert [(await store.get(name)).id for name in names] == names
    assert caplog.text.count("responses are kept in memory only") == 1
    await store.close()
    await other.close()


async def stored_by(served: Served) -> None:
    _, answer = await ask(served, RESPONSE, "/v1/responses")
    assert (await exchange(served, get(f"/v1/responses/{answer['id']}")))[0] == 200


# -- batches -------------------------------------------------------------------------------------


async def test_a_line_has_one_answer_and_an_attempt_that_was_returned_does_not_count() -> None:
    database = await opened()

    def use(connection: Connection) -> None:
        batch_table.insert_batch(connection, SPEC, BatchState())
        for number, step in (
            *((3, step) for step in ("begin_attempt", "begin_work") * 2),
            (3, "return_attempt"),
            (4, "return_attempt"),
            *((5, step) for step in ("begin_attempt", "begin_work", "begin_attempt")),
            (5, "return_attempt"),
        ):
            getattr(batch_table, step)(connection, SPEC.id, number)
        answers = [
            LineAnswer(3, True, b"1"),
            LineAnswer(3, False, b"2"),
            LineAnswer(6, False, b"3"),
        ]
        batch_table.insert_answers(connection, SPEC.id, answers)

    await database.run(use)
    rows = "SELECT number, attempts, begun, ok, output FROM lines ORDER BY number"
    assert await database.run(lambda connection: connection.execute(rows).fetchall()) == [
        (3, 1, 1, 1, b"1"),
        (5, 1, 1, None, None),
        (6, 0, 0, 0, b"3"),
    ]
    await database.close()


async def test_a_cancelled_batch_stays_so_whatever_it_enters_after_that() -> None:
    database = await opened()

    def use(connection: Connection) -> BatchState:
        batch_table.insert_batch(connection, SPEC, BatchState())
        for status in ("in_progress", "cancelling", "in_progress", "finalizing"):
            state = batch_table.enter_status(connection, SPEC.id, status, 1)
        return state

    state = await database.run(use)
    assert (state.status, {*state.times}) == ("cancelling", {"in_progress", "cancelling"})
    await database.close()


async def test_a_cancel_that_is_answered_late_does_not_undo_the_end() -> None:
    """Commits that are made together wake their tasks in any order."""
    answered_late, run = trio.Event(), StateDatabase.run

    class Late(StateDatabase):
        async def run(self, work: Any, **options: Any) -> Any:
            result = await run(self, work, **options)
            if getattr(work, "func", None) is batch_table.enter_status:
                await answered_late.wait()
            return result

    database = Late(None)
    await database.open(create=True)
    table, batch = BatchTable(database), Batch(SPEC)
    await table.create(batch)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(table.enter, batch, "cancelling", 1)
        await wait_all_tasks_blocked()
        nursery.start_soon(table.finish, batch, BatchState(status="failed"), [])
        await wait_all_tasks_blocked()
        answered_late.set()
    assert batch.status == "failed"
    await database.close()


async def test_outputs_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_table, "PIECE_BYTES", 30)
    database = await opened()
    answers = [LineAnswer(number, number % 3 > 0, b"%04d" % number) for number in range(40)]
    table, batch = batch_table.BatchTable(database), Batch(SPEC)
    await table.create(batch)
    await table.store_answers(batch, answers[::-1])
    pieces = [piece async for piece in table.outputs(batch, ok=True)]
    assert b"".join(pieces) == b"".join(b"%04d\n" % number for number in range(40) if number % 3)
    assert len(pieces) == 4 and (batch.failed, batch.answer_bytes) == (14, 160)
    await database.close()
