"""Imports the JSON files of earlier versions from --batch-dir: a description beside each content,
and a directory with each batch's log."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from sqlite3 import Connection

import msgspec

from trouper.protocol.problems import is_shortage
from trouper.web.batches import batch_table
from trouper.web.batches.batch_table import BatchSpec, BatchState, LineAnswer
from trouper.web.batches.stored_files import StoredFile, insert_file, on_disk
from trouper.web.serving.state_database import StateDatabase

log = logging.getLogger("trouper.batches")
NOTHING = msgspec.Raw()


class _LogRecord(msgspec.Struct):
    """A record sets one of the first five fields."""

    attempt: int | None = None
    begun: int | None = None
    returned: int | None = None
    answer: int | None = None
    status: str | None = None
    ok: bool = True
    output: msgspec.Raw = NOTHING
    at: int = 0


async def import_old(directory: Path, database: StateDatabase) -> None:
    """Import and delete old files; a repetition after a kill is harmless. Unreadable files are
    logged. Raises `OSError`."""
    files, batches = await on_disk(_list_old, directory)
    if files or batches:
        imported = await database.run(partial(_import, files=files, batches=batches))
        await on_disk(_delete, imported)
        log.info("batches: %s was imported into its database", directory)


def _list_old(directory: Path) -> tuple[list[Path], list[Path]]:
    return sorted((directory / "files").glob("*.json")), sorted((directory / "batches").glob("*"))


def _import(connection: Connection, files: list[Path], batches: list[Path]) -> list[Path]:
    imported = list[Path]()
    for path in [*files, *batches]:
        connection.execute("SAVEPOINT old")
        try:
            if path.suffix == ".json":
                insert_file(connection, msgspec.json.decode(path.read_bytes(), type=StoredFile))
            else:
                _import_batch(connection, path)
        except (OSError, msgspec.MsgspecError) as error:
            if is_shortage(error):  # The directory is opened again soon.
                raise
            connection.execute("ROLLBACK TO old")
            log.warning("batches: %s cannot be read: %s", path, error)
        else:
            imported.append(path)
        connection.execute("RELEASE old")
    return imported


def _import_batch(connection: Connection, directory: Path) -> None:
    spec = msgspec.json.decode((directory / "batch.json").read_bytes(), type=BatchSpec)
    result, state = directory / "result.json", BatchState()
    if result.exists():
        state = msgspec.json.decode(result.read_bytes(), type=BatchState)
    if batch_table.insert_batch(connection, spec, state) and not result.exists():
        for record in _records(directory / "log.jsonl"):
            _apply(connection, spec.id, record)


def _records(path: Path) -> Iterator[_LogRecord]:
    if not path.exists():  # The batch was killed while it was created.
        return
    decoder = msgspec.json.Decoder(_LogRecord)
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):  # The last line may have been cut by a kill.
                yield decoder.decode(line)


def _apply(connection: Connection, batch_id: str, record: _LogRecord) -> None:
    if record.status is not None:
        batch_table.enter_status(connection, batch_id, record.status, record.at)
    elif record.attempt is not None:
        batch_table.begin_attempt(connection, batch_id, record.attempt)
    elif record.begun is not None:
        batch_table.begin_work(connection, batch_id, record.begun)
    elif record.returned is not None:
        batch_table.return_attempt(connection, batch_id, record.returned)
    elif record.answer is not None:
        answer = LineAnswer(record.answer, record.ok, bytes(record.output))
        batch_table.insert_answers(connection, batch_id, [answer])


def _delete(imported: list[Path]) -> None:
    for path in imported:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
