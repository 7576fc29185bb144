"""What a row costs the core in a plain decode step, counted in bytecodes: the event loop runs this for each token of each stream, before
the token is delivered."""

from __future__ import annotations

import statistics

import pytest

from tests.core.driving import DrivenCore, bytecodes_of_steps
from tests.fakes import CUTTABLE, UNCUTTABLE
from trouper.protocol.kv import KvLayout

FEW, MANY = 16, 48
STEPS = 100
"""In these every row grows out of its place for memory once or never, and none stores anything."""


def step_bytecodes(rows: int, kv: KvLayout, speculation: str) -> float:
    core = DrivenCore(kv, disk=False, viewed=False, completion_batch_size=rows, speculation=speculation)
    for seed in range(rows):
        core.arrive(60, max_tokens=400, seed=seed)
    core.until_decoding()
    for _ in range(20):
        core.step()
    return statistics.mean(bytecodes_of_steps(core, STEPS))


@pytest.mark.parametrize("kv", [CUTTABLE, UNCUTTABLE], ids=["cuttable", "snapshots"])
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_a_row_costs_a_step_little(kv: KvLayout, speculation: str) -> None:
    """On Python 3.11 about 340; 560 to 620 when each row was counted for memory, asked for what it stores and drafts, and looked through for
    its state, in each step."""
    few, many = (step_bytecodes(rows, kv, speculation) for rows in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < 380
