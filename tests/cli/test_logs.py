"""Where the log goes and how it reads: for a person at a terminal, for a machine elsewhere."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import pytest
from rich.console import Console

from trouper.cli import exits
from trouper.cli.exits import give_up, refuse
from trouper.cli.log_setup import (
    BackgroundHandler,
    Format,
    JsonLines,
    LineWriter,
    configure_logging,
    name_request,
)
from trouper.protocol.logs import CURRENT_REQUEST, FIELDS, REQUEST_ID

logger = logging.getLogger("trouper.tests")


@contextmanager
def configured(form: Format, level: str, *, terminal: bool) -> Iterator[None]:
    """As the command does it, for a while: `basicConfig` does nothing where handlers are, and
    pytest's are."""
    root, ours = logging.getLogger(), logging.getLogger("trouper")
    before, levels = root.handlers[:], (root.level, ours.level)
    root.handlers.clear()
    try:
        configure_logging(
            level,
            Console(file=sys.stderr, force_terminal=terminal, width=200, color_system=None),
            form,
        )
        yield
    finally:
        root.handlers[0].flush()
        root.handlers[:] = before
        root.setLevel(levels[0])
        ours.setLevel(levels[1])


def written(
    capsys: pytest.CaptureFixture[str], form: Format, *, terminal: bool, level: str = "info"
) -> str:
    with configured(form, level, terminal=terminal):
        logger.debug("nobody wants to know")
        logger.info("a line with %d", 2, extra={REQUEST_ID: "abc", FIELDS: {"tokens": 3}})
        logger.info("another\nline")
        logging.getLogger("hypercorn").info("not ours")
    return capsys.readouterr().err


@pytest.mark.parametrize(("form", "terminal"), [("auto", False), ("json", False), ("json", True)])
def test_a_machine_reads_a_line_of_json_for_each_record(
    capsys: pytest.CaptureFixture[str], form: Format, terminal: bool
) -> None:
    first, second = map(json.loads, written(capsys, form, terminal=terminal).splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "trouper.tests",
        "message": "a line with 2",
        "request_id": "abc",
        "tokens": 3,
    }
    assert second["message"] == "another\nline"
    assert "request_id" not in second


@pytest.mark.parametrize(("form", "terminal"), [("auto", True), ("human", True), ("human", False)])
def test_a_person_reads_text(
    capsys: pytest.CaptureFixture[str], form: Format, terminal: bool
) -> None:
    first, *_ = written(capsys, form, terminal=terminal).splitlines()
    assert "a line with 2 [abc]" in first
    assert ("INFO trouper.tests:" in first) == (not terminal)


def test_the_level_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nobody wants to know" in written(capsys, "human", terminal=False, level="debug")
    assert not written(capsys, "human", terminal=False, level="error")


def test_a_record_names_the_current_request_and_keeps_its_own_name() -> None:
    token = CURRENT_REQUEST.set("current")
    try:
        for extra, named in (({}, "current"), ({REQUEST_ID: "its own"}, "its own")):
            record = logger.makeRecord(
                "trouper", logging.INFO, "", 1, "text", (), None, extra=extra
            )
            name_request(record)
            assert json.loads(JsonLines().format(record))[REQUEST_ID] == named
    finally:
        CURRENT_REQUEST.reset(token)


def test_whoever_does_not_read_the_log_holds_nobody_up() -> None:
    """A pipe takes 64 KiB; what comes then waits, and what has no place is counted. When it is read
    it goes on."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as writer:
        handler = BackgroundHandler(LineWriter(JsonLines(), writer), lines=5)
        for number in range(100):
            handler.handle(logging.makeLogRecord({"msg": f"{number} " + "x" * 5000}))
        read = 0
        while read < 94:  # So many at most were taken: 5 that wait, one that is being written.
            line = json.loads(reader.readline())
            handler.handle(logging.makeLogRecord({"msg": "last"}))
            if "dropped" in line:
                break
            read += 1
        assert (
            line["message"] == f"{line['dropped']} lines of the log were dropped: nobody read them"
        )
        assert (line["level"], line["logger"]) == ("warning", "trouper")
        threading.Thread(target=reader.read, daemon=True).start()
        handler.flush()


def test_what_a_record_is_made_of_may_change_before_it_is_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with configured("json", "info", terminal=False):
        parts = ["one"]
        logger.info("parts: %s", parts)
        parts.append("two")
    assert json.loads(capsys.readouterr().err)["message"] == "parts: ['one']"


@pytest.mark.parametrize(("form", "terminal"), [("json", False), ("human", False), ("human", True)])
def test_a_traceback_is_shown_whoever_writes_it(
    capsys: pytest.CaptureFixture[str], form: Format, terminal: bool
) -> None:
    with configured(form, "info", terminal=terminal):
        try:
            raise KeyError("missing")
        except KeyError:
            logger.exception("it failed")
    said = capsys.readouterr().err
    assert "it failed" in said
    assert "Traceback" in said
    assert "KeyError" in said


@pytest.mark.parametrize("end", [give_up, refuse])
def test_the_last_line_of_a_server_comes_after_its_log(
    end: Callable[[str], NoReturn],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The log has a thread of its own: in CI the traceback of the last crash came after the line
    that says it."""
    monkeypatch.setattr(exits, "end_at_once", sys.exit)
    may_write = threading.Event()

    def write(record: logging.LogRecord) -> None:
        may_write.wait()
        sys.stderr.write(f"{record.getMessage()}\n")

    class Flushed(BackgroundHandler):
        def flush(self) -> None:
            may_write.set()
            super().flush()

    handler, root = Flushed(write), logging.getLogger()
    root.addHandler(handler)
    try:
        logging.getLogger("trouper.test").error("the last crash")
        with pytest.raises(SystemExit):
            end("crashed 4 times")
    finally:
        may_write.set()
        root.removeHandler(handler)
    assert capsys.readouterr().err.splitlines() == ["the last crash", "trouper: crashed 4 times"]


def test_no_word_of_a_client_begins_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor moves the cursor of a terminal; a traceback has its lines."""
    for terminal in (False, True):
        with configured("human", "info", terminal=terminal):
            name = "a\r\n2026-01-01 INFO trouper: forged\x1b[2J\u2028\u202ea"
            logger.warning("no model is named %s", name)
        shown = capsys.readouterr().err
        assert r"a\r\n2026-01-01 INFO trouper: forged\x1b[2J\u2028\u202ea" in shown
        assert len(shown.splitlines()) == 1
