"""An engine without MLX for the simulated world: async, on the virtual clock, with made-up but
deterministic tokens."""

from __future__ import annotations

import json
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import trio

from tests.fake_digests import Diary, Held
from tests.images import FakeLayout
from trouper.actors.scheduling.image_identity import identity_tokens
from trouper.protocol.blocks import Tensor, Tensors
from trouper.protocol.grammar import FollowedGrammar, Grammar
from trouper.protocol.kv import FIRST_BANK, BankStats, KvLayout, bank_level, kv_capacity
from trouper.protocol.media import ItemId, MediaSpan, chunk_end
from trouper.protocol.model import (
    AdapterCard,
    AdapterPlan,
    EmbeddingLayout,
    InfillTokens,
    LoadedModel,
    MemoryStats,
    ModelCard,
)
from trouper.protocol.plan_channel import PlanReceiver
from trouper.protocol.plans import (
    Admit,
    BlockId,
    Breakers,
    Chunk,
    Plan,
    Restore,
    RowId,
    Stepped,
    Store,
)
from trouper.protocol.problems import bad_request
from trouper.protocol.ranks import Joined
from trouper.protocol.replies import TokenLogprobs
from trouper.protocol.requests import PairTokens

EOS = 256
SLACK = 2 * 16
"""Tokens that two steps can have accepted beyond what a plan knew."""
DIMENSIONS = 4


class ByteTokenizer:
    """Token id = byte; 256 ends the answer."""

    eos_token_ids = frozenset({EOS})
    grammar_end: int | None = None
    has_chat_template = True

    longest_token = 1

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int]:
        return (*first.encode(), *second.encode()), len(first.encode())

    def encode_batch(self, texts: Sequence[str | tuple[str, str]]) -> list[PairTokens]:
        return [
            (self.encode(text), 0) if isinstance(text, str) else self.encode_pair(*text)
            for text in texts
        ]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> str | None:
        return None

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> tuple[int, ...]:
        return self.encode(
            "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"
        )

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b""

    def token_text(self, token: int) -> str:
        return chr(token) if token < EOS else "<eos>"

    thinking = ("<think>", "</think>")

    def marker_tokens(self, marker: str) -> tuple[int, ...]:
        return tuple(marker.encode())

    calling = ("<call>", "</call>")
    tool_parser: str | None = "fake"
    unread_calls = False
    reasoning_parser: str | None = "think"

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        call = json.loads(text)
        return [(call["name"], json.dumps(call["arguments"]))]

    infill: InfillTokens | None = None

    def breakers(self, breakers: tuple[str, ...]) -> Breakers:
        from trouper.engine.loading.sequence_breakers import breakers_of

        return breakers_of(
            breakers, [self.token_bytes(token) for token in range(EOS + 1)], self.encode
        )

    ignored: tuple[str, ...] = ()
    """What is dropped of each grammar."""

    def compile_grammar(self, grammar: Grammar, timeout_s: float = 1.0) -> FollowedGrammar:
        if grammar.source == "wrong":
            raise bad_request(
                f"{grammar.param} cannot be followed: it is wrong", grammar.param, "invalid_grammar"
            )
        return FollowedGrammar(attrs.evolve(grammar, strict=True), self.ignored)

    def known_grammar(self, grammar: Grammar) -> FollowedGrammar | None:
        return None


MARKS = InfillTokens(prefix=1, suffix=2, middle=3, ends=(1, 2, 3))


class Infilling(ByteTokenizer):
    """Of a model that was trained to fill in the middle."""

    infill: InfillTokens | None = MARKS


