"""F19, F20, F24, F27, D12: ranks as processes that are killed, stopped, or wrong, over real sockets
and collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from tests.ranks.launching import environments
from tests.ranks.losses import LOSSES, STREAM, launched, lose, ranks_of, ready
from tests.ranks.models import save
from tests.test_process import PATIENCE_S, Client, stats, until
from trouper.cli import main
from trouper.system.ports import free_ports

LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("ranks") / "llama")


def test_f27_d12_ranks_are_lost_and_come_back(model: Path, tmp_path: Path) -> None:
    """Clients have their error, no process is left, and the group serves again; also when the
    launcher is killed nothing is left."""
    [port] = free_ports(1)
    with launched(
        port, "--model", str(model), "--drain-timeout-s", "0.2", "--ssd-cache-dir", str(tmp_path)
    ) as launcher:
        for rank, how, heard in LOSSES if LONG else LOSSES[:1]:
            for client in lose(launcher, port, rank, how).clients:
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
    [port] = free_ports(1)
    command = [sys.executable, "-m", "tests.ranks.diverging", "serve", "--no-ssd"]
    command += ["--model", str(model), "--port", str(port)]
    with environments(2) as each:
        processes = [
            subprocess.Popen(
                command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
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
    done = CliRunner().invoke(
        main, ["serve", "--model", str(model), "--model", "/nowhere"], env=variables
    )
    assert done.exit_code == 2
    assert "give one --model instead of 2" in done.output
