"""A draft model's context against the length of a row: how much of an answer it cannot draft is
known when the row enters."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.core.driving import DrivenCore
from tests.core.test_memory import ask, finish, running, world
from trouper.actors.scheduling.draft_estimates import Record
from trouper.actors.scheduling.speculation_policy import Speculation
from trouper.protocol.plans import ProposerName


@pytest.mark.parametrize(
    ("prompt", "answer", "undrafted"),
    [(20, 8, 0), (20, 11, 0), (20, 12, 1), (40, 16, 25), (10, 500, 479)],
)
def test_the_end_of_an_answer_that_lies_beyond_the_context(
    prompt: int, answer: int, undrafted: int
) -> None:
    """Before the last token is sampled a row has prompt + answer - 1 tokens."""
    driven = DrivenCore(speculation="auto", draft_model="small", draft_context=30)
    driven.arrive(prompt, answer)
    driven.until_decoding()
    [row] = driven.core._batch.rows.values()
    assert row.records["draft_model"].undrafted == undrafted
    assert row.records["ngram"].undrafted == 0, "other proposers know no bound"


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_what_drafts_is_chosen_once_however_long_memory_is_awaited(
    speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that draft nothing were looked at again in each plan."""
    chosen, records = list[tuple[ProposerName, ...]](), Speculation.records

    def counted(policy: Speculation, names: Iterable[ProposerName]) -> dict[ProposerName, Record]:
        chosen.append(tuple(names))
        return records(policy, chosen[-1])

    monkeypatch.setattr(Speculation, "records", counted)
    short = world(17, speculation=speculation)
    ask(short, 2, max_tokens=8)
    for _ in range(6):
        short.step()
        assert len(running(short)) == 1, "else nobody waits"
    finish(short)
    assert chosen == [("ngram",) if speculation == "ngram" else ()] * 2
