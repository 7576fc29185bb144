"""What a row costs the core in a plain decode step, counted in bytecodes: the event loop runs this
for each token of each stream, before the token is delivered."""

from __future__ import annotations

import statistics

import pytest

from tests.core.driving import DrivenCore, bytecodes_of_steps
from tests.core.worlds import check_kv_usage, check_storing
from tests.fakes import CUTTABLE, UNCUTTABLE
from trouper.protocol.kv import KvLayout

FEW, MANY = 16, 48
STEPS = 100
"""In these every row counts otherwise for memory once or never, and none stores anything."""


def step_bytecodes(rows: int, kv: KvLayout, speculation: str) -> float:
    core = DrivenCore(
        kv, disk=False, viewed=False, completion_batch_size=rows, speculation=speculation
    )
    for seed in range(rows):
        core.arrive(60, max_tokens=400, seed=seed)
    core.until_decoding()
    for _ in range(20):
        core.step()
    return statistics.mean(bytecodes_of_steps(core, STEPS))


@pytest.mark.parametrize("kv", [CUTTABLE, UNCUTTABLE], ids=["cuttable", "snapshots"])
@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_a_row_costs_a_step_little(kv: KvLayout, speculation: str) -> None:
    """On Python 3.11 about 340; 560 to 620 when each row was counted for memory, asked for what it
    stores and drafts, and looked through for its state, in each step."""
    few, many = (step_bytecodes(rows, kv, speculation) for rows in (FEW, MANY))
    assert (many - few) / (MANY - FEW) < 380


@pytest.mark.parametrize("kv", [CUTTABLE, UNCUTTABLE], ids=["cuttable", "snapshots"])
def test_what_is_kept_of_a_row_is_what_would_be_found_anew(kv: KvLayout) -> None:
    """What it counts for memory, and that it has nothing to store. While answers grow past the ends
    of banks, capacities and snapshots, with one plan in flight or two."""
    core = DrivenCore(kv, disk=False, viewed=False, completion_batch_size=3)
    for seed in range(3):
        core.arrive(100 + 150 * seed, max_tokens=1500, seed=seed)
    core.until_decoding()
    kept = due = 0
    for _ in range(1000):
        core.step()
        core.plan_ahead()
        for row in core.core._batch.rows.values():
            kept += row.num_scheduled_tokens < row.kv_usage_until
            check_kv_usage(core.core, row)
            due += row.num_output_tokens >= row.stores_from
            check_storing(core.core, row)
    assert kept > 2500 and due < 500
