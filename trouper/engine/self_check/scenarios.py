"""Scenarios: short scripts of steps, each for one feature. Texts are longer than a shrunk model's
window (`shrinking.WINDOW`)."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.self_check.forced import ForcedRows
from trouper.engine.spec_decode.prompt_lookup import Drafting
from trouper.protocol.capabilities import Capabilities, Feature
from trouper.protocol.plans import BlockId, Restore, RowId, Store

LONG, MIDDLE, SHORT, SINGLE = range(4)
"""Indices of the texts."""
LENGTHS = (31, 24, 15, 8)
PROMPTS = (21, 13, 5, 1)
"""Number of prompt tokens of each text, of which the last is decoded."""
SINGLES = 3
SLACK = Drafting(tokens=2).slack
"""Rings of a shrunk model wrap within the texts."""


FIRST_BANK = 4
"""Number of tokens of the first bank in scenarios of banks."""

Script = Callable[[ForcedRows], None]


@attrs.frozen
class Scenario:
    """feature: turned off if the scenario fails. name: completes "... differ"."""

    feature: Feature
    name: str
    script: Script


def prefill_and_join(rows: ForcedRows, *texts: int) -> list[RowId]:
    """Prefill one row for each text, and let them join in one step."""
    opened = rows.open(*texts)
    for row, text in zip(opened, texts, strict=True):
        rows.step({row: PROMPTS[text] - 1})
    rows.step(joining=opened)
    return opened


def alone(rows: ForcedRows) -> None:
    """One row prefills and decodes."""
    prefill_and_join(rows, LONG)
    for _ in range(3):
        rows.step()


def odd_chunks(rows: ForcedRows) -> None:
    """One row prefills in chunks that no kernel prefers."""
    [row] = rows.open(LONG)
    for count in (5, 1, 11, 3):
        rows.step({row: count})
    rows.step(joining=[row])
    rows.step()


def decoding_together(rows: ForcedRows) -> None:
    """Prompts prefill one by one; the rows decode together, one across the window's end."""
    prefill_and_join(rows, LONG, MIDDLE, SHORT)
    for _ in range(5):
        rows.step()


def leaving(rows: ForcedRows) -> None:
    """The middle row leaves, then the first; the last takes their slots."""
    first, middle, last = prefill_and_join(rows, LONG, MIDDLE, SHORT)
    rows.leave(middle)
    rows.step()
    rows.leave(first)
    prefill_and_join(rows, SHORT)
    rows.leave(last)
    rows.step()


def joining(rows: ForcedRows) -> None:
    """A prompt runs in chunks beside a row that decodes, and then joins."""
    prefill_and_join(rows, MIDDLE)
    [second] = rows.open(SHORT)
    rows.step({second: 3})
    rows.step({second: 1}, joining=[second])
    [third] = rows.open(LONG)
    rows.step({third: 9})
    rows.step({third: 11}, joining=[third])
    rows.step()


def single_token(rows: ForcedRows) -> None:
    """A prompt of one token has no KV when joining others."""
    prefill_and_join(rows, MIDDLE)
    [second] = rows.open(SINGLE)
    rows.step(joining=[second])
    for _ in range(3):
        rows.step()


def prefill_together(rows: ForcedRows) -> None:
    """Prompts of different lengths in padded passes, beside a row that decodes."""
    [first] = rows.open(SINGLE)
    rows.step(joining=[first])
    long, middle, short = rows.open(LONG, MIDDLE, SHORT)
    rows.step({long: 9, middle: 8, short: 4})
    rows.step({long: 11, middle: 4}, joining=[short])
    rows.step(joining=[long, middle])
    rows.step()


def restored(rows: ForcedRows) -> None:
    """Blocks and a snapshot begin another row: beside the first, and alone."""
    assert isinstance(rows.rows, SlotRows)
    blocks = BlockStore(rows.rows.copies)
    snapshot = BlockId(2) if rows.rows.copies.layout.snapshot_bytes else None
    [first] = rows.open(LONG)
    rows.step({first: 18})
    blocks.store(Store(first, 0, (8, 10), (BlockId(0), BlockId(1)), snapshot))
    rows.step({first: 2})
    rows.step(joining=[first])
    again = Restore(18, (BlockId(0), BlockId(1)), snapshot=snapshot)
    second = rows.open_restored(LONG, rows.parts(first), 18)
    blocks.restore(second, again)
    rows.step({second: 2}, joining=[second])
    rows.step()
    computed = rows.parts(first)
    rows.leave(first, second)
    third = rows.open_restored(LONG, computed, 18)
    blocks.restore(third, again)
    rows.step({third: 2}, joining=[third])
    rows.step()


def drafts(rows: ForcedRows) -> None:
    """Wrong drafts are taken back, right ones kept, at different lengths."""
    first, second = prefill_and_join(rows, LONG, MIDDLE)
    rows.step(drafts={first: (0, 2)})
    rows.step(drafts={first: (1, 1), second: (0, 1)})
    rows.step(drafts={first: (2, 0), second: (1, 1)})
    rows.step()


def banks(rows: ForcedRows) -> None:
    """Rows of different banks decode together, and outgrow their banks."""
    first, *_ = prefill_and_join(rows, LONG, MIDDLE, SHORT)
    for _ in range(4):
        rows.step()
    rows.leave(first)
    prefill_and_join(rows, SHORT)
    rows.step()


BATCH = (
    Scenario("batch", "a row alone in its slot", alone),
    Scenario("batch", "a prompt in odd chunks", odd_chunks),
    Scenario("batch", "rows of different lengths that decode together", decoding_together),
    Scenario("batch", "rows whose neighbours left", leaving),
    Scenario("batch", "rows that join others", joining),
    Scenario("batch", "a row that joins others after a prompt of one token", single_token),
)
MORE = (
    # First: rows that may have banks get whole buffers where a kernel reads them, so a model that
    # computes with keys would fail in each of the others.
    Scenario("banks", "rows of different banks", banks),
    Scenario(
        "prefill_together", "prompts of different lengths in one padded pass", prefill_together
    ),
    Scenario("prefill_together", "a prompt of one token that decodes beside others", single_token),
    Scenario("restore", "rows restored from cached blocks", restored),
    Scenario("drafts", "rows that took wrong drafts back", drafts),
)
ROW_BY_ROW = (
    Scenario("batch", "a row alone", alone),
    Scenario("batch", "a prompt in odd chunks", odd_chunks),
    Scenario("batch", "rows that take turns", joining),
)

SHORT_LENGTHS = (9, 5)
"""Texts of the pass over the real model."""
SHORT_DECODED = 2
SHORT_PARTS = (5, 4)
"""Chunks of the first text's second run, for the model's error against itself."""


def short_pass(capabilities: Capabilities) -> Scenario:
    """Make a scenario of two rows, alone and then in one batch: a fault common to all tokens of a
    row, such as an offset, may not show otherwise."""

    def script(rows: ForcedRows) -> None:
        first, second = rows.open(0, 1)
        long, short = (length - SHORT_DECODED for length in SHORT_LENGTHS)
        rows.step({first: long // 2})
        remaining = {first: long - long // 2}, {second: short}
        for chunks in (
            [remaining[0] | remaining[1]] if capabilities.allows("prefill_together") else remaining
        ):
            rows.step(chunks)
        rows.step(joining=[first, second])
        for _ in range(SHORT_DECODED - 1):
            rows.step()

    return Scenario("batch", "two rows of the model itself", script)
