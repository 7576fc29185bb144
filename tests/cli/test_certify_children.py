"""Processes that `trouper certify` starts end with it, however it ends, and with their section."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.families import save

PATIENCE_S = 60.0
RUNNING = """
import sys, threading, time
from pathlib import Path
from trouper_lab.certify.processes import child_processes
from trouper_lab.certify.processes import program_rows
from trouper_lab.certify.server_runs import ServerStarter
model, scratch = sys.argv[1:]
with child_processes() as children:
    starter = ServerStarter(model, Path(scratch), children)
    rows = program_rows(children, "families", {"jobs": [["llama", "", "float32"]] * 1000}, 600)
    with starter.trouper("--no-ssd"), starter.mlx_lm(model, 1, 600):
        next(rows)
        print(*(process.pid for process in children.running), flush=True)
        time.sleep(600)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("model") / "tiny-llama")


@pytest.mark.long
def test_killed_it_leaves_neither_servers_nor_programs(model: Path, tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", RUNNING, str(model), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    children: list[psutil.Process] = []
    try:
        assert owner.stdout is not None
        children = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(children) == 3
        owner.send_signal(signal.SIGKILL)
        _, left = psutil.wait_procs(children, PATIENCE_S)
        assert left == []
    finally:
        owner.kill()
        owner.communicate()
        for child in children:
            if child.is_running():
                child.kill()
