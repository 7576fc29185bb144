"""Positions of rows with drafts: bias, penalties and minima at each, as if each were a row of its
own; which drafts are right."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.naive import shaped
from tests.engine.test_sampler import PENALIZED, logits_of
from tests.long_tests import examples
from trouper.engine.sampling.penalties import Bias, History, MinTokens, Penalties
from trouper.engine.spec_decode.verification_spans import Spans
from trouper.protocol.sampling import Sampling

VOCABULARY = 16
TOKEN = st.integers(0, VOCABULARY - 1)


@attrs.frozen
class Case:
    """Rows, what each has seen, and what each drafts (some of them something)."""

    rows: list[Sampling]
    prompts: list[list[int]]
    said: list[list[int]]
    drafts: list[list[int]]

    @property
    def positions(self) -> list[tuple[int, list[int]]]:
        """Of each: its row, and all that the row has said up to there."""
        return [
            (row, [*self.said[row], *draft[:place]])
            for row, draft in enumerate(self.drafts)
            for place in range(len(draft) + 1)
        ]

    def histories(self) -> list[History | None]:
        return [
            History(np.array(prompt, np.int32), VOCABULARY) if row.penalized else None
            for row, prompt in zip(self.rows, self.prompts, strict=True)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.lists(st.sampled_from(PENALIZED), min_size=1, max_size=4))
    texts = st.lists(TOKEN, min_size=1, max_size=4)
    drafts = draw(
        st.lists(st.lists(TOKEN, max_size=4), min_size=len(rows), max_size=len(rows)).filter(any)
    )
    said = draw(st.integers(0, 2))
    return Case(
        rows,
        [draw(texts) for _ in rows],
        [draw(st.lists(TOKEN, min_size=said, max_size=said)) for _ in rows],
        drafts,
    )


def took(penalties: Penalties, said: Sequence[Sequence[int]]) -> None:
    for step in zip(*said, strict=True):
        penalties.count(mx.array(step, mx.uint32))


@settings(max_examples=examples(60))
@given(cases())
def test_f22_each_position_is_shaped_by_all_that_comes_before_it(case: Case) -> None:
    spans = Spans(case.drafts)
    logits = logits_of(VOCABULARY, len(case.positions))
    penalties = Penalties(case.rows, case.histories())
    took(penalties, case.said)
    got = np.array(penalties(Bias(case.rows)(mx.array(logits), spans), spans))
    for mine, raw, (row, before) in zip(got, logits, case.positions, strict=True):
        wanted = shaped(raw.astype(np.float64), case.rows[row], case.prompts[row], before)
        np.testing.assert_allclose(mine, wanted, atol=1e-4)


@settings(max_examples=examples(60))
@given(cases(), st.data())
def test_f22_only_what_was_kept_is_remembered(case: Case, data: st.DataObject) -> None:
    """Then the next step is shaped as if there had been no drafts."""
    spans = Spans(case.drafts)
    sampled = np.array([data.draw(TOKEN) for _ in case.positions], np.int32)
    accepted = [data.draw(st.integers(0, len(draft))) for draft in case.drafts]
    kept = spans.steps <= np.array(accepted)[spans.owners]
    penalties = Penalties(case.rows, case.histories())
    took(penalties, case.said)
    penalties.accepted(spans, sampled, kept)
    logits = logits_of(VOCABULARY, len(case.rows))
    got = np.array(penalties(Bias(case.rows)(mx.array(logits))))
    for row, (mine, raw) in enumerate(zip(got, logits, strict=True)):
        own = [
            int(token)
            for token, owner, keeps in zip(sampled, spans.owners, kept, strict=True)
            if owner == row and keeps
        ]
        wanted = shaped(
            raw.astype(np.float64), case.rows[row], case.prompts[row], [*case.said[row], *own]
        )
        np.testing.assert_allclose(mine, wanted, atol=1e-4)


@given(cases(), st.lists(st.integers(0, 6), min_size=4, max_size=4), st.integers(0, 3))
def test_no_end_stands_at_a_position_before_its_rows_minimum(
    case: Case, least: list[int], drawn: int
) -> None:
    ends = (3, 7)
    rows = [(minimum, ends) for minimum, _ in zip(least, case.rows, strict=False)]
    spans = Spans(case.drafts)
    counts = np.array([drawn + len(before) for _, before in case.positions], np.uint64)
    got = np.array(MinTokens(rows)(mx.zeros((len(case.positions), VOCABULARY)), counts, spans))
    for mine, (row, before) in zip(got, case.positions, strict=True):
        forbidden = {int(token) for token in np.flatnonzero(np.isinf(mine))}
        assert forbidden == ({*ends} if drawn + len(before) < least[row] else set())


@given(cases(), st.data())
def test_drafts_are_right_up_to_the_first_that_is_not(case: Case, data: st.DataObject) -> None:
    """And never beyond what a grammar could follow."""
    spans = Spans(case.drafts)
    sampled: list[int] = []
    for draft in case.drafts:
        sampled += [
            token if data.draw(st.integers(0, 3)) else data.draw(TOKEN) for token in draft
        ] + [data.draw(TOKEN)]
    most = [len(draft) for draft in case.drafts]
    if data.draw(st.booleans()):
        spans.max_accepted[:] = most = [data.draw(st.integers(0, bound)) for bound in most]
    right, at = [], 0
    for draft, bound in zip(case.drafts, most, strict=True):
        own = sampled[at : at + len(draft)]
        first = next(
            (n for n, (one, other) in enumerate(zip(draft, own, strict=True)) if one != other),
            len(draft),
        )
        right.append(min(first, bound))
        at += len(draft) + 1
    assert spans.accepted(np.array(sampled, np.int32)).tolist() == right
