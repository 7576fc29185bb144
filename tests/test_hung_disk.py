"""File systems that do not answer (NFS, FUSE), in a real process. A FIFO in the place of a file
does the same: the thread that opens it waits for ever, and nothing can interrupt it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import trio

from tests.families import save
from tests.real.serving import ask
from tests.test_process import PATIENCE_S, Client, end, get, serving, stats, until
from trouper import Generate, Runtime, Settings, TokenPrompt, run_runtime
from trouper.protocol.setting_fields import ByteSize
from trouper.system.ports import free_ports
from trouper.web.batches.batch_table import BatchSpec, BatchState, insert_batch
from trouper.web.batches.stored_files import StoredFile, insert_file
from trouper.web.serving.state_database import FORMAT, NAME, SCHEMA

PROMPT = "a" * 200
ENDS_SOON = (
    "import trouper.cli.server_process as process; process.ENDS_S = 0.5; from trouper.cli import "
    "main; main()"
)
STALLS_SOON = (
    # A file on a disk that hangs is a regular one.
    "import trouper.storage.checkpoint_files as files; files.require_regular = lambda path: None; "
    "import trouper.actors.runtime.model_manager as manager; manager.LOOK_S = 0.1; "
    "import trouper.actors.runtime.model_table as table; "
    "table.SILENT_S, table.STALLED_S = 0.3, 0.6; "
    f"{ENDS_SOON}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save("llama", directory)
    return directory


def directory_stats(port: int) -> dict[str, Any]:
    return dict(get(port, "/health")[1]["directory"])


async def write_blocks(model: Path, ssd: Path) -> None:
    """Leave on disk what a server keeps of `PROMPT`. In this process: nothing hangs yet."""
    settings = Settings(model=str(model), ssd_cache_dir=ssd, ssd_keep_free=ByteSize(0))
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(run_runtime, settings)
        prompt = TokenPrompt(runtime.tokenizer.encode(PROMPT))
        await ask(runtime, Generate(request_id="", prompt=prompt, max_tokens=2))
        await runtime.drain(PATIENCE_S)


@contextmanager
def hung(model: Path, port: int, ssd: Path) -> Iterator[Popen[str]]:
    """A server whose disk hangs in a read, for which a request waits."""
    trio.run(write_blocks, model, ssd)
    with serving(model, port, "--drain-timeout-s", "0.3", ssd=ssd) as process:
        # What a start looks at has been looked at.
        until(lambda: directory_stats(port)["inspected"] > 0)
        runs = list(ssd.rglob("*.safetensors"))
        assert runs
        for path in runs:
            path.unlink()
            os.mkfifo(path)
        Client(port, prompt=PROMPT, max_tokens=2)
        until(lambda: stats(port)["queued_requests"] == 1)
        yield process


@contextmanager
def read_without_end(fifo: Path) -> Iterator[None]:
    """Begins when the FIFO is being read."""
    opened: list[int] = []

    def is_read() -> bool:
        with suppress(OSError):  # ENXIO: nobody reads it.
            opened.append(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
        return bool(opened)

    until(is_read)
    try:
        yield
    finally:
        os.close(opened[0])


@pytest.mark.long
def test_sigterm_ends_a_server_whose_disk_hangs(model: Path, tmp_path: Path) -> None:
    [port] = free_ports(1)
    with hung(model, port, tmp_path / "blocks") as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "requests finished: 0, cut off: 1 " in errors, "the log is written to its end"


def test_a_model_is_unloaded_although_its_disk_hangs(model: Path, tmp_path: Path) -> None:
    [port] = free_ports(1)
    with hung(model, port, tmp_path / "blocks") as process:
        with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as connection:
            body = json.dumps({"force": True})
            connection.request(
                "POST", "/v1/models/unload", body, {"Content-Type": "application/json"}
            )
            with connection.getresponse() as response:
                assert response.status == 200
        again = Client(port, prompt=PROMPT, max_tokens=2)
        again.join(PATIENCE_S)
        assert again.status == 200, again.text
        assert end(process, signal.SIGTERM) == 0


def test_sigterm_ends_a_server_whatever_hangs(model: Path, tmp_path: Path) -> None:
    """Here it is the input of a batch."""
    batch = BatchSpec(
        id="batch_1",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created_at=1,
        expires_at=2**33,
        output_file_id="file-2",
        error_file_id="file-3",
    )
    file = StoredFile(id="file-1", filename="f", bytes=0, purpose="batch", created_at=1)
    (files := tmp_path / "batches" / "files").mkdir(parents=True)
    with closing(sqlite3.connect(tmp_path / "batches" / NAME)) as connection:
        connection.executescript(f"{SCHEMA} PRAGMA user_version = {FORMAT};")
        insert_batch(connection, batch, BatchState())
        insert_file(connection, file)
        connection.commit()
    os.mkfifo(fifo := files / "file-1")
    [port] = free_ports(1)
    flags = ("--batch-dir", str(tmp_path / "batches"), "--drain-timeout-s", "0.3")
    with serving(model, port, *flags, run=ENDS_SOON) as process, read_without_end(fifo):
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert "threads that still run: " in errors and "BatchWorker._run" in errors


def test_models_are_loaded_beside_one_whose_files_do_not_answer(
    model: Path, tmp_path: Path
) -> None:
    """Its headers are read, and so it is being loaded when it hangs."""
    hung, other = tmp_path / "hung", tmp_path / "other"
    for directory in (hung, other):
        shutil.copytree(model, directory)
    (fifo := hung / "tokenizer.json").unlink()
    os.mkfifo(fifo)
    [port] = free_ports(1)
    flags = ("--model", str(hung), "--model", str(other), "--drain-timeout-s", "0.3")
    with serving(model, port, *flags, run=STALLS_SOON) as process, read_without_end(fifo):
        for name in (model, other):
            client = Client(port, model=str(name), prompt="a", max_tokens=2)
            client.join(PATIENCE_S)
            assert client.status == 200, client.text
        refused = Client(port, model=str(hung), prompt="a", max_tokens=2)
        refused.join(PATIENCE_S)
        assert (
            refused.status == 503
            and "model_load_stalled" in refused.text
            and str(hung) in refused.text
        )
        [listed] = [
            entry for entry in get(port, "/v1/models")[1]["data"] if entry["id"] == str(hung)
        ]
        assert listed["state"] == "loading" and "no progress" in listed["problem"]
        assert end(process, signal.SIGTERM) == 0
