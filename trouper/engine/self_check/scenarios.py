"""Scenarios: short scripts of steps, each for one feature. Texts are longer than a shrunk model's
window (`shrinking.WINDOW`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.rows import Rows
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.self_check.accuracy import Reference, errors
from trouper.engine.spec_decode.prompt_lookup import Drafting
from trouper.protocol.capabilities import Capabilities, Feature
from trouper.protocol.plans import BlockId, Restore, RowId, Store


@attrs.define
class ForcedRow:
    """A row with a fixed text. text: index in the reference. parts: number of tokens of each
    pass."""

    text: int
    parts: list[int]

    @property
    def fed(self) -> int:
        return sum(self.parts)


@attrs.frozen(eq=False)
class Taken:
    """Logits (vocabulary,) after a row's token at `position`."""

    text: int
    position: int
    parts: tuple[int, ...]
    logits: mx.array


class ForcedRows:
    """Rows with forced tokens, called in the order of `StepEngine`."""

    def __init__(self, rows: Rows, texts: Sequence[Sequence[int]]) -> None:
        self.rows, self._texts = rows, texts
        self._forced: dict[RowId, ForcedRow] = {}
        self.taken: list[Taken] = []

    def open(self, *texts: int) -> list[RowId]:
        self.rows.make_room([len(self._texts[text]) // 2 for text in texts])
        return [self._open(text, []) for text in texts]

    def open_restored(self, text: int, computed: Sequence[int], tokens: int) -> RowId:
        """Open a row that begins with the `tokens` first tokens of another row, computed in these
        parts."""
        self.rows.make_room([len(self._texts[text]) // 2])
        return self._open(text, _beginning(computed, tokens))

    def chunk_sizes(self, row: RowId) -> list[int]:
        """Number of tokens of each pass of the row."""
        return list(self._forced[row].parts)

    def _open(self, text: int, parts: list[int]) -> RowId:
        row = RowId(max(self._forced, default=-1) + 1)
        self._forced[row] = ForcedRow(text, parts)
        self.rows.open(row, len(self._texts[text]) // 2)
        return row

    def step(
        self,
        chunks: Mapping[RowId, int] | None = None,
        joining: Sequence[RowId] = (),
        drafts: Mapping[RowId, tuple[int, int]] | None = None,
    ) -> None:
        """Run one step: chunks of prompts, rows that begin to decode, one token for each decoding
        row. drafts: number of right draft tokens, and of wrong ones behind."""
        if chunks:
            self.rows.prefill({row: self._next(row, count) for row, count in chunks.items()})
            for row, count in chunks.items():
                self._forced[row].parts.append(count)
        alone = [row for row in joining if not self.rows.decodes_from_nothing(row)]
        for row in joining:
            if row not in alone:
                self.rows.promote(row)
        self.rows.move_outgrown()
        if self.rows.decoding:
            self._verify(drafts) if drafts is not None else self._decode()
        for row in alone:
            self._took(row, self.rows.first(row, self._next(row, 1))[0])
            self.rows.promote(row)

    def _decode(self) -> None:
        decoding = list(self.rows.decoding)
        tokens = [self._next(row, 1)[0] for row in decoding]
        logits = self.rows.decode(mx.array(np.array(tokens, np.uint32)))
        mx.async_eval(logits)
        for index, row in enumerate(decoding):
            self._took(row, logits[index])

    def _verify(self, drafts: Mapping[RowId, tuple[int, int]]) -> None:
        decoding = list(self.rows.decoding)
        fed = [self._drafted(row, *drafts.get(row, (0, 0))) for row in decoding]
        counts = np.array([len(tokens) for tokens in fed], np.int32)
        padded = np.zeros((len(fed), int(counts.max())), np.uint32)
        for index, tokens in enumerate(fed):
            padded[index, : len(tokens)] = tokens
        logits = self.rows.verify(mx.array(padded), counts)
        mx.async_eval(logits)
        right = [drafts.get(row, (0, 0))[0] for row in decoding]
        for index, row in enumerate(decoding):
            for step in range(1 + right[index]):
                self._took(row, logits[index, step])
        self.rows.accepted(np.array(right, np.int32))

    def _drafted(self, row: RowId, right: int, wrong: int) -> list[int]:
        tokens = self._next(row, 1 + right)
        return tokens + [tokens[0] + 1 + index for index in range(wrong)]

    def _next(self, row: RowId, count: int) -> list[int]:
        fed = self._forced[row].fed
        tokens = list(self._texts[self._forced[row].text][fed : fed + count])
        assert len(tokens) == count, "a text is too short for its scenario"
        return tokens

    def _took(self, row: RowId, logits: mx.array) -> None:
        forced = self._forced[row]
        forced.parts.append(1)
        self.taken.append(Taken(forced.text, forced.fed - 1, tuple(forced.parts), logits))

    def leave(self, *rows: RowId) -> None:
        """Drop rows, whose logits stay."""
        self.rows.drop(rows)
        for row in rows:
            del self._forced[row]

    def error(self, reference: Reference) -> float:
        expected = [
            reference.logits(sample.text, self._longest(sample))[sample.position]
            for sample in self.taken
        ]
        found = errors(mx.stack([sample.logits for sample in self.taken]), mx.stack(expected))
        return reference.arithmetic.judged(found, [sample.text for sample in self.taken])

    def _longest(self, sample: Taken) -> tuple[int, ...]:
        parts, count = sample.parts, len(sample.parts)
        return max(
            (
                other.parts
                for other in self.taken
                if other.text == sample.text and other.parts[:count] == parts
            ),
            key=len,
        )


def _beginning(parts: Sequence[int], tokens: int) -> list[int]:
    beginning: list[int] = []
    for part in parts:
        if sum(beginning) < tokens:
            beginning.append(min(part, tokens - sum(beginning)))
    return beginning


LONG, MIDDLE, SHORT, SINGLE = range(4)
"""Indices of the texts."""
LENGTHS = (31, 24, 15, 8)
PROMPTS = (21, 13, 5, 1)
"""Number of prompt tokens of each text, of which the last is decoded."""
SINGLES = 3
SLACK = Drafting(tokens=2).slack  # Rings of a shrunk model wrap within the texts.


FIRST_BANK = 4

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
    second = rows.open_restored(LONG, rows.chunk_sizes(first), 18)
    blocks.restore(second, again)
    rows.step({second: 2}, joining=[second])
    rows.step()
    computed = rows.chunk_sizes(first)
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
    """Make a scenario of two rows, alone and then in one batch."""
    # A fault common to all tokens of a row, such as an offset, may not show otherwise.

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
