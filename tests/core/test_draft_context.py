"""A draft model's context against the length of a row: how much of an answer it cannot draft is known when the row enters."""

from __future__ import annotations

import pytest

from tests.core.driving import DrivenCore


@pytest.mark.parametrize(
    ("prompt", "answer", "undrafted"), [(20, 8, 0), (20, 11, 0), (20, 12, 1), (40, 16, 25), (10, 500, 479)]
)
def test_the_end_of_an_answer_that_lies_beyond_the_context(prompt: int, answer: int, undrafted: int) -> None:
    """Before the last token is sampled a row has prompt + answer - 1 tokens."""
    driven = DrivenCore(speculation="auto", draft_model="small", draft_context=30)
    driven.arrive(prompt, answer)
    driven.until_decoding()
    [row] = driven.core._batch.rows.values()
    assert row.records["draft_model"].undrafted == undrafted
    assert row.records["ngram"].undrafted == 0, "other proposers know no bound"
