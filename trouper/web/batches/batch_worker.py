"""Runs batches: one task for each, and as many requests of all of them at a time as --batch-rows
allows.

A request of a batch has the lowest priority, so it enters the model's batch of rows only when no
other request waits. Requests of several batches take turns. What ends a request decides what
becomes of it:

- Any response but those below is its answer, an error of the client's making too.
- 429 and 503 are no answers: the request runs again later, until the batch expires. Meanwhile its
  slot is for others.
- A request for which the device had no memory, although it ran alone, runs at most MAX_ATTEMPTS
  times: each time costs restarts of the engine.
- A request during which the engine stopped, or the process was killed, runs again, but at most
  MAX_ATTEMPTS times. An attempt that ended before a model worked for it (the model was being
  loaded) says little: it counts towards MAX_UNBEGUN alone. After a kill those that ran run first,
  one at a time, and those with the fewest attempts before the others: so the one that kills is
  found, and the others get their answers, also if kills come for another reason.
- Cancelled (the server leaves, the model is unloaded by force, the batch is cancelled or expires):
  the attempt does not count.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from contextvars import Context, copy_context
from functools import partial
from uuid import uuid4

import attrs
import trio

from trouper.actors.runtime.supervision import innermost
from trouper.protocol.problems import Problem, RequestFailed
from trouper.web.batches.answer_log import BatchProgress, BatchRecord
from trouper.web.batches.batch_record import Batch
from trouper.web.batches.batch_storage import RETRY_S, BatchStorage
from trouper.web.batches.disk_threads import on_disk
from trouper.web.batches.input_lines import InputLines, LineError, LinesInvalid, RunLine, validated
from trouper.web.batches.line_runner import LineResponse, LineRunner
from trouper.web.batches.output_lines import code_of, error_line, output_line
from trouper.web.batches.stored_files import StoredFile
from trouper.web.http.byte_budget import ByteBudget
from trouper.web.service import now

log = logging.getLogger("trouper.batches")
MAX_ATTEMPTS = 3
"""How often a request may begin without coming to an end."""
MAX_UNBEGUN = 9
"""How often it may run without an end, whether or not a model worked for it."""
CRASHED = "engine_stopped"
"""Code of a response that counts as an attempt if it is a 500: the engine crashed, perhaps by the
request. As a 503 the server leaves."""
NO_MEMORY = "out_of_memory"
"""Code of a response that counts as an attempt, and is the answer after the last one."""
MIN_ROOM = 1024
"""Bytes that must be left on disk for a request to begin, and besides its answer."""
AGAIN_S, MAX_AGAIN_S = 0.5, 30.0
"""Time until a request that was refused for the moment runs again; it doubles each time."""
LINE_COPIES = 2
"""How often a line is in memory beside its request."""
OUTCOMES = ("completed", "failed", "again")


@attrs.define
class BatchCounts:
    """What the worker has done since the server's start."""

    running: int = 0
    """Requests that run now."""
    outcomes: Counter[str] = attrs.field(factory=lambda: Counter(dict.fromkeys(OUTCOMES, 0)))


