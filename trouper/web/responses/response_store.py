"""Stored responses, bounded by number, bytes and age. Beyond a bound, the largest key loses the
least recently used response."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from sqlite3 import Connection
from typing import TypeVar

import attrs
import msgspec
import trio

from trouper.protocol.problems import Problem, RequestFailed, is_shortage, quoted
from trouper.protocol.settings import ServerSettings
from trouper.web.output.dialect import Json
from trouper.web.responses import stored_images
from trouper.web.serving.state_database import StateDatabase
from trouper.web.streaming.event_log import EventLog

# One key may fill the store, yet keeps no other key from an equal share. Items of a conversation
# are stored once, with the response that brought them in; images once per key. A row without `used`
# is a deleted or evicted response whose items a later response needs.

log = logging.getLogger("trouper.responses")
DISK_S = 5.0
"""Time limit of a statement in a request, which then continues without the database."""
MAX_UNSTORED = 1000
"""Responses with a remembered reason for a failed storing."""
TURNS = """
WITH RECURSIVE turns (id, previous, age) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ?
    UNION ALL
    SELECT responses.id, responses.previous, age + 1 FROM responses JOIN turns
    ON responses.id = turns.previous
)
"""
T = TypeVar("T")


@attrs.frozen(eq=False)
class StoredResponse:
    body: Json
    input: Sequence[Json]
    previous: str | None = None
    log: EventLog | None = None
    """Events of a streamed background response."""
    owner: str = ""

    @property
    def id(self) -> str:
        return str(self.body["id"])


class ResponseStore:
    """The store of all keys. `owners` returns all past identities of the request's key, which bound
    the visible responses. The database is in memory if the directory is unusable. Methods raise
    `RequestFailed` (503)."""

    def __init__(
        self,
        settings: ServerSettings,
        database: StateDatabase,
        owners: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database, self._owners, self._clock = database, owners, clock
        self._max_count = settings.stored_responses
        self._max_bytes = settings.stored_responses_bytes
        self._ttl_s = settings.stored_responses_ttl_s
        self._in_memory: StateDatabase | None = None
        self._unstored = OrderedDict[str, Problem]()

    async def add(self, stored: StoredResponse, earlier: Sequence[Json] = ()) -> None:
        """Store a response. `earlier` items are stored too if the response before is gone. A
        failure is logged, and raised when a client asks for the response."""

        def work(connection: Connection) -> None:
            _insert(connection, stored, earlier, self._clock())
            self._trim(connection)

        try:
            await self._run(work, create=True)
        except RequestFailed as failed:
            log.warning("response %s is not stored: %s", stored.id, failed.problem.message)
            self._unstored[stored.id] = failed.problem
            if len(self._unstored) > MAX_UNSTORED:
                self._unstored.popitem(last=False)

    async def get(
        self, response_id: str, param: str | None = None, code: str = "response_not_found"
    ) -> StoredResponse:
        """Return a response, and count the use. Raises `RequestFailed`: 404, or 400 if a parameter
        names the response, after which OpenAI's clients send the conversation whole."""
        work = partial(_use, response_id=response_id, owners=self._owners(), used=self._clock())
        stored = await self._run(work)
        if stored is not None:
            return stored
        if response_id in self._unstored:
            raise RequestFailed(self._unstored[response_id])
        message = (
            f"{'Response' if param is None else 'Previous response'} with id {quoted(response_id)} "
            f"not found: the last {self._max_count} responses are kept, for {self._ttl_s:g} s "
            "after their last use"
        )
        status = 404 if param is None else 400
        raise RequestFailed(Problem(status, message, "invalid_request_error", param, code))

    async def remove(self, response_id: str) -> None:
        """Delete a response from all files of the database, except items that later responses
        need."""
        await self._run(partial(_remove, response_id=response_id), truncates=True)

    async def conversation_bytes(self, response_id: str) -> int:
        """Bytes of the items up to and with that response."""
        return await self._run(partial(_count_bytes, response_id=response_id)) or 0

    async def conversation(self, response_id: str) -> list[Json]:
        """Items up to that response, the oldest first; [] if the response is gone."""
        return await self._run(partial(_read_conversation, response_id=response_id)) or []

    async def item(self, item_id: str) -> Json | None:
        """Return this key's first item with the id, as clients may repeat ids."""
        return await self._run(partial(_read_item, owners=self._owners(), item_id=item_id))

    async def close(self) -> None:
        if self._in_memory is not None:
            await self._in_memory.close()

    async def _run(
        self, work: Callable[[Connection], T], *, create: bool = False, truncates: bool = False
    ) -> T | None:
        """Run statements after enforcing the bounds. Returns None if the store was never used."""

        def within_bounds(connection: Connection) -> T:
            self._trim(connection)
            return work(connection)

        try:
            with trio.move_on_after(DISK_S):
                database = await self._opened(create=create)
                if database is None:
                    return None
                return await database.run(within_bounds, is_durable=False, truncates=truncates)
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        except OSError as error:
            message = (
                f"{self._database.directory} cannot be read or written: "
                f"{error.strerror or error}; make room there, or see --batch-dir"
            )
            raise RequestFailed(
                Problem(503, message, "server_error", None, "responses_unavailable")
            ) from error

    def _trim(self, connection: Connection) -> None:
        _trim(connection, self._clock() - self._ttl_s, self._max_count, self._max_bytes)

    async def _opened(self, *, create: bool) -> StateDatabase | None:
        if self._in_memory is None:
            try:
                return self._database if await self._database.open(create=create) else None
            except OSError as error:
                if is_shortage(error):
                    raise
                # Of requests that waited for the directory together, the first makes the database.
                if self._in_memory is None:
                    log.warning("responses are kept in memory only: %s", self._database.problem)
                    self._in_memory = StateDatabase(None)
        await self._in_memory.open(create=True)
        return self._in_memory


