"""Forced decoding: rows with fixed tokens in place of sampled ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.kv.rows import Rows
from trouper.engine.self_check.accuracy import errors
from trouper.engine.self_check.alone import Reference
from trouper.protocol.plans import RowId


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
        """Open one row for each text."""
        self.rows.make_room([len(self._texts[text]) // 2 for text in texts])
        return [self._open(text, []) for text in texts]

    def open_restored(self, text: int, computed: Sequence[int], tokens: int) -> RowId:
        """Open a row that begins with the `tokens` first tokens of another row, computed in these
        parts."""
        self.rows.make_room([len(self._texts[text]) // 2])
        return self._open(text, _beginning(computed, tokens))

    def parts(self, row: RowId) -> list[int]:
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
        """Drop rows. Their logits stay."""
        self.rows.drop(rows)
        for row in rows:
            del self._forced[row]

    def error(self, reference: Reference) -> float:
        """Compute the error of all logits against the reference."""
        expected = [
            reference.logits(sample.text, self._longest(sample))[sample.position]
            for sample in self.taken
        ]
        found = errors(mx.stack([sample.logits for sample in self.taken]), mx.stack(expected))
        return reference.arithmetic.judged(found, [sample.text for sample in self.taken])

    def _longest(self, sample: Taken) -> tuple[int, ...]:
        """Find the final parts of the sample's row."""
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
