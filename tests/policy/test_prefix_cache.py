"""The prefix cache as the scheduler uses it: what a prompt need not compute, what goes to the disk,
and whose cache it is."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.actors.bench import generate
from tests.fakes import CUTTABLE, UNCUTTABLE, ByteTokenizer, card
from tests.long_tests import examples
from trouper import Settings
from trouper.actors.runtime.submission import open_submission
from trouper.actors.scheduling.cache_namespace import cache_namespace
from trouper.actors.scheduling.crash_attribution import Content, Standing
from trouper.actors.scheduling.prefix_cache import Found, PrefixCache
from trouper.actors.scheduling.sequence import Sequence
from trouper.actors.scheduling.tree_node import token_bytes
from trouper.protocol.blocks import BlockData, Tensor
from trouper.protocol.health import CacheStats
from trouper.protocol.kv import KvLayout
from trouper.protocol.model import ModelCard
from trouper.protocol.plans import BlockId, Restore, RowId, Store
from trouper.protocol.setting_fields import ByteSize

Tokens = tuple[int, ...]
NAMESPACE = "fa4e" * 16


# -- whose cache it is ---------------------------------------------------------------------------


CARD = card(kv=KvLayout(token_bytes=100, description="100 bytes a token"))
OTHERS: dict[str, tuple[ModelCard, Settings]] = {
    "weights": (attrs.evolve(CARD, fingerprint="other"), Settings()),
    "no fingerprint": (attrs.evolve(CARD, fingerprint=""), Settings()),
    "architecture": (attrs.evolve(CARD, architecture="other"), Settings()),
    "dtype": (attrs.evolve(CARD, dtype="bfloat16"), Settings()),
    "description of KV": (
        attrs.evolve(CARD, kv=attrs.evolve(CARD.kv, description="8 bits")),
        Settings(),
    ),
    "shapes of blocks": (attrs.evolve(CARD, kv=attrs.evolve(CARD.kv, shapes="others")), Settings()),
    "bytes of a token": (attrs.evolve(CARD, kv=attrs.evolve(CARD.kv, token_bytes=50)), Settings()),
    "block size": (CARD, Settings(block_size=32)),
}


def test_f9_whatever_changes_kv_or_its_blocks_is_another_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = cache_namespace(CARD, Settings())
    names = {what: cache_namespace(*other) for what, other in OTHERS.items()}
    monkeypatch.setattr("trouper.actors.scheduling.cache_namespace.FORMAT", 10**6)
    names |= {"itself": own, "format": cache_namespace(CARD, Settings())}
    assert len(set(names.values())) == len(names), names


def test_f9_what_changes_no_kv_is_the_same_namespace() -> None:
    """Restarts with other limits find what was stored."""
    same = [
        Settings(max_queue_size=1),
        Settings(cache_memory=ByteSize(2**30)),
        Settings(seed=7),
        Settings(gather_ms=0),
    ]
    renamed = attrs.evolve(CARD, id="another name", device="another", created=1)
    assert {cache_namespace(renamed, each) for each in same} == {cache_namespace(CARD, Settings())}


# -- what is found -------------------------------------------------------------------------------


@attrs.define
class Played:
    """A cache whose plans are carried out on tokens instead of KV, so that a wrong restore is seen
    at once."""

    cache: PrefixCache
    blocks: dict[BlockId, Tokens] = attrs.field(factory=dict)
    rows: dict[RowId, Sequence] = attrs.field(factory=dict)
    _next: int = 0

    @classmethod
    def of(cls, kv: KvLayout = CUTTABLE, **more: Any) -> Played:
        given = Settings(**{"block_size": 4, **more})
        return cls(PrefixCache.of(card(kv=kv), NAMESPACE, given, CacheStats()))

    def begin(self, tokens: Tokens, salt: str = "", *, prefill: bool = True) -> Found:
        """A row enters; what was found is checked against its prompt."""
        submission, _ = open_submission(generate(max_tokens=9), Settings())
        chain = self.cache.chain(token_bytes(tokens), salt)
        prepared = attrs.evolve(submission, prompt=tokens, max_tokens=9)
        row = Sequence.of(prepared, Standing(Content(b""), b""), ByteTokenizer(), chain)
        row.enter(RowId(self._next))
        self._next += 1
        found = self.cache.look(chain)
        restore = self.cache.enter(row, found)
        self.rows[row.id] = row
        assert found.tokens < len(tokens), "the last token's logits are wanted"
        assert self._restored(restore) == tokens[: found.tokens]
        row.num_unscheduled_tokens -= found.tokens
        if prefill:
            row.num_unscheduled_tokens, row.num_scheduled_tokens = 0, 1
            self._store(self.cache.computed(row))
        self._evict()
        return found

    def leave(self, row: RowId) -> None:
        self._store(self.cache.leave(self.rows[row]))
        del self.rows[row]
        self._evict()

    def say(self, row: RowId, tokens: Tokens) -> None:
        """More of its answer, each token read before the next is planned."""
        one = self.rows[row]
        for token in tokens:
            one.num_scheduled_tokens = one.num_output_tokens + 1
            one.append_token(token, None)

    def _kv(self, row: RowId) -> Tokens:
        one = self.rows[row]
        data = one.chain.part(0, one.num_computed_tokens)
        return tuple(int.from_bytes(data[at : at + 4], "big") for at in range(0, len(data), 4))

    def _restored(self, restore: Restore | None) -> Tokens:
        if restore is None:
            return ()
        kv = tuple(token for block in restore.blocks for token in self.blocks[block])
        if restore.source is not None:
            assert len(self._kv(restore.source)) >= restore.tokens, "more than the row has computed"
            kv += self._kv(restore.source)[len(kv) : restore.tokens]
        return kv[: restore.tokens]

    def _store(self, stores: list[Store]) -> None:
        for store in stores:
            at, kv = store.start, self._kv(store.row)
            for size, block in zip(store.sizes, store.blocks, strict=True):
                self.blocks[block] = kv[at : at + size]
                assert len(self.blocks[block]) == size, "more is stored than was computed"
                at += size

    def _evict(self) -> None:
        for block in self.cache.freed():
            self.blocks.pop(block, None)


def shared(a: Tokens, b: Tokens) -> int:
    return next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=9).flatmap(
    lambda head: st.integers(0, 60).map(lambda more: (*([7] * more), *head))
)
"""They leave each other early and late, in blocks of any size."""


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(TEXTS, st.sampled_from(["", "tenant"]), st.booleans()), max_size=8),
    st.sampled_from([4, 20, 64]),
)
def test_all_that_a_prompt_shares_with_others_is_found(
    texts: list[tuple[Tokens, str, bool]], block_size: int
) -> None:
    """With rows that left and with rows that still run, to the token, and never with another
    tenant's."""
    played, before = Played.of(block_size=block_size), list[tuple[Tokens, str]]()
    for place, (text, salt, leaves) in enumerate(texts):
        best = max((shared(text, other) for other, theirs in before if theirs == salt), default=0)
        assert played.begin(text, salt).tokens == min(best, len(text) - 1)
        if leaves:
            played.leave(RowId(place))
        before.append((text, salt))


