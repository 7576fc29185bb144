"""F19, F20, F24, F27, D12: ranks as processes that are killed, stopped, or wrong, over real sockets and collectives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from tests.ranks.launching import environments
from tests.ranks.models import save
from tests.test_process import PATIENCE_S, Client, free_port, get, stats, until
from trouper.cli import main

LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))
LOSSES = (
    (1, signal.SIGKILL, '"error"'),
    (1, signal.SIGSTOP, "rank 1: it has been silent for 4 s (--rank-timeout-s)"),
    (0, signal.SIGKILL, ""),
)
"""A rank, what becomes of it, and what its clients hear; of rank 0 itself only that the connection ends."""
STREAM = {"prompt": "hello", "max_tokens": 1900, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("ranks") / "llama")


def ready(port: int) -> bool:
    with suppress(OSError, json.JSONDecodeError):
        return get(port, "/readyz")[0] == 200
    return False


def ranks_of(launcher: psutil.Process) -> dict[int, psutil.Process]:
    found = {}
    for child in launcher.children(recursive=True):
        with suppress(psutil.Error, KeyError):
            found[int(child.environ()["MLX_RANK"])] = child
    return found


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def launched(model: Path, port: int, *flags: str) -> Iterator[psutil.Process]:
    command = [sys.executable, "-m", "trouper", "launch", "-n", "2", "--backend", "ring", "--"]
    command += ["serve", "--model", str(model), "--port", str(port), *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True) as started:
        launcher = psutil.Process(started.pid)
        try:
            until(lambda: ready(port))
            yield launcher
        finally:
            left = [launcher, *launcher.children(recursive=True)] if launcher.is_running() else []
            for process in left:
                with suppress(psutil.Error):
                    process.kill()


def lose(launcher: psutil.Process, port: int, rank: int, how: signal.Signals) -> list[Client]:
    """In the middle of streams; what their clients heard."""
    before = ranks_of(launcher)
    clients = [Client(port, **STREAM) for _ in range(3)]
    said = stats(port)["tokens_generated"]
    until(lambda: stats(port)["tokens_generated"] > said + 10)
    before[rank].send_signal(how)
    for client in clients:
        client.join(PATIENCE_S)
        assert not client.is_alive()
    until(lambda: not any(map(alive, before.values())))
    until(lambda: ready(port))
    assert set(ranks_of(launcher)) == {0, 1}
    answer = Client(port, prompt="b", max_tokens=4)
    answer.join(PATIENCE_S)
    assert answer.status == 200, "the group is back"
    return clients


def test_f27_d12_ranks_are_lost_and_come_back(model: Path, tmp_path: Path) -> None:
    """Clients have their error, no process is left, and the group serves again; also when the launcher is killed nothing
    is left."""
    port = free_port()
    with launched(model, port, "--drain-timeout-s", "0.2", "--ssd-cache-dir", str(tmp_path)) as launcher:
        for rank, how, heard in LOSSES if LONG else LOSSES[:1]:
            for client in lose(launcher, port, rank, how):
                assert "[DONE]" not in client.text
                assert heard in client.text, client.text[-300:]
        leave_orphans(launcher, port)


def leave_orphans(launcher: psutil.Process, port: int) -> None:
    """The launcher itself is killed: its ranks see that, drain and end."""
    ranks = ranks_of(launcher)
    client = Client(port, **STREAM)
    said = stats(port)["tokens_generated"]
    until(lambda: stats(port)["tokens_generated"] > said + 4)
    launcher.kill()
    client.join(PATIENCE_S)
    assert client.failed
    _, left = psutil.wait_procs(ranks.values(), PATIENCE_S)
    assert left == []


def test_f20_f24_a_rank_that_dropped_a_row_early_is_named_and_does_not_hang(model: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.ranks.diverging", "serve", "--no-ssd"]
    command += ["--model", str(model), "--port", str(port)]
    with environments(2) as each:
        processes = [
            subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for own in each
        ]
        try:
            until(lambda: ready(port))
            clients = [Client(port, **STREAM) for _ in range(2)]
            for client in clients:
                client.join(PATIENCE_S)
                assert "rank 1 differs at step" in client.text
                assert "its rows are not what the plan expects" in client.text
            assert [process.wait(PATIENCE_S) for process in processes] == [75, 75]
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def test_several_models_are_refused_by_name(model: Path) -> None:
    variables = {"MLX_RANK": "0", "MLX_HOSTFILE": "/dev/null"}
    done = CliRunner().invoke(main, ["serve", "--model", str(model), "--model", "/nowhere"], env=variables)
    assert done.exit_code == 2
    assert "give one --model instead of 2" in done.output