class Ranking(Infilling):
    """With a token for yes and one for no."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return {"yes": (4,), "no": (5,)}.get(text) or super().encode(text, special=special)


TokenAt = Callable[[int, int], int]
"""(a number made of the prompt, position) to the token there."""


def letters(key: int, position: int) -> int:
    return 97 + (key + 7 * position) % 26


Tokens = tuple[int, ...]
Guess = Callable[[int, int], tuple[int, int]]
"""(a number made of the prompt, position) to how many tokens a row would draft there, and how many
of them are right."""


def nothing(key: int, position: int) -> tuple[int, int]:
    return 0, 0


@attrs.define
class FakeRow:
    """A row whose next token depends on its prompt and position only. Its KV is the list of tokens
    that were run."""

    prompt: Tokens
    key: int
    logprobs: int | None
    kv: list[int] = attrs.field(factory=list)
    last: int = 0
    """What the next decode step runs."""
    position: int = 0
    """Tokens that it has sampled, those before it resumed among them."""
    begun: bool = False
    """It decodes."""
    prompt_logprobs: int | None = None
    embed: bool = False
    drafts: bool = False
    logprob_tokens: tuple[int, ...] = ()
    media: tuple[MediaSpan, ...] = ()

    @property
    def right_kv(self) -> Tokens:
        """KV of the whole prompt: identity tokens in the place of images."""
        return seen(self.prompt, self.media)

    def alternatives(self, count: int) -> tuple[array[int], array[float]]:
        ids = self.logprob_tokens or range(97, 97 + count)
        values = [-0.5 - (self.key + 3 * token) % 7 for token in self.logprob_tokens]
        return array("i", ids), array("f", values or [-0.5 - k for k in range(count)])


def seen(prompt: Tokens, media: Sequence[MediaSpan]) -> Tokens:
    tokens = list(prompt)
    for span in media:
        tokens[span.start : span.end] = identity_tokens(span.digest, len(span.tokens)).tolist()
    return tuple(tokens)


class EngineDied(Exception):
    """Some rows together, or one alone, are more than this engine bears."""


Dies = Callable[[Sequence[FakeRow]], bool]
"""From the rows that work in a step to whether it crashes."""


def immortal(rows: Sequence[FakeRow]) -> bool:
    return False


def deadly(rows: Sequence[FakeRow]) -> bool:
    """Every request crashes it; it is alive all the same, so that the next scheduler finds it
    well."""
    return any(row.prompt != PROOF for row in rows)


PROOF = (0,)
"""The prompt with which a scheduler tries the engine after a crash."""
CUTTABLE = KvLayout(token_bytes=100, capacity_step=16)
UNCUTTABLE = KvLayout(token_bytes=100, snapshot_bytes=1000, capacity_step=16)


def card(context_length: int = 4096, kv: KvLayout = CUTTABLE) -> ModelCard:
    return ModelCard(
        id="fake",
        created=1_700_000_000,
        context_length=context_length,
        vocab_size=EOS + 1,
        architecture="fake",
        dtype="float32",
        weights_bytes=0,
        device="simulated",
        kv=kv,
        cache_bytes=1_000_000,
        fingerprint="fa4e",
        embedding=EmbeddingLayout(DIMENSIONS, "mean"),
    )


@attrs.define(eq=False)
class FakeEngine:
    """Follows the protocol of plans.py: answers plan n-1 when plan n has arrived, and counts what
    it holds.

    KV is tokens, so that a wrong restore is seen at once: what comes from a block, a row or the
    disk must be the prompt's own beginning.

    Rows that may draft do as `Guess` says; how much of it is right is drawn from their keys.

    `before_step` is awaited before each plan with work: sleep there to be slow, raise there to
    crash. `dies` makes it crash by what the step's rows are, with a `death`.
    """

    before_step: Callable[[Plan], Awaitable[None]] | None = None
    dies: Dies = immortal
    death: type[Exception] = EngineDied
    token_at: TokenAt = letters
    guess: Guess = nothing
    tokenizer: ByteTokenizer = attrs.field(factory=ByteTokenizer)
    rows: dict[RowId, FakeRow] = attrs.field(factory=dict)
    stats: MemoryStats = attrs.field(
        factory=lambda: MemoryStats(active_bytes=0, spare_bytes=0, limit_bytes=1)
    )
    plans_seen: list[Plan] = attrs.field(factory=list)
    kv: KvLayout = CUTTABLE
    blocks: dict[BlockId, Tokens] = attrs.field(factory=dict)
    snapshots: dict[BlockId, Tokens] = attrs.field(factory=dict)
    """All tokens up to it."""
    encoding: dict[ItemId, int] = attrs.field(factory=dict)
    """Pieces that were run of each image's encoder."""
    vectors: dict[ItemId, MediaSpan] = attrs.field(factory=dict)
    """A place of each encoded image."""
    blind: Callable[[bytes], bool] = lambda digest: False
    """Digests of images whose encoder fails."""
    leads: bool = True
    num_encoded: int = 0
    restored_tokens: int = 0
    held: tuple[int, int] = (0, 0)
    """Blocks and snapshots when the last session ended."""
    held_images: tuple[int, int] = (0, 0)
    """Images between two slices, and bytes of vectors, then."""
    diary: Diary = attrs.field(factory=Diary)
    adapter_plan: AdapterPlan = attrs.field(factory=AdapterPlan)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def join(self, invitation: bytes) -> Joined:
        return Joined()

    async def load(self) -> LoadedModel:
        return LoadedModel(card(kv=self.kv), self.tokenizer)

    async def plan_adapter(self, name: str, directory: str) -> AdapterPlan:
        await trio.lowlevel.checkpoint()
        return self.adapter_plan

    async def load_adapter(self, name: str, directory: str) -> AdapterCard:
        await trio.lowlevel.checkpoint()
        return AdapterCard(
            name=name, directory=directory, rank=1, fingerprint=f"files of {directory}"
        )

    async def unload_adapter(self, name: str) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    def memory(self) -> MemoryStats:
        return self.stats

    async def step(self, plans: PlanReceiver, results: trio.MemorySendChannel[Stepped]) -> None:
        self._forget()
        try:
            await self._answer(plans, results)
            assert not self.rows, "the scheduler ended without dropping every row"
        finally:
            self._forget()

    def _forget(self) -> None:
        self.held = len(self.blocks), len(self.snapshots)
        vector_bytes = sum(map(bytes_of_vectors, self.vectors.values()))
        self.held_images = len(self.encoding) - len(self.vectors), vector_bytes
        self.rows.clear()
        self.blocks.clear()
        self.snapshots.clear()
        self.encoding.clear()
        self.vectors.clear()
        self.diary = Diary()

    async def _answer(self, plans: PlanReceiver, results: trio.MemorySendChannel[Stepped]) -> None:
        pending: Stepped | None = None
        async for plan in plans:
            self.plans_seen.append(plan)
            blocks = (*self.blocks, *self.snapshots)
            self.diary.compare(plan, self.holds(), blocks, self.encoding)
            began = trio.current_time()
            if plan.has_work and self.before_step is not None:
                await self.before_step(plan)
            stepped = self.diary.note(
                self._compute(plan, trio.current_time() - began), self.holds()
            )
            if pending is not None:
                results.send_nowait(pending)
            pending = stepped if plan.has_work else None
            if pending is None:
                results.send_nowait(stepped)
        assert pending is None, "the scheduler ended without flushing the pipeline"

    def holds(self) -> dict[RowId, Held]:
        return {name: Held(len(row.kv), row.begun) for name, row in self.rows.items()}

    def _compute(self, plan: Plan, seconds: float) -> Stepped:
        self._change(plan)
        encoded, unencoded = self._encode(plan)
        begun = {name for name, row in self.rows.items() if row.begun}
        if plan.has_work:
            assert begun == {*plan.decode}, (
                "every row decodes, once its prompt was prefilled and until it is dropped"
            )
        working = {*plan.decode, *(chunk.row for chunk in plan.prefill)}
        if self.dies([self.rows[row] for row in sorted(working)]):
            raise self.death("in the middle of a step")
        scores = tuple(score for chunk in plan.prefill for score in self._scores(chunk))
        ended = tuple(chunk.row for chunk in plan.prefill if self._prefill(chunk))
        vectors = tuple(
            (row, self._vector(self.rows[row])) for row in ended if self.rows[row].embed
        )
        drafted = tuple(self._drafted(plan))
        right = {row: accepted for row, _, accepted in drafted}
        once = plan.decode + tuple(row for row in ended if not self.rows[row].embed)
        produced = tuple(row for row in once for _ in range(1 + right.get(row, 0)))
        tokens = tuple(self._next_token(self.rows[row]) for row in produced)
        matched = tuple(self._matched(plan)) if plan.watch else ()
        wanted = tuple(
            (row, TokenLogprobs(token, -0.5, *self.rows[row].alternatives(n)))
            for row, token in zip(produced, tokens, strict=True)
            if (n := self.rows[row].logprobs) is not None
        )
        persisted = tuple(map(self._payload, plan.persist))
        return Stepped(
            plan.step,
            produced,
            tokens,
            wanted,
            seconds,
            persisted,
            (),
            scores,
            vectors,
            drafted,
            matched=matched,
            banks=self._banks() if plan.report_banks else None,
            encoded=encoded,
            unencoded=unencoded,
            encode_s=seconds / 2 if plan.encode else 0.0,
        )

    def _encode(self, plan: Plan) -> Encoded:
        """Run pieces of images. Returns the complete ones, and those that failed."""
        encoded, unencoded = [], []
        for order in plan.encode:
            begins = order.item not in self.encoding and self.leads
            assert begins == (order.pixels is not None), "pixels come once, first, to rank 0"
            assert order.item not in self.vectors, "an image is encoded twice"
            self.encoding[order.item] = pieces = self.encoding.get(order.item, 0) + order.pieces
            num_pieces = FakeLayout().num_pieces(order.span.shape)
            assert pieces <= num_pieces, "more pieces than there are"
            assert order.last == (pieces == num_pieces), "the last piece is known as such"
            if pieces < num_pieces:
                continue
            if self.blind(order.span.digest):
                unencoded.append((order.item, "its vectors are no numbers"))
                continue
            self.num_encoded += 1
            self.vectors[order.item] = order.span
            encoded.append((order.item, bytes_of_vectors(order.span)))
        return tuple(encoded), tuple(unencoded)

    def _banks(self) -> tuple[BankStats, ...]:
        """As if rows of like length shared buffers."""
        lengths: dict[int, list[int]] = {}
        for row in self.rows.values():
            length = max(len(row.prompt), len(row.kv))
            lengths.setdefault(bank_level(length), []).append(length)
        banks = []
        for level, found in sorted(lengths.items()):
            capacity, slots = kv_capacity(max(found)), 1 << (len(found) - 1).bit_length()
            banks.append(
                BankStats(
                    max_tokens=FIRST_BANK << level,
                    capacity_tokens=capacity,
                    rows=len(found),
                    slots=slots,
                    bytes=self.kv.token_bytes * capacity * slots,
                )
            )
        return tuple(banks)

    def _drafted(self, plan: Plan) -> Iterator[tuple[RowId, int, int]]:
        for row, most in zip(plan.decode, plan.drafts, strict=bool(plan.drafts)):
            if most:
                assert self.rows[row].drafts, "it was never told that it may"
                guessed, right = self.guess(self.rows[row].key, self.rows[row].position)
                if guessed := min(guessed, most):
                    yield row, guessed, min(right, guessed)

    def _matched(self, plan: Plan) -> Iterator[tuple[RowId, int]]:
        for row in plan.decode:
            if self.rows[row].drafts and (
                guessed := self.guess(self.rows[row].key, self.rows[row].position)[0]
            ):
                yield row, 8 * guessed

    @staticmethod
    def _vector(row: FakeRow) -> bytes:
        """As long as DIMENSIONS, of length one."""
        made = np.asarray([1 + row.key % 7, len(row.prompt), row.prompt[0], row.prompt[-1]], "<f4")
        return bytes((made / np.linalg.norm(made)).astype("<f4").data)

    def _scores(self, chunk: Chunk) -> list[tuple[RowId, TokenLogprobs]]:
        row = self.rows[chunk.row]
        if row.prompt_logprobs is None:
            return []
        following = row.prompt[len(row.kv) + 1 : len(row.kv) + chunk.tokens + 1]
        return [(chunk.row, TokenLogprobs(token, -0.25)) for token in following]

    def _change(self, plan: Plan) -> None:
        """Everything but computing, in the order of plans.py."""
        for item in plan.forget:
            assert item in self.encoding, "an image that the engine does not know"
            del self.encoding[item]
            self.vectors.pop(item, None)
        for block in plan.evict:
            assert (self.blocks.pop(block, None) is None) != (
                self.snapshots.pop(block, None) is None
            )
        for store in plan.store:
            self._store(store)
        for dropped in plan.drop:
            del self.rows[dropped]
        for load in plan.load:
            tokens = ints(load.payload[0].data)
            (self.snapshots if load.payload[0].dtype == "U8" else self.blocks)[load.block] = tokens
        for admit in plan.admit:
            prompt = ints(admit.prompt)
            key = self.key_of(admit, prompt[: len(prompt) - admit.num_output_tokens])
            row = FakeRow(
                prompt,
                key,
                admit.logprobs,
                position=self._resumed(prompt, key, admit),
                prompt_logprobs=admit.prompt_logprobs,
                embed=admit.embed is not None,
                drafts=admit.drafts,
                logprob_tokens=admit.logprob_tokens,
                media=admit.media,
            )
            assert admit.restore is None or admit.prompt_logprobs is None, (
                "the prompt's logits are wanted"
            )
            if admit.restore is not None:
                row.kv += self._restored(admit, admit.restore)
                self.restored_tokens += admit.restore.tokens
            self.rows[admit.row] = row

    def key_of(self, admit: Admit, prompt: Tokens) -> int:
        """The number on which the row's tokens depend; `prompt` is without what the row has
        sampled."""
        return sum(prompt)

    def _resumed(self, prompt: Tokens, key: int, admit: Admit) -> int:
        """How many tokens it has sampled, which must be those that it would have sampled here."""
        count = admit.num_output_tokens
        assert prompt[len(prompt) - count :] == tuple(
            self.token_at(key, place) for place in range(count)
        )
        assert not (count and admit.prompt_logprobs is not None), (
            "its prompt was scored before its first token"
        )
        return count

    def _store(self, store: Store) -> None:
        kv = self.rows[store.row].kv
        end = store.start + sum(store.sizes)
        assert end <= len(kv), "more is stored than was computed (F2)"
        at = store.start
        for size, block in zip(store.sizes, store.blocks, strict=True):
            assert block not in self.blocks
            self.blocks[block] = tuple(kv[at : at + size])
            at += size
        if store.snapshot is not None:
            assert len(kv) - SLACK <= end <= len(kv), (
                "a snapshot is of now, or of what rings still hold"
            )
            self.snapshots[store.snapshot] = tuple(kv[:end])

    def _restored(self, admit: Admit, restore: Restore) -> list[int]:
        kv = [token for block in restore.blocks for token in self.blocks[block]]
        if restore.source is not None:
            kv += self.rows[restore.source].kv[len(kv) : restore.tokens]
        assert len(kv) >= restore.tokens, "fewer tokens than promised (F6)"
        kv = kv[: restore.tokens]
        expected = seen(ints(admit.prompt), admit.media)[: restore.tokens]
        assert tuple(kv) == expected, "somebody else's KV"
        assert restore.tokens < len(ints(admit.prompt)), "nothing is left to compute (F3)"
        if self.kv.needs_snapshots:
            assert restore.snapshot is not None and self.snapshots[restore.snapshot] == tuple(kv), (
                "the wrong state"
            )
        return kv

    def _payload(self, block: BlockId) -> Tensors:
        kind, tokens = (
            ("I32", self.blocks[block]) if block in self.blocks else ("U8", self.snapshots[block])
        )
        data = np.asarray(tokens, "<i4").tobytes()
        return (Tensor(kind, (len(tokens) if kind == "I32" else len(data),), data),)

    def _prefill(self, chunk: Chunk) -> bool:
        """Whether the prompt ended in this step."""
        row = self.rows[chunk.row]
        assert chunk.tokens > 0
        begin, end = len(row.kv), len(row.kv) + chunk.tokens
        assert chunk_end(row.media, begin, end) == end, "a chunk ends inside an atomic span"
        row.kv += self._computed(row, begin, end, chunk)
        assert len(row.kv) <= len(row.prompt), "more prefill than prompt"
        assert tuple(row.kv) == row.right_kv[: len(row.kv)], "the vectors of another image"
        if len(row.kv) < len(row.prompt):
            return False
        if not row.embed:
            row.last = row.kv.pop()  # The last one is decoded.
        return True

    def _computed(self, row: FakeRow, begin: int, end: int, chunk: Chunk) -> Tokens:
        """KV of prompt[begin:end], made of the vectors of the chunk's images."""
        tokens, items = list(row.prompt), list(chunk.items)
        for span in row.media:
            if begin < span.end and span.start < end:
                digest = self.vectors[items.pop(0)].digest
                size = len(span.tokens)
                tokens[span.start : span.end] = identity_tokens(digest, size).tolist()
        assert not items, "images that the chunk does not touch"
        return tuple(tokens[begin:end])

    def _next_token(self, row: FakeRow) -> int:
        row.kv.append(row.last)
        row.position += 1
        row.begun = True
        row.last = self.token_at(row.key, row.position - 1)
        return row.last


Encoded = tuple[tuple[tuple[ItemId, int], ...], tuple[tuple[ItemId, str], ...]]
"""Items and their bytes; items without vectors, and why."""


def bytes_of_vectors(span: MediaSpan) -> int:
    return 10 * span.num_embedded


def ints(data: bytes | memoryview) -> Tokens:
    return tuple(np.frombuffer(data, "<i4").tolist())
