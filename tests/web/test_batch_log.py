"""The log of a batch: what is on disk when an append returns, what a kill leaves, and what a disk
without room does."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import msgspec
import pytest
import trio

from trouper.web.batches.answer_log import AnswerLog, BatchProgress, BatchRecord


def answer(number: int, text: str = "x", *, ok: bool = True) -> BatchRecord:
    return BatchRecord(
        answer=number, ok=ok, output=msgspec.Raw(json.dumps({"text": text}).encode())
    )


def opened(path: Path) -> tuple[AnswerLog, BatchProgress]:
    log, progress = AnswerLog(path), BatchProgress()
    for record in log.open():
        progress.add(record)
    return log, progress


async def test_each_prefix_of_a_log_is_one(tmp_path: Path) -> None:
    """A kill leaves any number of its bytes. What is whole counts, and the next append comes behind
    it."""
    log, _ = opened(tmp_path / "log")
    records = [BatchRecord(attempt=0), answer(0, "ä"), BatchRecord(attempt=1), answer(1, ok=False)]
    ends = [0]
    for record in records:
        await log.append(record)
        ends.append(log.bytes)
    log.close()
    data = (tmp_path / "log").read_bytes()
    for size in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:size])
        cut, progress = opened(path)
        whole = max(n for n, end in enumerate(ends) if end <= size)
        assert progress.answered == {
            record.answer for record in records[:whole] if record.answer is not None
        }
        assert progress.attempts == ({} if whole in (0, 2, 4) else {0: 1} if whole == 1 else {1: 1})
        assert progress.failed == (whole == 4)
        await cut.append(answer(7))
        cut.close()
        again, progress = opened(path)
        assert 7 in progress.answered
        assert b"".join(again.outputs(ok=True)).endswith(b'{"text": "x"}\n')
        again.close()


async def test_an_append_returns_when_it_is_synced_and_waiting_ones_are_synced_together(
    tmp_path: Path,
) -> None:
    sizes: list[int] = []
    log = AnswerLog(tmp_path / "log", sync=lambda fd: sizes.append(os.fstat(fd).st_size))
    assert [*log.open()] == []
    seen: list[tuple[int, int]] = []

    async def append(number: int) -> None:
        await log.append(answer(number))
        seen.append((number, sizes[-1]))

    async with trio.open_nursery() as nursery:
        for number in range(50):
            nursery.start_soon(append, number)
    assert len(seen) == 50 and len(sizes) <= 3
    assert sizes[-1] == log.bytes == (tmp_path / "log").stat().st_size
    log.close()


async def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    full = False

    def sync(_: int) -> None:
        if full:
            raise OSError(errno.ENOSPC, "no room")

    log = AnswerLog(tmp_path / "log", sync=sync)
    assert [*log.open()] == []
    await log.append(answer(0))
    before, full = log.bytes, True
    with pytest.raises(OSError, match="no room"):
        await log.append(answer(1))
    assert (tmp_path / "log").stat().st_size == log.bytes == before
    full = False
    await log.append(answer(2))
    log.close()
    again, progress = opened(tmp_path / "log")
    assert progress.answered == {0, 2}
    again.close()


async def test_a_cancelled_append_is_written(tmp_path: Path) -> None:
    log, _ = opened(tmp_path / "log")
    with trio.CancelScope() as scope:
        scope.cancel()
        await log.append(BatchRecord(returned=0))
    log.close()
    assert (tmp_path / "log").read_bytes() == b'{"returned":0}\n'


async def test_a_request_has_one_line_in_the_files_even_if_the_log_had_two_answers(
    tmp_path: Path,
) -> None:
    log, _ = opened(tmp_path / "log")
    await log.append(answer(0, "first"), answer(0, "second"), answer(1, "error", ok=False))
    assert [*log.outputs(ok=True)] == [b'{"text": "first"}\n']
    assert [*log.outputs(ok=False)] == [b'{"text": "error"}\n']
    log.close()


def test_an_attempt_that_was_returned_does_not_count() -> None:
    progress = BatchProgress()
    for record in (
        BatchRecord(attempt=3),
        BatchRecord(attempt=3),
        BatchRecord(returned=3),
        BatchRecord(returned=4),
    ):
        progress.add(record)
    assert progress.attempts == {3: 1, 4: 0}
