"""No chunk of a prompt ends inside an image whose tokens attend to each other."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trouper.actors.scheduling.core import end_outside_images
from trouper.protocol.media import ImageShape, MediaSpan, chunk_end
from trouper.protocol.plans import Chunk, RowId


def span(start: int, tokens: int, *, atomic: bool = True) -> MediaSpan:
    shape = ImageShape((1, tokens), (1, 1, tokens))
    return MediaSpan(start, (9,) * tokens, ((0, tokens),), b"digest", shape, tokens, atomic=atomic)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 9, 9),
        (0, 10, 10),
        (0, 11, 10),
        (0, 29, 10),
        (0, 30, 30),
        (10, 11, 30),
        (10, 30, 30),
        (10, 31, 31),
        (15, 16, 30),
        (30, 31, 31),
        (0, 45, 40),
        (10, 45, 40),
        (40, 41, 50),
    ],
)
def test_a_chunk_ends_before_or_behind_an_image(start: int, end: int, expected: int) -> None:
    assert chunk_end((span(10, 20), span(40, 10)), start, end) == expected


def test_other_images_may_be_cut() -> None:
    assert chunk_end((span(10, 20, atomic=False),), 0, 15) == 15


@attrs.frozen
class Row:
    """The part of a sequence that chunks read."""

    spans: Sequence[MediaSpan]
    computed: int

    def uncut_chunk(self, tokens: int) -> int:
        return chunk_end(self.spans, self.computed, self.computed + tokens) - self.computed


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 50)),
        min_size=1,
        max_size=6,
    )
)
def test_one_row_a_step_exceeds_its_share(drawn: list[tuple[int, int, int]]) -> None:
    rows = {RowId(at): Row((span(20, 40),), computed) for at, (computed, _, _) in enumerate(drawn)}
    chunks = [Chunk(RowId(at), tokens) for at, (_, tokens, _) in enumerate(drawn)]
    ended = end_outside_images(chunks, rows)  # type: ignore[arg-type]
    planned = {chunk.row: chunk.tokens for chunk in chunks}
    exceeding = [chunk.row for chunk in ended if chunk.tokens > planned[chunk.row]]
    assert len(exceeding) <= 1
    assert ended, "each step makes progress"
    for chunk in ended:
        row = rows[chunk.row]
        assert chunk.tokens > 0
        end = row.computed + chunk.tokens
        assert not 20 < end < 60
    # Those that wait stand at the image's start, or in it, behind an older row that does.
    waiting = planned.keys() - {chunk.row for chunk in ended}
    assert all(20 <= rows[row].computed < 60 and row > exceeding[0] for row in waiting)
