"""Images that are never cut, in the core: chunks, snapshots and waits end before or behind them.

The fake engine asserts that no chunk ends inside one.
"""

from __future__ import annotations

import pytest

from tests.core.test_images import TEXT, ask, decode, plans, seeing, serve
from tests.core.test_memory import run
from tests.core.worlds import CoreWorld
from tests.fakes import UNCUTTABLE, card
from tests.images import Part, prompt_of
from trouper.actors.scheduling import image_identity
from trouper.actors.scheduling.image_identity import cached_tokens
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.sequence import Sequence
from trouper.protocol.health import CacheStats
from trouper.protocol.plans import Plan
from trouper.protocol.settings import Settings

UNCUT: Part = ("atomic", 1, 40)


def chunks_of(seen: CoreWorld) -> list[list[int]]:
    """Tokens of each step's chunks until all requests have ended."""
    made: list[Plan] = []
    while any(not client.closed for client in seen.clients):
        decode(seen)
        made += plans(seen, 1)
    return [[chunk.tokens for chunk in plan.prefill] for plan in made if plan.prefill]


def test_an_image_is_prefilled_in_one_chunk_whatever_the_budget() -> None:
    small = seeing(prefill_step_size=4)
    ask(small, TEXT, UNCUT, TEXT)
    assert chunks_of(small) == [[4], [4], [3], [40], [4], [4], [3]]


def test_an_image_is_prefilled_in_one_chunk_while_others_decode() -> None:
    busy = seeing()
    ask(busy, TEXT, max_tokens=60)
    run(busy, 3)
    ask(busy, TEXT, UNCUT, TEXT)
    assert any(tokens >= 40 for step in chunks_of(busy) for tokens in step)


def test_one_image_a_step_exceeds_the_budget() -> None:
    several = seeing(prefill_step_size=4)
    for number in range(3):
        ask(several, TEXT, ("atomic", number, 40), TEXT)
    steps = chunks_of(several)
    assert sum(step.count(40) for step in steps) == 3
    assert all(step.count(40) <= 1 for step in steps)


def test_a_row_goes_on_inside_an_image_that_the_cache_has_in_part() -> None:
    """What was computed of it was computed with all of it."""
    shared = seeing(block_size=4)
    ask(shared, TEXT[:8], UNCUT, TEXT)
    serve(shared)
    tree = shared.core._cache.tree
    chain = shared.core._cache.chain(cached_tokens(*prompt_of(TEXT[:8], UNCUT, TEXT)), "")
    reached = tree.match(chain, len(chain) - 1, at_snapshot=False)
    assert reached.tokens > 48
    reused = shared.core._cache.look(chain, [prompt_of(TEXT[:8], UNCUT)[1][0].span])
    part = shared.core._cache.cut(chain, reused, 6 * tree.sizes.block_bytes(4))
    assert part.tokens == 24
    again = ask(shared, TEXT[:8], UNCUT, TEXT, cache_salt="other")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCache, "look", lambda *_: part)
        run(shared, 1)
    [row] = shared.core._batch.rows.values()
    assert row.num_cached_tokens == 24
    assert chunks_of(shared)[0][0] >= 24
    assert again.closed


def test_snapshots_are_taken_at_the_images_start() -> None:
    prompt, images = prompt_of(TEXT, UNCUT, TEXT, TEXT, TEXT)
    seen = seeing(kv=UNCUTTABLE, snapshot_tokens=16, prefill_step_size=2048)
    ask(seen, TEXT, UNCUT, TEXT, TEXT, TEXT)
    run(seen, 1)
    [row] = seen.core._batch.rows.values()
    span = images[0].span
    assert not [at for at in row.boundaries if span.start < at < span.end]
    assert row.boundaries[-1] == len(prompt) - 1
    assert any(at > span.end for at in row.boundaries[:-1])
    chunks_of(seen)


def test_a_wait_ends_at_the_images_start() -> None:
    """Two images begin alike, as few bits of a digest may."""
    right = image_identity.identity_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_identity, "identity_tokens", lambda *of: right(*of) | 0x7FFFFFFF)
        cache = PrefixCache.of(card(), "fa4e", Settings(block_size=4), CacheStats())
        first, second = (prompt_of(TEXT, ("atomic", 1, tokens), TEXT) for tokens in (40, 30))
        chains = [cache.chain(cached_tokens(*each), "") for each in (first, second)]
    _, images = first
    row = Standing(chains[0])
    cache._live.attach(row, chains[0].root)
    reused = cache.look(chains[1], [images[0].span])
    assert reused.primary is row
    assert reused.until == images[0].span.start == len(TEXT)


class Standing(Sequence):
    """A row that has computed nothing yet."""

    id = 1  # type: ignore[assignment]
    num_computed_tokens = 0
    num_prefill_tokens = 60
    node = None

    def __init__(self, chain: object) -> None:
        self.chain = chain  # type: ignore[assignment]
