"""The file of keys on a file system that does not answer. A FIFO in its place does the same: the
thread that opens it waits for a writer."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from tests.web.serving import eventually, exchange, get, serving
from tests.web.test_key_rights import bearer, key_file, known
from tests.web.test_memory import without_threads
from trouper import ServerSettings, SettingsInvalid
from trouper.protocol.api_keys import Keys
from trouper.web.keys.key_file import ANSWER_S, KeyFile, require_keys

TEXT = "sk-one observability=true\n"


def hang(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


async def is_opened(file: Path) -> int:
    """The writing end of a FIFO, once it is being read."""
    opened: list[int] = []

    def look() -> bool:
        with suppress(OSError):  # ENXIO: nobody reads it.
            opened.append(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    await eventually(look)
    return opened[0]


async def test_the_keys_stay_and_nobody_waits_twice(
    tmp_path: Path, autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock jumps to the limit, since a thread counts as nothing that goes on."""
    file = key_file(tmp_path, TEXT)
    keys = Keys.of(ServerSettings(api_key_file=file))
    looking = KeyFile(keys)
    hang(file)
    for now in range(3):
        await looking.look(now)
        assert trio.current_time() == pytest.approx(ANSWER_S), "the thread that hangs is left alone"
        assert known(keys, "sk-one") == [True]
    assert keys.stale == f"--api-key-file {file} does not answer"
    assert caplog.text.count("does not answer") == 1
    os.close(os.open(file, os.O_WRONLY))


async def test_a_file_that_answers_again_is_read(tmp_path: Path) -> None:
    file = key_file(tmp_path, TEXT)
    keys = Keys.of(ServerSettings(api_key_file=file))
    looking = KeyFile(keys, answer_s=0.01)
    hang(file)
    await looking.look(0)
    assert keys.stale
    looking._answer_s = 60
    writer = await is_opened(file)
    file.unlink()
    file.write_text("sk-two\n")
    os.close(writer)
    await eventually(lambda: looking._thread.available_tokens == 1)
    await looking.look(1)
    assert (known(keys, "sk-one", "sk-two"), keys.stale) == ([False, True], "")


async def test_without_threads_the_keys_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = key_file(tmp_path, TEXT)
    keys = Keys.of(ServerSettings(api_key_file=file))
    looking = KeyFile(keys)
    file.write_text("sk-two\n")
    with monkeypatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", without_threads)
        await looking.look(0.0)
    assert known(keys, "sk-one", "sk-two") == [True, False]
    await looking.look(10.0)
    assert known(keys, "sk-one", "sk-two") == [False, True]


async def test_a_start_is_refused_by_name(tmp_path: Path, autojump_clock: object) -> None:
    os.mkfifo(file := tmp_path / "keys")
    with pytest.raises(SettingsInvalid, match=r"--api-key-file .* does not answer within 5 s"):
        await require_keys(ServerSettings(api_key_file=file))
    os.close(os.open(file, os.O_WRONLY))


async def test_other_requests_are_answered_meanwhile(tmp_path: Path) -> None:
    file = key_file(tmp_path, TEXT)
    async with serving(api_key_file=file) as served, trio.open_nursery() as nursery:
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await exchange(served, get("/v1/models", bearer("sk-one"))))[0])

        hang(file)
        nursery.start_soon(ask)
        writer = await is_opened(file)
        await ask()
        assert answers == [200]
        file.unlink()
        file.write_text(TEXT)
        os.write(writer, TEXT.encode())
        os.close(writer)
    assert answers == [200, 200]


async def test_health_says_why_the_keys_are_not_those_of_the_file(tmp_path: Path) -> None:
    file = key_file(tmp_path, TEXT)
    async with serving(api_key_file=file) as served:
        found: dict[str, str] = {}

        async def health() -> dict[str, str]:
            found.update(json.loads((await exchange(served, get("/health", bearer("sk-one"))))[2]))
            return found

        assert "api_key_file" not in await health()
        file.write_text("sk-one colour=red\n")
        with trio.fail_after(60):
            while "api_key_file" not in await health():  # noqa: ASYNC110
                await trio.sleep(0.05)
        assert "colour" in found["api_key_file"]


async def test_a_key_on_two_lines_is_refused(tmp_path: Path) -> None:
    """The later line's name and limits counted, without a word."""
    file = tmp_path / "keys"
    file.write_text("# x\nsk-one name=x\n\nsk-one name=y\n")
    file.chmod(0o600)
    with pytest.raises(SettingsInvalid, match="lines 2 and 4 are of the same key"):
        await require_keys(ServerSettings(api_key_file=file))


async def test_keys_that_come_through_a_pipe_are_read_once_and_kept() -> None:
    """`--api-key-file <(...)`: the start reads the file before anything else, and again for the
    server."""
    reading, writing = os.pipe()
    os.write(writing, TEXT.encode())
    os.close(writing)
    try:
        settings = ServerSettings(api_key_file=Path(f"/dev/fd/{reading}"))
        await require_keys(settings)
        keys = Keys.of(settings)
        assert known(keys, "sk-one", "sk-two") == [True, False]
        await KeyFile(keys).look(0)
        assert (known(keys, "sk-one"), keys.stale) == ([True], "")
    finally:
        os.close(reading)
