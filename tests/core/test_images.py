"""Images in the core: which are decoded and encoded, what waits for them, whose blocks match."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.test_memory import run, world
from tests.core.test_waits import standing
from tests.core.worlds import CoreWorld, RecordingClient
from tests.fakes import UNCUTTABLE, EngineDied, card
from tests.images import Part, prompt_of
from trouper.actors.scheduling import image_identity
from trouper.actors.scheduling.crash_recovery import Recovery
from trouper.actors.scheduling.image_identity import (
    cached_tokens,
    engine_tokens,
    identity_tokens,
    trusted_end,
)
from trouper.actors.scheduling.image_items import EncoderBudget
from trouper.actors.scheduling.prefix_cache import PrefixCache
from trouper.actors.scheduling.tree_node import Chain, Node
from trouper.protocol.health import CacheStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.media import ImageDecoded, Pixels, PromptImage
from trouper.protocol.plans import Plan
from trouper.protocol.replies import Failed, Finished
from trouper.protocol.setting_fields import ByteSize
from trouper.protocol.settings import Settings

MUCH = ByteSize(10**9)
TEXT = tuple(range(1, 12))


def seeing(**settings: Any) -> CoreWorld:
    """A world with a cache, whose images are decoded as soon as a test says."""
    made = world(None, **{"cache_memory": MUCH, "block_size": 4} | settings)
    made.undecodable = 0.0
    return made


def ask(seen: CoreWorld, *contents: Part, max_tokens: int = 2, **more: Any) -> RecordingClient:
    prompt, images = prompt_of(*contents)
    return seen.ask(prompt, max_tokens, images, **more)


def decode(seen: CoreWorld, fault: str = "", code: str = "image_damaged") -> None:
    """Answer all orders of pixels."""
    orders, seen.image_orders = seen.image_orders, []
    for order in orders:
        pixels = None if fault else Pixels(*order.shape.resized, b"")
        seen.num_decoded += not fault
        seen.core.hear_image(ImageDecoded(order.item, pixels, fault, code), seen.now)


def serve(seen: CoreWorld) -> None:
    while any(not client.closed for client in seen.clients):
        decode(seen)
        run(seen)


def plans(seen: CoreWorld, steps: int) -> list[Plan]:
    """Plans of the next steps."""
    made: list[Plan] = []
    schedule = seen.core.schedule

    def note(now: float) -> Plan | None:
        plan = schedule(now)
        made.extend([] if plan is None else [plan])
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen.core, "schedule", note)
        run(seen, steps)
    return made


# -- identity ------------------------------------------------------------------------------------


def test_identity_tokens_are_no_ids_and_begin_alike_for_every_length() -> None:
    tokens = identity_tokens(b"a" * 32, 100)
    assert tokens.dtype == np.int32 and (tokens < 0).all()
    assert (identity_tokens(b"a" * 32, 7) == tokens[:7]).all()
    assert not (identity_tokens(b"b" * 32, 100) == tokens).any()


def test_the_engine_gets_the_ids_of_the_vocabulary() -> None:
    prompt, images = prompt_of(TEXT, ("image", 1, 9), TEXT)
    chained = cached_tokens(prompt, images) + (7).to_bytes(4, "big")
    assert np.frombuffer(engine_tokens(chained, images), "<i4").tolist() == [*prompt, 7]
    assert chained != cached_tokens(prompt, ())


@pytest.mark.parametrize(
    ("match", "end"), [(5, 5), (6, 5), (13, 5), (14, 14), (25, 25), (26, 25), (29, 25), (99, 25)]
)
def test_a_match_ends_in_an_image_only_behind_nine_of_its_tokens(match: int, end: int) -> None:
    """An image of twenty tokens, and one of four, behind which nothing is believed."""
    _, images = prompt_of(TEXT[:5], ("image", 1, 20), ("image", 2, 4), TEXT)
    assert trusted_end([image.span for image in images], match) == end


CONTENTS = st.lists(
    st.one_of(
        # An image of another size has another digest.
        st.tuples(st.integers(0, 5), st.sampled_from((3, 6, 12, 20))).map(
            lambda image: ("image", 100 * image[0] + image[1], image[1])
        ),
        st.lists(st.integers(1, 3), min_size=1, max_size=6).map(tuple),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("kv", [KvLayout(token_bytes=100), UNCUTTABLE], ids=["cut", "snapshots"])
@given(prompts=st.lists(CONTENTS, min_size=2, max_size=6))
def test_no_match_goes_beyond_the_same_images(kv: KvLayout, prompts: list[list[Part]]) -> None:
    """With identity tokens of two bits, so that images begin alike."""
    whole = image_identity.identity_tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_identity, "identity_tokens", lambda *of: whole(*of) | ~3)
        cache = PrefixCache.of(card(kv=kv), "fa4e", Settings(block_size=4), CacheStats())
        stored: list[list[tuple[int, bytes, int]]] = []
        kept = []
        for contents in prompts:
            prompt, images = prompt_of(*contents, (1,))
            chain = cache.chain(cached_tokens(prompt, images), "")
            matched = cache.look(chain, [image.span for image in images]).tokens
            own = meaning(prompt, images)
            assert matched <= max((common(own, other) for other in stored), default=0)
            store(cache, chain, snapshots=kv.needs_snapshots)
            stored.append(own)
            kept.append(chain)


def meaning(prompt: Sequence[int], images: Sequence[PromptImage]) -> list[tuple[int, bytes, int]]:
    """Each token, or the image in which it lies and where."""
    tokens = [(token, b"", 0) for token in prompt]
    for image in images:
        for at in range(image.span.start, image.span.end):
            tokens[at] = (0, image.span.digest, at - image.span.start)
    return tokens


def common(own: Sequence[object], other: Sequence[object]) -> int:
    pairs = enumerate(zip(own, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(own), len(other)))


def store(cache: PrefixCache, chain: Chain, *, snapshots: bool) -> None:
    node: Node | None = chain.root
    for start in range(0, len(chain), 4):
        assert node is not None
        node = cache.tree.insert(node, chain.part(start, min(start + 4, len(chain))))
        if snapshots and node is not None:
            cache.tree.add_snapshot(node)


# -- what is decoded and encoded -----------------------------------------------------------------


@pytest.mark.parametrize("image_cache", [None, ByteSize(0)])
def test_a_session_of_thirty_screenshots_decodes_and_encodes_the_new_one_only(
    image_cache: ByteSize | None,
) -> None:
    """Also without a cache of vectors: blocks have the earlier ones."""
    session = seeing(image_cache=image_cache)
    contents: list[Part] = [TEXT]
    for turn in range(30):
        contents += [("image", turn, 16), TEXT]
        client = ask(session, *contents)
        serve(session)
        assert isinstance(client.terminal[0], Finished)
        contents.append(tuple(client.tokens))
    assert session.num_decoded == session.engine.num_encoded == 30
    stats = session.watches.stats.latest
    assert stats.total_cached_tokens > 0.95 * (stats.total_prompt_tokens - 30 * 29)


def test_two_images_in_another_order_are_another_prompt() -> None:
    swapped = seeing()
    ask(swapped, TEXT, ("image", 1, 16), ("image", 2, 16), TEXT)
    serve(swapped)
    ask(swapped, TEXT, ("image", 2, 16), ("image", 1, 16), TEXT)
    serve(swapped)
    assert swapped.watches.stats.latest.total_cached_tokens == len(TEXT)
    assert swapped.engine.num_encoded == 2, "vectors do not depend on the place"


def test_the_same_image_twice_is_encoded_once() -> None:
    twice = seeing()
    ask(twice, ("image", 1, 16), TEXT, ("image", 1, 16), TEXT)
    ask(twice, TEXT, ("image", 1, 16), TEXT)
    serve(twice)
    assert twice.num_decoded == twice.engine.num_encoded == 1


def test_another_salt_shares_neither_blocks_nor_vectors() -> None:
    apart = seeing()
    for salt in ("a", "b"):
        ask(apart, TEXT, ("image", 1, 16), TEXT, cache_salt=salt)
        serve(apart)
    assert apart.num_decoded == apart.engine.num_encoded == 2


def test_text_before_an_image_is_prefilled_while_the_image_is_decoded() -> None:
    waiting = seeing()
    client = ask(waiting, TEXT, ("image", 1, 16), TEXT)
    run(waiting, 4)
    assert standing(client) == ("prefilling", "image")
    [row] = waiting.core._batch.rows.values()
    assert row.num_computed_tokens == len(TEXT)
    assert waiting.core.awaits_image
    serve(waiting)
    states = [(one.state, one.reason) for one in client.history.transitions]
    assert states == [
        ("prefilling", ""),
        ("prefilling", "image"),
        ("prefilling", ""),
        ("decoding", ""),
    ]


def test_few_images_have_pixels_at_a_time() -> None:
    """`CoreWorld` asserts the bound."""
    many = seeing()
    ask(many, *(("image", number, 16) for number in range(12)), TEXT)
    serve(many)
    assert many.num_decoded == 12


def test_a_tenant_with_many_images_holds_up_no_other() -> None:
    """Tenants take turns at the decoder, which may take seconds for each image."""
    shared = seeing()
    ask(shared, *(("image", number, 12) for number in range(20)), TEXT, tenant="a")
    run(shared, 2)
    other = ask(shared, ("image", 30, 12), TEXT, tenant="b")
    for _ in range(5):
        order = shared.image_orders.pop(0)
        pixels = Pixels(*order.shape.resized, b"")
        shared.num_decoded += 1
        shared.core.hear_image(ImageDecoded(order.item, pixels), shared.now)
        run(shared, 20)
    assert isinstance(other.terminal[0], Finished)
    assert shared.num_decoded < 20
    serve(shared)


@pytest.mark.parametrize(
    ("code", "status"),
    [("image_damaged", 400), ("image_crashes_decoder", 422), ("image_decoder_unavailable", 503)],
)
def test_an_image_without_pixels_fails_the_requests_that_need_it(code: str, status: int) -> None:
    broken = seeing()
    both = [ask(broken, (at, *TEXT), ("image", 1, 16), TEXT) for at in (20, 30)]
    other = ask(broken, TEXT, TEXT)
    run(broken, 2)
    decode(broken, "it is cut", code)
    serve(broken)
    for client in both:
        [end] = client.terminal
        assert isinstance(end, Failed)
        assert (end.problem.status, end.problem.code) == (status, code)
        assert end.problem.param == "messages.0.content.1"
        assert end.problem.message == "messages.0.content.1: it is cut"
    assert isinstance(other.terminal[0], Finished)


def test_the_decoders_seconds_are_counted_also_in_vain() -> None:
    counted = seeing()
    for number, pixels in ((1, Pixels(1, 1, b"")), (2, None)):
        ask(counted, TEXT, ("image", number, 16), TEXT)
        run(counted, 2)
        [order] = counted.image_orders
        counted.image_orders.clear()
        counted.core.hear_image(ImageDecoded(order.item, pixels, seconds=0.5), counted.now)
        serve(counted)
        run(counted)
    stats = counted.watches.stats.latest
    assert (stats.images_decoded, stats.image_decoder_seconds) == (1, 1.0)


def test_an_image_without_vectors_fails_its_own_request() -> None:
    broken = seeing()
    _, [bad] = prompt_of(("image", 1, 16))
    broken.engine.blind = bad.span.digest.__eq__
    client = ask(broken, TEXT, ("image", 1, 16), TEXT)
    other = ask(broken, TEXT, ("image", 2, 16), TEXT)
    serve(broken)
    [end] = client.terminal
    assert isinstance(end, Failed)
    assert (end.problem.status, end.problem.code) == (500, "image_not_encoded")
    assert isinstance(other.terminal[0], Finished)


def test_an_image_that_nobody_needs_any_more_is_not_encoded() -> None:
    left = seeing()
    client = ask(left, TEXT, ("image", 1, 16), TEXT)
    run(left, 2)
    client.aborted = True
    run(left, 2)
    decode(left)
    serve(left)
    assert not left.engine.num_encoded and not left.core.awaits_image


def test_pixels_of_a_scheduler_that_has_crashed_are_nobodys() -> None:
    crashed = seeing()
    ask(crashed, ("image", 1, 16), TEXT)
    run(crashed, 2)
    [order] = crashed.image_orders
    again = CoreWorld(1, cache_memory=MUCH)
    again.core._images.ids = crashed.core._images.ids
    ask(again, ("image", 2, 16), TEXT)
    run(again, 2)
    again.core.hear_image(ImageDecoded(order.item, Pixels(1, 1, b"")), again.now)
    assert again.core.awaits_image


def crash(seen: CoreWorld, recovery: Recovery) -> None:
    """The engine dies, and the next scheduler takes over."""
    seen.core.end(seen.now)
    seen.engine._forget()
    seen.in_flight.clear()
    recovery.judge(EngineDied(), seen.now)
    seen.core = seen.make_core(recovery)
    seen.core.take_up(seen.now)
    proof = seen.core.proof(seen.now)
    for plan in proof:
        seen.core.proved(seen.engine._compute(plan, 0.0))


def test_after_a_crash_an_image_is_decoded_and_encoded_again() -> None:
    crashed, recovery = seeing(), Recovery()
    crashed.core = crashed.make_core(recovery)
    client = ask(crashed, TEXT, ("image", 1, 16), TEXT, max_tokens=8)
    while len(client.tokens) < 3:
        decode(crashed)
        run(crashed)
    crash(crashed, recovery)
    serve(crashed)
    assert isinstance(client.terminal[0], Finished) and len(client.tokens) == 8
    assert crashed.num_decoded == crashed.engine.num_encoded == 2


def test_an_image_that_crashes_the_encoder_is_refused_and_costs_nobody_else() -> None:
    crashed, recovery = seeing(), Recovery()
    crashed.core = crashed.make_core(recovery)
    _, [deadly] = prompt_of(("image", 1, 16))
    client = ask(crashed, TEXT, ("image", 1, 16), TEXT)
    other = ask(crashed, (9, 8), max_tokens=60)
    crashes = 0
    while not (client.closed and other.closed):
        decode(crashed)
        run(crashed)
        unanswered = [plan for plan, _ in crashed.in_flight]
        spans = [order.span for plan in unanswered for order in plan.encode]
        if any(span.digest == deadly.span.digest for span in spans):
            crashes += 1
            crash(crashed, recovery)
    [end] = client.terminal
    assert isinstance(end, Failed) and end.problem.code == "request_crashes_engine"
    assert isinstance(other.terminal[0], Finished)
    assert crashes <= 3


@pytest.mark.parametrize(("nbytes", "encoded"), [(0, 4), (160, 3), (10**6, 2)])
def test_vectors_are_kept_within_a_bound(nbytes: int, encoded: int) -> None:
    """Two images of 160 bytes each, in turns, without a cache of blocks."""
    kept = seeing(cache_memory=ByteSize(0), image_cache=ByteSize(nbytes))
    for number in (1, 2, 2, 1):
        ask(kept, TEXT, ("image", number, 16), TEXT)
        serve(kept)
    assert kept.engine.num_encoded == encoded


# -- while rows decode ---------------------------------------------------------------------------


def test_a_slice_and_a_chunk_take_turns_while_rows_decode() -> None:
    busy = seeing(prefill_step_size=8)
    ask(busy, (1, 2), max_tokens=100)
    run(busy, 3)
    ask(busy, ("image", 1, 16), TEXT)
    ask(busy, (7,) * 200)
    run(busy, 2)
    decode(busy)
    kinds = [(bool(plan.encode), bool(plan.prefill)) for plan in plans(busy, 4) if plan.decode]
    assert kinds[:4] == 2 * [(True, False), (False, True)]


def test_idle_steps_do_both() -> None:
    idle = seeing(prefill_step_size=8)
    ask(idle, ("image", 1, 16), TEXT)
    ask(idle, (7,) * 200)
    run(idle, 2)
    decode(idle)
    assert all(plan.encode and plan.prefill for plan in plans(idle, 2))


def test_slices_stay_under_the_stall_bound() -> None:
    budget = EncoderBudget(stall_s=0.2)
    assert budget.pieces(100, busy=True) == 1
    budget.measured(pieces=1, tokens=100, seconds=0.02)
    assert budget.pieces(100, busy=True) == 10
    assert budget.pieces(1000, busy=True) == 1
    assert budget.pieces(100, busy=False) == 25
    assert budget.pieces(10**6, busy=True) == 1
