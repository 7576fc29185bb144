"""`state.sqlite` in --batch-dir: files, batches with answers, and stored responses."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from sqlite3 import Connection
from typing import Any, Generic, TypeVar

import attrs
import trio

from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.paths import exists
from trouper.protocol.private_files import FILE_MODE, make_private

FORMAT = 1
"""The database's `user_version`. Newer formats are refused."""
NAME = "state.sqlite"
MAX_TOGETHER = 256  # Jobs per commit.
CLOSE_S = 1.0
"""Time for the last jobs at the server's end."""
SCHEMA = """
CREATE TABLE files (id TEXT PRIMARY KEY, file BLOB NOT NULL);
CREATE TABLE batches (id TEXT PRIMARY KEY, spec BLOB NOT NULL, state BLOB NOT NULL);
CREATE TABLE lines (
    batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE,
    number INTEGER NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    begun INTEGER NOT NULL DEFAULT 0,
    at_work INTEGER NOT NULL DEFAULT 0,
    ok INTEGER,
    output BLOB,
    PRIMARY KEY (batch, number)
);
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    previous TEXT,
    used REAL,
    size INTEGER NOT NULL,
    inputs INTEGER NOT NULL,
    body BLOB,
    events BLOB
);
CREATE INDEX responses_previous ON responses (previous);
CREATE INDEX responses_used ON responses (owner, used, size);
CREATE TABLE items (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    item BLOB NOT NULL
);
CREATE INDEX items_response ON items (response);
CREATE INDEX items_id ON items (owner, id);
"""
IMAGES = """
CREATE TABLE IF NOT EXISTS images (
    owner TEXT NOT NULL,
    digest TEXT NOT NULL,
    size INTEGER NOT NULL,
    url TEXT NOT NULL,
    PRIMARY KEY (owner, digest)
);
CREATE TABLE IF NOT EXISTS response_images (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE DEFERRABLE INITIALLY DEFERRED,
    owner TEXT NOT NULL,
    digest TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS images_of_responses ON response_images (response);
CREATE INDEX IF NOT EXISTS images_needed ON response_images (owner, digest);
"""
"""Of stored responses. Databases of format 1 may lack them, and earlier versions read past them."""
BATCH_IMAGES = """
CREATE TABLE IF NOT EXISTS batch_images (
    batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE,
    url TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (batch, url)
);
"""
"""Files that lines name by address. Databases of format 1 may lack them, too."""
ERRORS = {
    sqlite3.SQLITE_FULL: errno.ENOSPC,
    sqlite3.SQLITE_READONLY: errno.EROFS,
    sqlite3.SQLITE_NOMEM: errno.ENOMEM,
}
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
T = TypeVar("T")
Work = Callable[[Connection], T]


class StateRefused(OSError):
    """The directory or database is not for this server. The text names the remedy."""


@attrs.define(eq=False)
class _Job(Generic[T]):
    work: Work[T]
    is_durable: bool
    truncates: bool
    _token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)
    _done: trio.Event = attrs.field(factory=trio.Event)
    result: T | None = None
    error: Exception | None = None

    def end(self) -> None:
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._done.set)

    async def wait(self) -> T:
        await self._done.wait()
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # `work` has returned it.