class BatchWorker:
    """Runs what is in the storage."""

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
        """`budget`: of the lines that run. `check_model` is called with a model and the owner of
        the batch, and raises `RequestFailed` for a model that is not served."""
        self.counts = BatchCounts()
        self._storage, self._runner, self._max_line_bytes = storage, runner, max_line_bytes
        self._check_model, self._budget = check_model, budget
        self._rows, self._slots = rows, trio.Semaphore(rows)
        self._exclusive = trio.Lock()
        """Held by the task that takes all slots, for two would wait for one another."""
        self._validating = trio.CapacityLimiter(1)
        self._nursery: trio.Nursery | None = None
        self._context = Context()

    @property
    def runs(self) -> bool:
        """Whether batches are run: `run` is where the server is."""
        return self._nursery is not None

    async def run(self) -> None:
        """Resume what an earlier process has left, then run what is created. Runs until it is
        cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery, self._context = nursery, copy_context()
                await self._storage.open_when_possible()
                for batch in tuple(self._storage.unended):
                    self.start(batch)
                await trio.sleep_forever()
        finally:
            self._nursery = None
            self._storage.close()

    def start(self, batch: Batch) -> None:
        """Run a batch, once. Its task does not belong to the request that created it, so it has the
        context variables of `run`."""
        if self._nursery is not None and not batch.started:
            batch.started = True
            self._context.run(self._nursery.start_soon, self._run, batch)

    async def _run(self, batch: Batch) -> None:
        """Run a batch to its end, whatever happens to the disk."""
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
        # The result says all; what was noted of 50,000 requests are megabytes.
        batch.progress = BatchProgress()

    async def _process(self, batch: Batch) -> None:
        try:
            lines = await self._validated(batch)
        except LinesInvalid as invalid:
            await self._fail(batch, invalid.errors)
            return
        batch.total = len(lines)
        if batch.status == "validating":
            await batch.record(BatchRecord(status="in_progress", at=now()))
        if batch.status == "in_progress":
            await self._run_lines(batch, lines)
        await self._finish(batch, lines)

    async def _fail(self, batch: Batch, errors: list[LineError]) -> None:
        await on_disk(self._storage.finish, batch, batch.result_of("failed", now(), errors))

    async def _validated(self, batch: Batch) -> InputLines:
        path = self._storage.files.path(batch.spec.input_file_id)
        check = partial(validated, path, batch.spec.endpoint, self._max_line_bytes)
        try:
            lines = await trio.to_thread.run_sync(check, limiter=self._validating)
        except FileNotFoundError:
            message = f"the file {batch.spec.input_file_id} is no longer there"
            raise LinesInvalid(
                [LineError("input_file_missing", message, param="input_file_id")]
            ) from None
        errors = []
        for model, line in lines.models.items() if batch.status == "validating" else ():
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
        """Run the requests that have no answer, until all have one, the batch is cancelled, or it
        expires."""
        with trio.CancelScope(
            deadline=trio.current_time() + batch.spec.expires_at - time.time()
        ) as batch.scope:
            attempts = batch.progress.attempts
            ran = [number for number in batch.unanswered() if attempts.get(number)]
            for number in sorted(ran, key=lambda number: attempts[number]):
                await self._run_alone(batch, lines, number)
            # A batch whose requests are all refused for the moment begins no others.
            begun = trio.Semaphore(self._rows)
            async with trio.open_nursery() as nursery:
                for number in batch.unanswered():
                    await begun.acquire()
                    await self._take_slot(batch)
                    nursery.start_soon(self._run_line, batch, lines, number, begun)

    async def _run_alone(self, batch: Batch, lines: InputLines, number: int) -> None:
        """Run a request that ran when the process was killed, without another request of a batch
        beside it. So the one that kills it is found, and those that only ran beside it get their
        answers."""
        await self._storage.has_room(batch.spec.owner, MIN_ROOM)
        async with self.all_slots():
            answer = await self._attempt(batch, lines, number)
        if answer is not None:
            await self._keep(batch, number, answer)

    async def _take_slot(self, batch: Batch) -> None:
        """Wait until there is room for an answer, since one that cannot be kept would be computed
        in vain, and then for a slot: keys
        that have no room hold none."""
        await self._storage.has_room(batch.spec.owner, MIN_ROOM)
        await self._slots.acquire()

    @asynccontextmanager
    async def all_slots(self) -> AsyncIterator[None]:
        """Wait until no request runs, and let none begin meanwhile."""
        async with self._exclusive:
            with ExitStack() as slots:
                for _ in range(self._rows):
                    await self._slots.acquire()
                    slots.callback(self._slots.release)
                yield

    async def _run_line(
        self, batch: Batch, lines: InputLines, number: int, begun: trio.Semaphore
    ) -> None:
        """Run a request until it has its answer. The slot that the caller has acquired is released
        while the request waits to run again."""
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
        return number in batch.progress.answered

    async def _attempt(self, batch: Batch, lines: InputLines, number: int) -> BatchRecord | None:
        """Run a request once, if there is memory for it. Returns its answer, which is to be kept;
        None: there is none, or it was run too often."""
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

    async def _attempt_now(
        self, batch: Batch, lines: InputLines, number: int
    ) -> BatchRecord | None:
        line = await on_disk(lines.read, number)
        request_id = uuid4().hex
        progress = batch.progress
        if (
            progress.begun.get(number, 0) >= MAX_ATTEMPTS
            or progress.attempts.get(number, 0) >= MAX_UNBEGUN
        ):
            times = progress.attempts[number]
            message = (
                f"the request was run {times} times, and each time the server ended before its "
                "answer"
            )
            output = error_line(request_id, line.custom_id, "request_crashes_server", message)
            await self._log_answer(batch, BatchRecord(answer=number, ok=False, output=output))
            return None
        await batch.record(BatchRecord(attempt=number))
        async with self._returned_if_cancelled(batch, number):
            response = await self._respond(batch, line, number, request_id)
            code = code_of(response) if response.status >= 500 else None
            crashed = (response.status, code) == (500, CRASHED)
            if crashed or (code == NO_MEMORY and progress.begun.get(number, 0) < MAX_ATTEMPTS):
                return None
            if response.status in (429, 503) and code != NO_MEMORY:
                await batch.record(BatchRecord(returned=number))
                return None
        output = output_line(request_id, line.custom_id, response)
        return BatchRecord(answer=number, ok=response.status < 400, output=output)

    async def _keep(self, batch: Batch, number: int, answer: BatchRecord) -> None:
        """Log an answer when there is room for it, in the log and in the output file."""
        size = 2 * len(bytes(answer.output)) + MIN_ROOM
        async with (
            self._returned_if_cancelled(batch, number),
            self._storage.reserved(batch.spec.owner, size),
        ):
            await self._log_answer(batch, answer)

    async def _log_answer(self, batch: Batch, answer: BatchRecord) -> None:
        await batch.record(answer)
        self.counts.outcomes["completed" if answer.ok else "failed"] += 1

    @asynccontextmanager
    async def _returned_if_cancelled(self, batch: Batch, number: int) -> AsyncIterator[None]:
        """An attempt that is cancelled does not count."""
        try:
            yield
        except* trio.Cancelled:
            # In the app (a group, from its nurseries) or waiting for room; appends are shielded.
            await batch.record(BatchRecord(returned=number))
            raise

    async def _respond(
        self, batch: Batch, line: RunLine, number: int, request_id: str
    ) -> LineResponse:
        begin, spec = partial(_begin, batch, number), batch.spec
        self.counts.running += 1
        try:
            return await self._runner.run(
                spec.endpoint, bytes(line.body), request_id, spec.owner, begin=begin
            )
        finally:
            self.counts.running -= 1

    # -- the end ----------------------------------------------------------------------------------

    async def _finish(self, batch: Batch, lines: InputLines) -> None:
        """Write the files and the result. After a kill in the middle, the next start writes the
        same again."""
        if batch.status == "in_progress":
            await batch.record(BatchRecord(status="finalizing", at=now()))
        cancelled = batch.status == "cancelling"
        expired = not cancelled and len(batch.progress.answered) < batch.total
        if expired:
            missing = [*batch.unanswered()]
            records = await on_disk(_expired, lines, missing)
            await batch.record(*records)
        status = "cancelled" if cancelled else "expired" if expired else "completed"
        result = batch.result_of(status, now())
        await self._write_files(batch, result.has_output, result.has_errors)
        await on_disk(self._storage.finish, batch, result)

    async def _write_files(self, batch: Batch, has_output: bool, has_errors: bool) -> None:
        spec = batch.spec
        for there, ok, file_id in (
            (has_output, True, spec.output_file_id),
            (has_errors, False, spec.error_file_id),
        ):
            if there:
                file = StoredFile(
                    id=file_id,
                    filename=f"{spec.id}_{'output' if ok else 'error'}.jsonl",
                    bytes=0,
                    purpose="batch_output",
                    created_at=now(),
                    owner=spec.owner,
                )
                await self._storage.files.put(file, batch.log.outputs(ok=ok))

    async def cancel(self, batch: Batch) -> None:
        """Cancel a batch: no request of it runs any more. Raises `OSError`."""
        if batch.status not in ("validating", "in_progress"):
            return
        try:
            await batch.record(BatchRecord(status="cancelling", at=now()))
        except OSError:
            if not batch.ended:  # It has ended meanwhile, and its log with it.
                raise
        if batch.scope is not None:
            batch.scope.cancel(reason="the batch was cancelled")


async def _begin(batch: Batch, number: int) -> None:
    """Log that a model begins to work for a request. Raises `RequestFailed` (503) if that is not on
    disk."""
    try:
        await batch.record(BatchRecord(begun=number))
    except OSError as error:
        message = f"the attempt could not be logged: {error.strerror}"
        problem = Problem(503, message, "server_error", code="batches_unavailable", retry_after_s=1)
        raise RequestFailed(problem) from error


def _expired(lines: InputLines, numbers: list[int]) -> list[BatchRecord]:
    """Errors of requests for which there was no time. Runs in a thread; raises `OSError`."""
    message = "the batch expired before this request had its answer"
    return [
        BatchRecord(
            answer=number,
            ok=False,
            output=error_line(uuid4().hex, custom_id, "batch_expired", message),
        )
        for number, custom_id in lines.custom_ids(iter(numbers))
    ]
