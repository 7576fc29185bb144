"""Runs batches, a task each, with --batch-rows requests at a time over all batches. Batch requests
have the lowest priority, and batches take turns."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from contextvars import Context, copy_context
from functools import partial
from typing import Any
from uuid import uuid4

import attrs
import msgspec
import trio

from trouper.actors.runtime.supervision import innermost
from trouper.actors.runtime.worker_threads import run_on_thread
from trouper.protocol.problems import Problem, RequestFailed
from trouper.web.batches.batch_storage import RETRY_S, BatchImages, BatchStorage
from trouper.web.batches.batch_table import Attempts, Batch, BatchState, LineAnswer
from trouper.web.batches.input_lines import (
    MAX_ERRORS,
    InputLines,
    LineError,
    LinesInvalid,
    RunLine,
    validated,
)
from trouper.web.batches.line_runner import (
    LineResponse,
    LineRunner,
    code_of,
    error_line,
    output_line,
)
from trouper.web.batches.stored_files import StoredFile, on_disk
from trouper.web.http.byte_budget import ByteBudget
from trouper.web.serving.service import now

log = logging.getLogger("trouper.batches")
MAX_ATTEMPTS = 3
"""Unfinished runs of a request for which a model began to work."""
MAX_UNBEGUN = 9
"""Unfinished runs of a request, with or without a model at work."""

# The end of a request decides:
#
# - 429 and 503: the request runs again later, until the batch expires. The slot is free meanwhile.
# - Out of device memory: at most MAX_ATTEMPTS runs, as each costs restarts of the engine.
# - Crash of the engine or kill: at most MAX_ATTEMPTS runs. Attempts for which no model worked (a
#   model was loading) count towards MAX_UNBEGUN alone.
# - Cancellation (shutdown, forced unload, batch cancelled or expired): the attempt does not count.
# - Any other response is the answer, also an error of the client's making.

# A 500 means that the engine crashed, and the attempt counts. A 503 means shutdown.
CRASHED = "engine_stopped"

# The attempt counts. The response after the last attempt is the answer.
NO_MEMORY = "out_of_memory"
MIN_ROOM = 1024
"""Bytes of free disk that a request needs, besides the answer."""
AGAIN_S, MAX_AGAIN_S = 0.5, 30.0
"""Bounds of the time until a refused request runs again, doubled each time."""
LINE_COPIES = 2
"""Copies of a line in memory beside the request."""
OUTCOMES = ("completed", "failed", "again")


@attrs.define
class BatchCounts:
    running: int = 0
    outcomes: Counter[str] = attrs.field(factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))


class BatchWorker:
    def __init__(
        self,
        storage: BatchStorage,
        runner: LineRunner,
        rows: int,
        max_line_bytes: int,
        *,
        check_model: Callable[[str, str], object],
        budget: ByteBudget,
    ) -> None:
        """`budget` bounds the running lines. `check_model` raises `RequestFailed` for a model that
        the batch's owner cannot use."""
        self.counts = BatchCounts()
        self._storage, self._table, self._runner = storage, storage.table, runner
        self._max_line_bytes = max_line_bytes
        self._check_model, self._budget = check_model, budget
        self._rows, self._slots = rows, trio.Semaphore(rows)
        self._exclusive = trio.Lock()
        """Held by the task that takes all slots; two such tasks would deadlock."""
        self._validating = trio.CapacityLimiter(1)
        self._nursery: trio.Nursery | None = None
        self._context = Context()

    @property
    def runs(self) -> bool:
        return self._nursery is not None

    async def run(self) -> None:
        """Resume the batches of an earlier process, then run new ones until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery, self._context = nursery, copy_context()
                await self._storage.open_when_possible()
                for batch in tuple(self._storage.unended):
                    self.start(batch)
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def start(self, batch: Batch) -> None:
        """Run a batch, once, with the context variables of `run` instead of the creating
        request's."""
        if self._nursery is not None and not batch.started:
            batch.started = True
            self._context.run(self._nursery.start_soon, self._run, batch)

    async def _run(self, batch: Batch) -> None:
        """Run a batch to the end, also across faults of the disk."""
        fault = ""
        while not batch.ended:
            try:
                await self._process(batch)
            except* OSError as errors:
                error = innermost(errors)
                batch.fault = getattr(error, "strerror", None) or str(error)
                log.warning("batch %s waits for its disk: %s", batch.spec.id, batch.fault)
            except* Exception as errors:
                if fault != (fault := repr(innermost(errors))):
                    log.exception(
                        "batch %s is stuck, and tried again every %g s; the others go on",
                        batch.spec.id,
                        RETRY_S,
                    )
            if not batch.ended:
                await trio.sleep(RETRY_S)
        batch.forget_answers()

    async def _process(self, batch: Batch) -> None:
        try:
            lines = await self._validated(batch)
        except LinesInvalid as invalid:
            await self._fail(batch, invalid.errors)
            return
        batch.total = len(lines)
        if batch.status == "validating":
            await self._table.enter(batch, "in_progress", now())
        if batch.status == "in_progress":
            await self._run_lines(batch, lines)
        await self._finish(batch, lines)

    async def _fail(self, batch: Batch, errors: list[LineError]) -> None:
        state = self._ended(batch, "failed", [error.body() for error in errors])
        await self._table.finish(batch, state, [])

    @staticmethod
    def _ended(batch: Batch, status: str, errors: Sequence[dict[str, Any]] = ()) -> BatchState:
        state = batch.counted()
        times = state.times | {status: now()}
        return msgspec.structs.replace(state, status=status, times=times, errors=[*errors])

    async def _validated(self, batch: Batch) -> InputLines:
        path = self._storage.files.path(batch.spec.input_file_id)
        check = partial(validated, path, batch.spec.endpoint, self._max_line_bytes)
        try:
            lines = await run_on_thread(check, self._validating, abandon_on_cancel=False)
        except FileNotFoundError:
            message = f"the file {batch.spec.input_file_id} is no longer there"
            raise LinesInvalid(
                [LineError("input_file_missing", message, param="input_file_id")]
            ) from None
        errors = list[LineError]()
        for model, line in lines.models.items() if batch.status == "validating" else ():
            if len(errors) == MAX_ERRORS:
                break
            await trio.lowlevel.checkpoint()  # Each line may name another.
            try:
                self._check_model(model, batch.spec.owner)
            except RequestFailed as failed:
                message = f"line {line}: {failed.problem.message}"
                errors.append(LineError("model_not_found", message, line, "body.model"))
        if errors:
            raise LinesInvalid(errors)
        return lines

    # -- requests ---------------------------------------------------------------------------------

    async def _run_lines(self, batch: Batch, lines: InputLines) -> None:
        """Run unanswered requests until the batch is complete, cancelled or expired."""
        with trio.CancelScope(
            deadline=trio.current_time() + batch.spec.expires_at - time.time()
        ) as batch.scope:
            for number in await self._table.interrupted(batch):
                await self._run_alone(batch, lines, number)
            # A batch whose requests are all refused for the moment begins no others.
            begun = trio.Semaphore(self._rows)
            async with trio.open_nursery() as nursery:
                for number in batch.unanswered():
                    await begun.acquire()
                    await self._take_slot(batch)
                    nursery.start_soon(self._run_line, batch, lines, number, begun)

    async def _run_alone(self, batch: Batch, lines: InputLines, number: int) -> None:
        """Run an interrupted request alone, to identify one that kills the process."""
        await self._storage.has_room(batch.spec.owner, MIN_ROOM)
        async with self.all_slots():
            answer = await self._attempt(batch, lines, number)
        if answer is not None:
            await self._keep(batch, number, answer)

    async def _take_slot(self, batch: Batch) -> None:
        """Wait for room, then for a slot: keys without room hold no slot."""
        await self._storage.has_room(batch.spec.owner, MIN_ROOM)
        await self._slots.acquire()

    @asynccontextmanager
    async def all_slots(self) -> AsyncIterator[None]:
        """Wait until no request runs, and let none begin."""
        async with self._exclusive:
            with ExitStack() as slots:
                for _ in range(self._rows):
                    await self._slots.acquire()
                    slots.callback(self._slots.release)
                yield

    async def _run_line(
        self, batch: Batch, lines: InputLines, number: int, begun: trio.Semaphore
    ) -> None:
        """Run a request to an answer. The slot is free between attempts."""
        try:
            again_s = AGAIN_S
            while not await self._attempt_in_slot(batch, lines, number):
                self.counts.outcomes["again"] += 1
                await trio.sleep(again_s)
                again_s = min(2 * again_s, MAX_AGAIN_S)
                await self._take_slot(batch)
        finally:
            begun.release()

    async def _attempt_in_slot(self, batch: Batch, lines: InputLines, number: int) -> bool:
        try:
            answer = await self._attempt(batch, lines, number)
        finally:
            self._slots.release()
        if answer is not None:
            await self._keep(batch, number, answer)
        return number in batch.answered

    async def _attempt(self, batch: Batch, lines: InputLines, number: int) -> LineAnswer | None:
        """Run a request once, if memory allows. Returns an answer yet to be stored, or None."""
        holding = self._budget.open(batch.spec.owner)
        try:
            holding.take(LINE_COPIES * lines.sizes[number])
        except RequestFailed as refused:
            # Else its endpoint refuses it, too, and that is its answer.
            if refused.problem.status != 413:
                return None
        try:
            return await self._attempt_now(batch, lines, number)
        finally:
            holding.give_back()

    async def _attempt_now(self, batch: Batch, lines: InputLines, number: int) -> LineAnswer | None:
        line = await on_disk(lines.read, number)
        request_id = uuid4().hex
        limit = Attempts(MAX_UNBEGUN, MAX_ATTEMPTS)
        before = await self._table.begin_attempt(batch, number, limit)
        if before.all >= limit.all or before.begun >= limit.begun:
            message = (
                f"the request was run {before.all} times, and each time the server ended before "
                "its answer"
            )
            output = error_line(request_id, line.custom_id, "request_crashes_server", message)
            await self._store(batch, LineAnswer(number, False, output))
            return None
        async with self._returned_if_cancelled(batch, number):
            response = await self._respond(batch, line, number, request_id)
            code = code_of(response) if response.status >= 500 else None
            if (response.status, code) == (500, CRASHED):
                return None
            if code == NO_MEMORY:
                begun = (await self._table.attempts(batch, number)).begun
                if begun < MAX_ATTEMPTS:
                    return None
            elif response.status in (429, 503):
                await self._table.return_attempt(batch, number)
                return None
        output = output_line(request_id, line.custom_id, response)
        return LineAnswer(number, response.status < 400, output)

    async def _keep(self, batch: Batch, number: int, answer: LineAnswer) -> None:
        """Store an answer once the database and the output file have room."""
        size = 2 * len(answer.output) + MIN_ROOM
        async with (
            self._returned_if_cancelled(batch, number),
            self._storage.reserved(batch.spec.owner, size),
        ):
            await self._store(batch, answer)

    async def _store(self, batch: Batch, answer: LineAnswer) -> None:
        await self._table.store_answers(batch, [answer])
        self.counts.outcomes["completed" if answer.ok else "failed"] += 1

    @asynccontextmanager
    async def _returned_if_cancelled(self, batch: Batch, number: int) -> AsyncIterator[None]:
        try:
            yield
        except* trio.Cancelled:
            # From nurseries of the app it comes as a group. Writes are shielded.
            await self._table.return_attempt(batch, number)
            raise

    async def _respond(
        self, batch: Batch, line: RunLine, number: int, request_id: str
    ) -> LineResponse:
        begin, spec = partial(self._begin, batch, number), batch.spec
        self.counts.running += 1
        try:
            return await self._runner.run(
                spec.endpoint,
                bytes(line.body),
                request_id,
                spec.owner,
                begin=begin,
                read_image=BatchImages(self._storage, batch).read,
            )
        finally:
            self.counts.running -= 1

    async def _begin(self, batch: Batch, number: int) -> None:
        """Record that a model begins to work. Raises `RequestFailed` (503) if the write fails."""
        try:
            await self._table.begin_work(batch, number)
        except OSError as error:
            message = f"the attempt could not be noted: {error.strerror}"
            raise RequestFailed(
                Problem(503, message, "server_error", code="batches_unavailable", retry_after_s=1)
            ) from error

    # -- the end ----------------------------------------------------------------------------------

    async def _finish(self, batch: Batch, lines: InputLines) -> None:
        if batch.status == "in_progress":
            await self._table.enter(batch, "finalizing", now())
        status = "cancelled" if batch.status == "cancelling" else "completed"
        if status == "completed" and len(batch.answered) < batch.total:
            status = "expired"
            answers = await on_disk(_expired, lines, [*batch.unanswered()])
            await self._table.store_answers(batch, answers)
        state = self._ended(batch, status)
        files = [
            await self._write_file(batch, ok=ok)
            for ok, count in ((True, state.completed), (False, state.failed))
            if count
        ]
        await self._table.finish(batch, state, files)
        for file in files:
            self._storage.files.note(file)

    async def _write_file(self, batch: Batch, *, ok: bool) -> StoredFile:
        spec = batch.spec
        file_id = spec.output_file_id if ok else spec.error_file_id
        size = await self._storage.files.write(file_id, self._table.outputs(batch, ok=ok))
        return StoredFile(
            id=file_id,
            filename=f"{spec.id}_{'output' if ok else 'error'}.jsonl",
            bytes=size,
            purpose="batch_output",
            created_at=now(),
            owner=spec.owner,
        )

    async def cancel(self, batch: Batch) -> None:
        """Raises `OSError`."""
        if batch.status not in ("validating", "in_progress"):
            return
        await self._table.enter(batch, "cancelling", now())
        if batch.scope is not None:
            batch.scope.cancel(reason="the batch was cancelled")


def _expired(lines: InputLines, numbers: list[int]) -> list[LineAnswer]:
    """Return errors of requests that had no time. Runs in a thread; raises `OSError`."""
    code, message = "batch_expired", "the batch expired before this request had its answer"
    return [
        LineAnswer(
            number,
            False,
            error_line(uuid4().hex, lines.read(number).custom_id, code, message),
        )
        for number in numbers
    ]
