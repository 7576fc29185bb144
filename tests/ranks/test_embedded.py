"""R8: the embedded model at three ranks, as docs/several-machines.md starts it: 9 heads and 3 KV
heads divide by 3."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import psutil
import pytest

from tests.engine.driver import GREEDY
from tests.engine.naive import generate
from tests.family_configs import LONG
from tests.model.test_smollm import smollm
from tests.ranks.losses import ranks_of
from tests.test_process import PATIENCE_S, Client
from trouper.engine.platform import device
from trouper.system.ports import free_ports

TOKENS = 7


@pytest.mark.skipif(
    not LONG,
    reason=(
        "a long test: tiny models at three ranks are in test_parity.py, their losses in "
        "test_losses.py"
    ),
)
@pytest.mark.skipif(not device.is_cpu(), reason="float32 is the reference, and that is for CPUs")
def test_r8_f27_it_answers_as_at_one_rank_and_a_loss_is_one_line_of_each() -> None:
    """Through HTTP, the same greedy tokens. Then rank 2 is killed: the ring breaks for rank 1,
    which says whose loss it is, without a traceback, and ends as rank 0 does."""
    prompt = smollm().tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    wanted, certain = generate(smollm().model, prompt, GREEDY, TOKENS)
    assert certain, "ranks add in another order"
    [port] = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "trouper",
        "launch",
        "-n",
        "3",
        "--backend",
        "ring",
        "--restarts",
        "0",
        "--",
    ]
    command += ["serve", "--port", str(port), "--no-ssd"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            assert launcher.stdout is not None
            assert any("is ready at" in line for line in launcher.stdout)
            client = Client(port, prompt=list(prompt), max_tokens=TOKENS, return_token_ids=True)
            client.join(PATIENCE_S)
            [choice] = json.loads(client.text)["choices"]
            assert (choice["token_ids"], choice["text"]) == (
                wanted,
                "The capital of France is Paris.",
            )
            ranks_of(psutil.Process(launcher.pid))[2].send_signal(signal.SIGKILL)
            said, _ = launcher.communicate(timeout=PATIENCE_S)
        finally:
            launcher.terminate()
    assert launcher.returncode == 75, said
    assert "the group of ranks ends: rank 2: its connection ended" in said
    assert said.count("rank 1 ends: rank 2: its connection ended") == 1, said
    assert "Traceback" not in said
