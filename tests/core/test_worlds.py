"""Worlds of the core alone, and faults that each invariant must catch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import pytest

from tests.core.worlds import CoreWorld, RecordingClient, play
from tests.family_configs import LONG
from trouper.actors.scheduling.core import Core
from trouper.actors.scheduling.eviction import Eviction
from trouper.actors.scheduling.kv_memory import KvMemory, MemoryBudget
from trouper.actors.scheduling.preemption import Preemption
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.result_commit import ResultCommit
from trouper.actors.scheduling.running_batch import RunningBatch
from trouper.actors.scheduling.sequence import Sequence, State
from trouper.protocol.plans import BlockId, Plan
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Failed

SEEDS = range(200 if LONG else 120)


@cache
def seen_in(seed: int) -> Counter[str]:
    """What the world of a seed has in it, which is played once. Raises AssertionError where an
    invariant does not hold."""
    world = CoreWorld(seed)
    world.play()
    facts = world.watches.stats.latest
    return Counter(
        completed=facts.requests_completed,
        refused=facts.requests_errored,
        withdrawn=facts.requests_withdrawn,
        cached_tokens=facts.total_cached_tokens,
        evicted=facts.cache.evicted_blocks,
        from_disk=facts.cache.hits_disk,
        written=len(world.stored),
        preempted=facts.preemptions,
        refused_for_memory=sum(
            code(client) == "context_length_exceeded" for client in world.clients
        ),
        shortened=sum(
            client.max_tokens < (client.request.max_tokens or 0) for client in world.clients
        ),
        overdue=world.overdue,
        yielded=world.yielded,
        accepted_drafts=facts.speculation.accepted,
        encoded=world.engine.num_encoded,
        decoded_in_vain=world.num_decoded - world.engine.num_encoded,
        without_pixels=sum(code(client) == "image_damaged" for client in world.clients),
    )


def test_every_invariant_holds_in_every_world() -> None:
    for seed in SEEDS:
        assert seen_in(seed), f"seed {seed}"


def test_the_worlds_have_everything_in_them() -> None:
    """Else they would show little."""
    seen = Counter[str]()
    for seed in range(120):
        seen.update(seen_in(seed))
    assert all(seen[name] > 10 for name in seen), seen


def code(client: RecordingClient) -> str | None:
    end = client.terminal[0] if client.terminal else None
    return end.problem.code if isinstance(end, Failed) else None


def fault(name: str, owner: type, method: str, wrong: Callable[..., Any]) -> Any:
    return pytest.param(owner, method, wrong, id=name)


def without_drop(batch: RunningBatch, sequence: Sequence) -> None:
    batch.removed[sequence.id] = batch.rows.pop(sequence.id)


def finishes_twice(sequence: Sequence) -> None:
    sequence.client.fail(Problem(500, "again", "server_error", None, "again"))
    sequence.client.close()


def never_closes(sequence: Sequence) -> None:
    """The terminal event is sent, and the channel stays open."""


def stays_in_its_state(sequence: Sequence, state: State) -> None:
    """Transitions are forgotten."""


def any_transition(sequence: Sequence, tokens: int) -> None:
    """A chunk is counted twice."""
    original_chunk(sequence, tokens)
    sequence.enter_state(State.PREFILLING)


def forgets_freed(cache: PrefixCache) -> tuple[BlockId, ...]:
    cache.tree.eviction.freed()
    return ()


def no_bound(eviction: Eviction, nbytes: int, blocks: int = 0, *, keep: Any) -> bool:
    return True


def never_unpins(eviction: Eviction, node: Any) -> None:
    """A row's end leaves its node in use."""


def a_token_too_many(commit: ResultCommit, sequence: Sequence) -> None:
    sequence.num_scheduled_tokens += 2


def forgets_the_row(batch: RunningBatch, row: Any) -> None:
    """What the engine dropped stays in the books."""


def never_relieved(memory: KvMemory, rows: list[Sequence], limit: int, now: float) -> None:
    """Rows grow beyond the limit."""


def all_enter(memory: KvMemory, sequence: Sequence) -> bool:
    return True


def without_bound(cache: PrefixCache, nbytes: int | None) -> None:
    """Blocks are stored whatever rows leave of the limit."""


def without_drafts(budget: MemoryBudget, sequence: Sequence) -> tuple[int, int]:
    known, reserved = original_lengths(attrs.evolve(budget, max_draft_tokens=0), sequence)
    return known, reserved - sequence.num_draft_tokens * (not sequence.prefilling)


def forgets_preempted(preemption: Preemption, sequence: Sequence, now: float) -> None:
    preemption.batch.remove(sequence)
    sequence.preempt()


original_lengths = MemoryBudget.lengths
original, original_chunk = Core.schedule, Sequence.schedule_chunk


def a_third_plan(core: Core, now: float) -> Plan | None:
    before, core._unanswered = core._unanswered, type(core._unanswered)()
    plan = original(core, now) if len(before) < 3 else None
    core._unanswered = before
    if plan is not None:
        before.append(plan)
    return plan


FAULTS = [
    fault("a row is never dropped", RunningBatch, "remove", without_drop),
    fault("two terminal events", Sequence, "finish", finishes_twice),
    fault("a reply channel stays open", Sequence, "finish", never_closes),
    fault("evicted blocks stay in the engine", PrefixCache, "freed", forgets_freed),
    fault("the cache has no bound", Eviction, "make_room", no_bound),
    fault("nodes stay pinned", Eviction, "unpin", never_unpins),
    fault("a draft counts twice", ResultCommit, "_count_draft", a_token_too_many),
    fault("dropped rows stay in the books", RunningBatch, "dropped", forgets_the_row),
    fault("a state is not entered", Sequence, "enter_state", stays_in_its_state),
    fault("an illegal transition", Sequence, "schedule_chunk", any_transition),
    fault("rows outgrow memory", KvMemory, "_fit", never_relieved),
    fault("sequences enter without room", KvMemory, "admits", all_enter),
    fault("blocks are stored without room", PrefixCache, "bound", without_bound),
    fault("drafts take no memory", MemoryBudget, "lengths", without_drafts),
    fault("a preempted sequence is lost", Preemption, "preempt", forgets_preempted),
    fault("three plans in flight", Core, "schedule", a_third_plan),
]


@pytest.mark.parametrize(("owner", "method", "wrong"), FAULTS)
def test_a_planted_fault_is_caught(
    owner: type, method: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, wrong)
    with pytest.raises(AssertionError):
        play(SEEDS)