# -- statements ----------------------------------------------------------------------------------


def _insert(
    connection: Connection, stored: StoredResponse, earlier: Sequence[Json], used: float
) -> None:
    if _exists(connection, stored.id):
        return  # The work of a cancelled task is done, too.
    if earlier and not _exists(connection, stored.previous):
        insert_row = "INSERT INTO responses (id, owner, size, inputs) VALUES (?, ?, ?, ?)"
        size = _insert_items(connection, str(stored.previous), stored.owner, earlier)
        connection.execute(insert_row, (stored.previous, stored.owner, size, len(earlier)))
    body = msgspec.json.encode({**stored.body, "output": []})
    logged = None if stored.log is None else msgspec.msgpack.encode(stored.log.since(0, None))
    items = (*stored.input, *stored.body["output"])
    size = len(body) + len(logged or b"")
    size += _insert_items(connection, stored.id, stored.owner, items)
    connection.execute(
        "INSERT INTO responses (id, owner, previous, used, size, inputs, body, events) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            stored.id,
            stored.owner,
            stored.previous,
            used,
            size,
            len(stored.input),
            body,
            logged,
        ),
    )


def _exists(connection: Connection, response_id: str | None) -> bool:
    select = "SELECT 1 FROM responses WHERE id = ?"
    return connection.execute(select, (response_id,)).fetchone() is not None


def _insert_items(
    connection: Connection, response_id: str, owner: str, items: Sequence[Json]
) -> int:
    """Returns the bytes of the items without their images."""
    rows = list[tuple[str, str, str, bytes]]()
    urls: dict[str, str] = {}
    for item in items:
        kept, taken = stored_images.take_out(item)
        rows.append((response_id, owner, item["id"], msgspec.json.encode(kept)))
        urls |= taken
    stored_images.insert(connection, response_id, owner, urls)
    connection.executemany(
        "INSERT INTO items (response, owner, id, item) VALUES (?, ?, ?, ?)", rows
    )
    return sum(len(item) for *_, item in rows)