# One thread runs all statements, and commits waiting ones together. A commit survives `kill -9`,
# and a durable commit also a power loss, which may undo other commits of the last seconds but keeps
# the database whole.
class StateDatabase:
    """A directory's database, opened at the first use and locked against other servers."""

    def __init__(self, directory: Path | None) -> None:
        """`directory` None: the database is in memory."""
        self.directory = directory
        self.opened = trio.Event()
        self.problem = ""
        """Reason why the directory is unusable, if any."""
        self._opening, self._looking = trio.Lock(), trio.CapacityLimiter(1)
        self._jobs = SimpleQueue[_Job[Any] | None]()
        self._ended = trio.Event()
        """Set while no thread has the directory."""
        self._ended.set()
        self._first: _Job[None] | None = None
        """Ends when the thread has opened the database."""
        self._lock_fd = -1

    async def open(self, *, create: bool) -> bool:
        """Open the database once and return whether the directory exists. `create` makes the
        directory. Raises `OSError` for a directory that is unusable or another server's."""
        async with self._opening:
            # `close` may come while the thread opens.
            while not self.opened.is_set() and (create or await self._exists()):
                await self._start()
        return self.opened.is_set()

    async def _exists(self) -> bool:
        # Look on a thread: a file system that hangs must not stop the event loop.
        return self.directory is None or await run_on_thread(
            partial(exists, self.directory), self._looking
        )

    async def _start(self) -> None:
        if self._first is None:
            await self._ended.wait()
            self._first = self._start_thread()
        opened = self.opened  # `close` has another one.
        try:
            await self._first.wait()
        except StateRefused as error:
            self._first, self.problem = None, str(error)
            raise
        except OSError as error:
            reason = error.strerror or error
            self.problem = f"{self.directory} cannot be used: {reason}; see --batch-dir"
            self._first = None
            raise
        self.problem = ""
        opened.set()

    def _start_thread(self) -> _Job[None]:
        self._jobs, ended = SimpleQueue(), trio.Event()
        first = _Job(lambda _: None, is_durable=False, truncates=False)
        arguments = (self._jobs, first, trio.lowlevel.current_trio_token(), ended)
        # As a daemon, a thread whose disk hangs does not keep the process alive.
        thread = threading.Thread(None, self._serve, "state database", arguments, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, "the system starts no further thread") from error
        self._ended = ended
        return first

    async def run(self, work: Work[T], *, is_durable: bool = True, truncates: bool = False) -> T:
        """Run `work` in a transaction and return the result after the commit. Cancelled tasks' work
        is done too. `work` may run again if a common commit fails. `truncates` also removes deleted
        text from the files. Raises `OSError`; the transaction then had no effect."""
        if not self.opened.is_set():
            raise OSError(errno.EBADF, f"{NAME} is closed")
        job = _Job(work, is_durable=is_durable, truncates=truncates)
        self._jobs.put(job)
        return await job.wait()

    async def close(self) -> None:
        """Finish waiting jobs and release the directory, also amid opening."""
        if self._first is not None:
            self.opened, self._first = trio.Event(), None
            self._jobs.put(None)
            with trio.move_on_after(CLOSE_S, shield=True):
                await self._ended.wait()

    # -- on its thread ----------------------------------------------------------------------------

    def _serve(
        self,
        jobs: SimpleQueue[_Job[Any] | None],
        first: _Job[None],
        token: trio.lowlevel.TrioToken,
        ended: trio.Event,
    ) -> None:
        try:
            with closing(self._connect()) as connection:
                first.end()
                while (group := _next_group(jobs)) is not None:
                    _carry_out(connection, group)
        except (OSError, sqlite3.Error) as error:
            first.error = _system_error(error)
            first.end()
        finally:
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(ended.set)

    def _connect(self) -> Connection:
        """Raises `OSError` and `sqlite3.Error`."""
        if self.directory is None:
            connection = sqlite3.connect(":memory:", isolation_level=None)
        else:
            make_private(self.directory)
            self._lock(self.directory)
            path = self.directory / NAME
            _require_format(path)
            connection = sqlite3.connect(path, timeout=0, isolation_level=None)
        try:
            _prepare(connection)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _lock(self, directory: Path) -> None:
        # The system releases the lock however the process ends.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._lock_fd = os.open(directory / "lock", flags, FILE_MODE)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateRefused(
                f"another server uses {directory}; give this one another --batch-dir"
            ) from error


def _require_format(path: Path) -> None:
    """Create a private file, or check an existing one's format without changes. Raises `OSError`
    and `sqlite3.Error`."""
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE))
    except FileExistsError:
        # As an immutable file, a database is read without its write-ahead log, which stays as well.
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            try:
                version = _format_of(connection)
            except sqlite3.DatabaseError as error:
                if _primary_code(error) not in DAMAGED:
                    raise
                message = f"{path} is damaged ({error}); move it away, or put a copy in its place"
                raise StateRefused(message) from error
        if version > FORMAT:
            raise StateRefused(
                f"{path} has format {version}, and this version of Trouper reads formats up to "
                f"{FORMAT}; upgrade Trouper, or give this server another --batch-dir"
            ) from None


def _prepare(connection: Connection) -> None:
    # The lock is this server's alone, so the log needs no shared memory beside it.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")
    if _format_of(connection) == 0:
        # Before the log exists: the format is then in the file itself.
        connection.execute("PRAGMA auto_vacuum = FULL")
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")
    connection.executescript(IMAGES + BATCH_IMAGES)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA journal_size_limit = 0")


def _format_of(connection: Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _next_group(jobs: SimpleQueue[_Job[Any] | None]) -> list[_Job[Any]] | None:
    group = list[_Job[Any]]()
    while not group or (len(group) < MAX_TOGETHER and not jobs.empty()):
        job = jobs.get()
        if job is None:
            if not group:
                return None
            jobs.put(None)
            return group
        group.append(job)
    return group


def _carry_out(connection: Connection, group: Sequence[_Job[Any]]) -> None:
    """Commit jobs together, or after a failure one by one."""
    try:
        level = "FULL" if any(job.is_durable for job in group) else "NORMAL"
        connection.execute(f"PRAGMA synchronous = {level}")
        connection.execute("BEGIN")
        for job in group:
            job.result = job.work(connection)
        connection.execute("COMMIT")
    except Exception as error:  # noqa: BLE001 - who waits for the job gets it
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        if len(group) > 1:
            for job in group:
                _carry_out(connection, [job])
            return
        group[0].error = _system_error(error)
    if any(job.truncates for job in group):
        with suppress(sqlite3.Error):  # The next checkpoint does the same.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    for job in group:
        job.end()


def _system_error(error: Exception) -> Exception:
    if not isinstance(error, sqlite3.Error):
        return error
    number = ERRORS.get(_primary_code(error), errno.EIO)
    return OSError(number, os.strerror(number), f"{NAME}: {error}")


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
