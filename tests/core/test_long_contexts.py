"""What a step of the scheduler costs does not grow with the context: counted in bytecodes and in
bytes, not in seconds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest

from tests.core.driving import DrivenCore, bytecodes_of_steps
from tests.core.step_bytes import KV, STEPS, decoding
from tests.fakes import CUTTABLE, UNCUTTABLE
from trouper.protocol.kv import KvLayout

SHORT, LONG = 1024, 102_400
"""Equal parts of a block, of the interval of snapshots and of a chunk lie behind both."""
LARGE = KvLayout(token_bytes=147_456)
"""KV of a 4B model: a run on disk has three blocks, and the chain of a long prompt hundreds of
runs."""
KEPT_BYTES = 16_384
"""What a step may allocate more beside a long context: a fiftieth of its tokens."""


def bytes_of_steps(kv: str, length: int) -> list[int]:
    """Most bytes that each step had allocated at a time, measured in another process."""
    command = [sys.executable, "-m", "tests.core.step_bytes", kv, str(length)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [int(peak) for peak in json.loads(printed)]


@pytest.mark.parametrize("name", KV)
@pytest.mark.long(but=("snapshots",))
def test_a_decode_step_costs_the_same_behind_a_long_prompt(name: str) -> None:
    """Over 600 steps, in which tails and snapshots are stored and written."""
    short, long = (
        sum(bytecodes_of_steps(decoding(length, KV[name]), STEPS)) for length in (SHORT, LONG)
    )
    assert long <= 1.02 * short
    small, large = (bytes_of_steps(name, length) for length in (SHORT, LONG))
    assert len(small) == len(large) == STEPS
    assert statistics.median(large) <= statistics.median(small) + 1024
    grown = [peak for peak in large if peak > max(small) + KEPT_BYTES]
    assert len(grown) <= 2, "only the sequence's own array of tokens grows, now and then"


@pytest.mark.parametrize(
    "kv", [CUTTABLE, UNCUTTABLE, LARGE], ids=["cuttable", "snapshots", "large"]
)
@pytest.mark.long(but=("cuttable", "snapshots"))
def test_a_chunk_costs_the_same_late_in_a_long_prompt(kv: KvLayout) -> None:
    core = DrivenCore(kv, prefill_step_size=512)
    core.arrive(LONG)
    counts = []
    while not core.core._batch.decoding:
        counts += bytecodes_of_steps(core, 1)
    early, late = statistics.median(counts[10:30]), statistics.median(counts[-30:-10])
    assert late <= 1.02 * early


def test_a_step_costs_the_same_while_a_long_prompt_is_written_to_disk() -> None:
    short, long = (
        bytecodes_of_steps(decoding(length, LARGE, settled=2), 25) for length in (10_240, LONG)
    )
    assert statistics.median(long) <= 1.05 * statistics.median(short)


@pytest.mark.parametrize("shared", [0, 900], ids=["for a row", "for a prefix"])
def test_a_long_prompt_that_waits_costs_a_step_nothing_more(shared: int) -> None:
    counts = []
    for length in (SHORT, LONG):
        core = DrivenCore(completion_batch_size=2 if shared else 1, prefill_step_size=16)
        first = core.arrive(2000, max_tokens=4000)
        for _ in range(10):
            core.step()
        core.arrive(length, seed=1, prefix=first.prompt[:shared])
        for _ in range(3):
            core.step()
        assert core.core.waiting == 1
        counts.append(sum(bytecodes_of_steps(core, 20)))
        assert core.core.waiting == 1
    assert counts[1] <= 1.02 * counts[0]