def _use(
    connection: Connection, response_id: str, owners: Collection[str], used: float
) -> StoredResponse | None:
    select = (
        "SELECT owner, previous, inputs, body, events FROM responses "
        "WHERE id = ? AND used IS NOT NULL"
    )
    row = connection.execute(select, (response_id,)).fetchone()
    if row is None or row[0] not in owners:
        return None
    connection.execute("UPDATE responses SET used = ? WHERE id = ?", (used, response_id))
    owner, previous, inputs, body, logged = row
    select = "SELECT item, owner FROM items WHERE response = ? ORDER BY rowid"
    items = stored_images.read_items(connection, connection.execute(select, (response_id,)))
    response = msgspec.json.decode(body) | {"output": items[inputs:]}
    events = None if logged is None else EventLog(msgspec.msgpack.decode(logged))
    return StoredResponse(response, items[:inputs], previous, events, owner)


def _count_bytes(connection: Connection, response_id: str) -> int:
    items = "SELECT sum(length(item)) FROM turns JOIN items ON items.response = turns.id"
    images = (
        "SELECT sum(images.size) FROM turns JOIN response_images AS needed "
        "ON needed.response = turns.id JOIN images "
        "ON images.owner = needed.owner AND images.digest = needed.digest"
    )
    selects = (TURNS + items, TURNS + images)
    sizes = [connection.execute(select, (response_id,)).fetchone()[0] for select in selects]
    return sum(size or 0 for size in sizes)


def _read_conversation(connection: Connection, response_id: str) -> list[Json]:
    select = (
        "SELECT item, owner FROM turns JOIN items ON items.response = turns.id "
        "ORDER BY age DESC, items.rowid"
    )
    return stored_images.read_items(connection, connection.execute(TURNS + select, (response_id,)))


def _read_item(connection: Connection, owners: Collection[str], item_id: str) -> Json | None:
    marks = ", ".join("?" * len(owners))
    condition = f"id = ? AND owner IN ({marks})"
    select = f"SELECT item, owner FROM items WHERE {condition} ORDER BY rowid"  # noqa: S608
    row = connection.execute(select, (item_id, *owners)).fetchone()
    return None if row is None else stored_images.read_items(connection, [row])[0]


def _remove(connection: Connection, response_id: str) -> None:
    """Delete a response and items that no later response needs."""
    connection.execute(
        "UPDATE responses SET used = NULL, body = NULL, events = NULL, size = "
        "(SELECT ifnull(sum(length(item)), 0) FROM items WHERE response = responses.id) "
        "WHERE id = ?",
        (response_id,),
    )
    unneeded = (
        "SELECT previous FROM responses AS gone WHERE id = ? AND used IS NULL "
        "AND NOT EXISTS (SELECT 1 FROM responses WHERE previous = gone.id)"
    )
    following: str | None = response_id
    while (row := connection.execute(unneeded, (following,)).fetchone()) is not None:
        connection.execute("DELETE FROM responses WHERE id = ?", (following,))
        [following] = row
    stored_images.remove_unneeded(connection)


def _trim(connection: Connection, oldest: float, max_count: int, max_bytes: int) -> None:
    """Remove expired responses, then of the owner with the most, the least recently used, until the
    bounds hold."""
    expired = "SELECT id FROM responses WHERE used < ?"
    for (response_id,) in connection.execute(expired, (oldest,)).fetchall():
        _remove(connection, response_id)
    held = (
        "SELECT owner, count(used), sum(size) + ifnull((SELECT sum(images.size) FROM images "
        "WHERE images.owner = responses.owner), 0), min(used), min(rowid) "
        "FROM responses GROUP BY owner"
    )
    while rows := connection.execute(held).fetchall():
        count, size = sum(row[1] for row in rows), sum(row[2] for row in rows)
        if not count or (count <= max_count and size <= max_bytes):
            return
        column = 1 if count > max_count else 2
        # Of two that hold as much, the one with the older response loses it.
        [owner, *_] = max(
            (row for row in rows if row[1]), key=lambda row: (row[column], -row[3], -row[4])
        )
        used = "SELECT id FROM responses WHERE owner = ? AND used NOT NULL ORDER BY used, rowid"
        _remove(connection, connection.execute(f"{used} LIMIT 1", (owner,)).fetchone()[0])