def test_an_answer_is_found_by_who_goes_on_with_it() -> None:
    played = Played.of()
    played.begin((1, 2, 3, 4, 5))
    played.say(RowId(0), (6, 7, 8, 9))
    played.leave(RowId(0))
    assert played.begin((1, 2, 3, 4, 5, 6, 7, 8, 9, 10)).tokens == 8, "the last token was never run"


def test_who_prefills_is_waited_for_as_far_as_its_prompt_goes() -> None:
    played = Played.of()
    played.begin((1,) * 30, prefill=False)
    found = played.cache.look(played.cache.chain(token_bytes((1,) * 40), ""))
    assert (found.tokens, found.until, found.gain) == (0, 29, 29)
    assert found.primary is played.rows[RowId(0)]
    played.cache.wait_for(found.primary, found.until)
    assert found.primary.next_chunk == 29, "it pauses where they part"
    assert played.begin((2,) * 30).primary is None


def test_without_memory_nothing_is_kept_or_found() -> None:
    for played in (
        Played.of(cache_memory="0"),
        Played.of(KvLayout(cached=False, description="alone")),
    ):
        for _ in range(2):
            assert played.begin((1,) * 30).tokens == 0
        played.leave(RowId(0))
        assert not played.blocks and played.cache.stats().reason


