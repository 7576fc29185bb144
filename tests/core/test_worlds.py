"""Worlds of the core alone, and faults that each invariant must catch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.core.worlds import CoreWorld, play
from trouper.actors.scheduling.core import Core
from trouper.actors.scheduling.eviction import Eviction
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.sequence import Row
from trouper.protocol.plans import BlockId, Plan
from trouper.protocol.problems import Problem

SEEDS = range(200)


def test_every_invariant_holds_in_every_world() -> None:
    play(SEEDS)


def test_the_worlds_have_everything_in_them() -> None:
    """Else they would show little."""
    seen = Counter[str]()
    for seed in range(60):
        world = CoreWorld(seed)
        world.play()
        facts = world.watches.stats.latest
        seen.update(
            completed=facts.requests_completed,
            refused=facts.requests_errored,
            withdrawn=facts.requests_withdrawn,
            cached_tokens=facts.total_cached_tokens,
            evicted=facts.cache.evicted_blocks,
            from_disk=facts.cache.hits_disk,
            written=len(world.stored),
            accepted_drafts=facts.speculation.accepted,
        )
    assert all(seen[name] > 10 for name in seen), seen


def fault(name: str, owner: type, method: str, wrong: Callable[..., Any]) -> Any:
    return pytest.param(owner, method, wrong, id=name)


def without_drop(core: Core, row: Row) -> None:
    core._left[row.id] = core._rows.pop(row.id)


def finishes_twice(core: Core, row: Row) -> None:
    row.admitted.submission.fail(Problem(500, "again", "server_error", None, "again"))
    row.admitted.submission.close()


def never_closes(core: Core, row: Row) -> None:
    core._take_out(row)


def forgets_freed(cache: PrefixCache) -> tuple[BlockId, ...]:
    cache.tree.eviction.freed()
    return ()


def no_bound(eviction: Eviction, nbytes: int, blocks: int = 0, *, keep: Any) -> bool:
    return True


def never_unpins(eviction: Eviction, node: Any) -> None:
    """A row's end leaves its node in use."""


def a_token_too_many(core: Core, row: Row) -> None:
    row.num_scheduled_tokens += 2


def forgets_the_row(core: Core, row_id: Any) -> None:
    """What the engine dropped stays in the books."""


original = Core.schedule


def a_third_plan(core: Core, now: float) -> Plan | None:
    before, core._unanswered = core._unanswered, type(core._unanswered)()
    plan = original(core, now) if len(before) < 3 else None
    core._unanswered = before
    if plan is not None:
        before.append(plan)
    return plan


FAULTS = [
    fault("a row is never dropped", Core, "_take_out", without_drop),
    fault("two terminal events", Core, "_remove", finishes_twice),
    fault("a reply channel stays open", Core, "_remove", never_closes),
    fault("evicted blocks stay in the engine", PrefixCache, "freed", forgets_freed),
    fault("the cache has no bound", Eviction, "make_room", no_bound),
    fault("nodes stay pinned", Eviction, "unpin", never_unpins),
    fault("a draft counts twice", Core, "_count_draft", a_token_too_many),
    fault("dropped rows stay in the books", Core, "_dropped", forgets_the_row),
    fault("three plans in flight", Core, "schedule", a_third_plan),
]


@pytest.mark.parametrize(("owner", "method", "wrong"), FAULTS)
def test_a_planted_fault_is_caught(
    owner: type, method: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises(AssertionError):
        play(SEEDS)
