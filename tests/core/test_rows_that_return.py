"""Rows that were preempted enter again where they may stay, and with what they left behind."""

from __future__ import annotations

import attrs

from tests.core.test_memory import KV, ask, finish, preempted, run, running, world
from tests.core.worlds import CoreWorld
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.work import DiskOrder, Read, Write


def test_states_of_drafts_are_counted_before_a_row_enters_that_may_draft() -> None:
    """All rows keep recurrent states of before if one drafts. Else it would enter, be preempted by
    the next plan, and so on in each step."""
    small = world(30, kv=attrs.evolve(KV, draft_state_bytes=600))
    [plain] = ask(small, max_tokens=20, speculation="off")
    run(small, 2)
    [drafting] = ask(small, max_tokens=4, speculation="ngram")
    run(small, 10)
    assert running(small) == [plain.request.request_id]
    assert preempted(small) == 0
    finish(small)
    assert drafting.tokens


class SureDisk(CoreWorld):
    """The disk takes every order, and answers at once with all that it has. Computing takes far
    longer than reading."""

    def _order(self, order: DiskOrder) -> bool:
        if isinstance(order, Write | Read):
            self.orders.append(order)
        return True

    def turn(self) -> None:
        self.core._prefill_budget.prefill_rate = 100.0
        self.step()
        self.disk_answers()


def test_a_preempted_sequence_that_came_from_disk_returns_from_disk() -> None:
    sure = SureDisk(
        1,
        kv=KV,
        kv_memory=ByteSize(40_000),
        cache_memory=ByteSize(10**6),
        block_size=32,
        no_ssd=False,
        completion_batch_size=8,
        prefill_batch_size=8,
        prefill_step_size=64,
        max_queue_size=50,
        speculation="off",
    )
    sure.dice.random = lambda: 0.5  # type: ignore[method-assign]
    text = tuple(1 + (at * at + at // 3) % 80 for at in range(200))
    first = sure.ask(text, 2)
    while not first.closed:
        sure.turn()
    sure.turn()
    sure.core._cache.evict(10**9)
    resumed = sure.ask((*text, 5), 40, priority=5)
    while not resumed.tokens:
        sure.turn()
    assert sure.watches.stats.latest.cache.hits_disk > 0
    assert not any(progress.preempted for progress in resumed.progress)
    other = sure.ask(tuple(1 + (7 * at * at + at // 5) % 80 for at in range(290)), 3)
    while not other.closed:
        sure.turn()
    before = sure.watches.stats.latest
    while not resumed.closed:
        sure.turn()
    after = sure.watches.stats.latest
    assert after.preemptions == 1
    assert after.cache.hits_disk > before.cache.hits_disk
    assert after.total_prefill_tokens - before.total_prefill_tokens < len(text) // 2
    finish(sure)