def test_salts_that_nothing_is_kept_for_are_forgotten() -> None:
    """A client may send another one with each request. What is kept of others is found again."""
    played = Played.of()
    played.begin((1,) * 30, "kept")
    for number in range(100):
        played.cache.chain(token_bytes((1,) * 30), f"salt {number}")
    played.leave(RowId(0))
    assert len(played.cache.tree._roots) == 1
    assert played.begin((1,) * 40, "kept").tokens == 30
    played.leave(RowId(1))
    played.cache.evict(10**9)
    played.begin((2,) * 30, "another")
    assert len(played.cache.tree._roots) == 1


# -- the disk ------------------------------------------------------------------------------------


def saving(**more: Any) -> Played:
    played = Played.of(**more)
    played.cache.saves = True
    return played


def test_a_chain_goes_to_the_disk_once_in_runs_of_bounded_size() -> None:
    played = saving()
    text = tuple(range(1, 43))
    played.begin(text)
    played.leave(RowId(0))
    runs = []
    while (saved := played.cache.writes.next_run(5 * 400)) is not None:
        assert saved.nbytes <= 5 * 400
        assert sum(node.size for node in saved.nodes) * CUTTABLE.token_bytes == saved.nbytes
        runs.append(saved)
    assert b"".join(piece.tokens for run in runs for piece in run.run.blocks) == token_bytes(
        text[:42]
    )
    assert [run.run.parent for run in runs[1:]] == [run.run.blocks[-1].key for run in runs[:-1]]
    played.begin((*text, 50))
    played.leave(RowId(1))
    again = played.cache.writes.next_run(10**9)
    assert again is not None and {piece.key for piece in again.run.blocks}.isdisjoint(
        piece.key for run in runs for piece in run.run.blocks
    ), "what is on its way is not sent again"


@pytest.mark.parametrize("refused", [False, True])
def test_only_what_the_disk_took_is_looked_for_there(refused: bool) -> None:
    played = saving()
    played.begin((1,) * 13)
    played.leave(RowId(0))
    while (run := played.cache.writes.next_run(10**9)) is not None:
        played.cache.saved([piece.key for piece in run.run.blocks], refused=refused)
    played.cache.evict(10**9)
    found = played.cache.look(played.cache.chain(token_bytes((1,) * 30), ""))
    assert (found.tokens, found.missing_tokens) == (0, 0 if refused else 13)


def test_what_was_loaded_is_believed_only_for_its_own_tokens() -> None:
    played = saving()
    played.begin((1,) * 8)
    played.leave(RowId(0))
    run = played.cache.writes.next_run(10**9)
    assert run is not None
    keys = [piece.key for piece in run.run.blocks]
    played.cache.saved(keys, refused=False)
    played.cache.evict(10**9)
    payload = (Tensor("I32", (4,), b"0" * 16),)
    wrong = [BlockData(keys[0], token_bytes((2,) * 4), payload)]
    assert played.cache.loaded(1, wrong) == []
    right = [BlockData(key, token_bytes((1,) * 4), payload) for key in keys]
    assert [(load.ticket, load.index) for load in played.cache.loaded(2, right)] == [(2, 0), (2, 1)]
    assert played.cache.look(played.cache.chain(token_bytes((1,) * 9), "")).tokens == 8


def test_where_a_snapshot_is_wanted_a_chunk_ends() -> None:
    """A model that cannot be cut: regularly, where turns end, and before the last token."""
    played = Played.of(UNCUTTABLE, snapshot_tokens=40)
    text = tuple([1] * 29 + [256] + [2] * 70)
    submission, _ = open_submission(generate(max_tokens=9), Settings())
    prepared = attrs.evolve(submission, prompt=text, max_tokens=9)
    chain = played.cache.chain(token_bytes(text), "")
    row = Sequence.of(prepared, Standing(Content(b""), b""), ByteTokenizer(), chain)
    row.enter(RowId(0))
    played.cache.enter(row, played.cache.look(row.chain))
    ends = []
    while row.prefilling:
        ends.append(row.num_computed_tokens + row.next_chunk)
        row.num_unscheduled_tokens -= row.next_chunk
        if not row.num_unscheduled_tokens:
            row.num_scheduled_tokens = 1
    assert ends == [30, 40, 80, 99, 100]
