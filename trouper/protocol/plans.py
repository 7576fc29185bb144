"""Plans from Scheduler to ModelStepper, and the engine's answers."""

# A plan is everything that one engine step does. A plan is deterministic: clocks, randomness,
# withdrawal and sizes are data already, hence a rank that replays the plans computes the same. One
# `Stepped` answers each plan, in order, and at most `PLANS_IN_FLIGHT` are unanswered. The engine
# launches plan n before reading the tokens of plan n-1, and may answer n-1 only when n has arrived;
# a plan without work flushes the pipeline.

from __future__ import annotations

from typing import Literal, NewType

import attrs

from trouper.protocol.blocks import Tensors
from trouper.protocol.grammar import Grammar
from trouper.protocol.kv import BankStats
from trouper.protocol.media import ItemId, MediaSpan, Pixels
from trouper.protocol.ranks import Digest
from trouper.protocol.replies import TokenLogprobs
from trouper.protocol.sampling import Sampling
from trouper.protocol.work import Run

RowId = NewType("RowId", int)
NO_ROW = RowId(-1)
BlockId = NewType("BlockId", int)
"""Id of a stored block or snapshot, never reused."""

ProposerName = Literal["ngram", "draft_model", "mtp"]
"""Source of drafts: the row's n-grams, the draft model, or the model's MTP head."""
Pooling = Literal["mean", "mean_sqrt", "last", "first", "max", "weighted"]
# Maximum of unanswered plans: one on the device, and one whose tokens are read next.
PLANS_IN_FLIGHT = 2


@attrs.frozen
class RowFault:
    kind: Literal["not_a_number", "grammar", "logits_processor", "no_choice"]
    reason: str


# Fault of a row whose KV is worthless.
NOT_A_NUMBER = RowFault(
    "not_a_number",
    "the model has computed no numbers (NaN) for this text: it overflows, or its weights are "
    "damaged",
)
NO_CHOICE = RowFault("no_choice", "no token is left to choose")


@attrs.frozen
class Store:
    """Copy KV of a live row into blocks, before other changes of the plan. blocks[i] gets sizes[i]
    tokens, from `start` on."""

    row: RowId
    start: int
    sizes: tuple[int, ...]
    blocks: tuple[BlockId, ...]
    snapshot: BlockId | None = None
    """Rings and states at start + sum(sizes) tokens: now, or two drafting steps ago."""


@attrs.frozen
class Restore:
    """Prefix of a new row's prompt: `tokens` tokens from blocks (the last possibly in part), then
    from the KV of the live row `source`."""

    tokens: int
    blocks: tuple[BlockId, ...] = ()
    source: RowId | None = None
    snapshot: BlockId | None = None


@attrs.frozen
class Load:
    """Make a block or snapshot of bytes from disk. Each rank uses its own shard: the block at
    `index` (or its snapshot) of the read `ticket`."""

    block: BlockId
    payload: Tensors
    ticket: int = -1
    index: int = 0
    snapshot: bool = False


@attrs.frozen
class ThinkingLimit:
    """After `tokens` reasoning tokens the row writes `end`. `start`, `end`: markers around
    reasoning."""

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    begun: bool = False


@attrs.frozen
class Breakers:
    """`tokens`: each contains a breaker of DRY, as little-endian int32."""

    tokens: bytes = b""
    sequences: tuple[tuple[int, ...], ...] = ()
    """Together one breaker; the first may begin earlier."""


@attrs.frozen
class Admit:
    """A row enters the engine. `prompt`: little-endian int32. A resumed row brings its output as
    the end of `prompt`."""

    row: RowId
    prompt: bytes
    sampling: Sampling
    logprobs: int | None = None
    restore: Restore | None = None
    grammar: Grammar | None = None
    min_tokens: int = 0
    """Minimum of output tokens before any of `ends` is sampled."""
    ends: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    """Number of most likely tokens for the log-probabilities of the prompt, answered chunk by
    chunk; nothing is restored. None: not requested."""
    thinking: ThinkingLimit | None = None
    embed: Pooling | None = None
    """Pooling of the prompt's vector, which comes with the last chunk. The row samples nothing and
    waits for its drop."""
    second_at: int = 0
    """With `embed`: index of a pair's second text in the prompt, for models that tell both
    apart."""
    drafts: bool = False
    """Whether the row drafts by prompt lookup, for which the engine indexes n-grams."""
    logprob_tokens: tuple[int, ...] = ()
    """Instead of the most likely. Only with `logprobs`."""
    breakers: Breakers | None = None
    logits_processors: tuple[str, ...] = ()
    adapter: str = ""
    num_output_tokens: int = 0
    """Trailing tokens of `prompt` that the row has sampled, which count as output."""
    media: tuple[MediaSpan, ...] = ()
    """Images of the prompt, also of its restored part; ascending."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) // 4


@attrs.frozen
class Chunk:
    """Prefill the next `tokens` tokens of `Admit.prompt`. The last chunk samples a token."""

    row: RowId
    tokens: int
    items: tuple[ItemId, ...] = ()
    """Encoded images whose spans the chunk touches, in order."""


@attrs.frozen
class Encode:
    """Run the next `pieces` of an image's encoder (`ImageLayout.num_pieces`). The first order of an
    item brings its pixels; the last one makes its vectors. Only rank 0 has pixels and encoder."""

    item: ItemId
    span: MediaSpan
    pieces: int
    pixels: Pixels | None = None
    last: bool = False
    """Whether the other ranks get the vectors in this step."""


@attrs.frozen
class KvBound:
    limit_bytes: int
    """Without cached blocks."""
    needed_bytes: int
    """Without room to spare."""


@attrs.frozen
class Plan:
    """One step of the engine.

    Order: evict, store, drop, load, admit, encode, prefill, persist, decode one token for each row
    of `decode` and each completed prompt. Evictions make room for stores, a dropped row can still
    be stored, and an admitted row can restore loaded and stored blocks."""

    step: int
    drop: tuple[RowId, ...] = ()
    admit: tuple[Admit, ...] = ()
    decode: tuple[RowId, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    release_memory: bool = False
    """Release the allocator's spare buffers first."""
    evict: tuple[BlockId, ...] = ()
    store: tuple[Store, ...] = ()
    load: tuple[Load, ...] = ()
    persist: tuple[BlockId, ...] = ()
    """The answer returns the bytes."""
    persist_as: Run | None = None
    """Keys on disk of `persist`, by which each rank writes its own shard."""
    settled: tuple[int, ...] = ()
    """Tickets of finished reads. Only with several ranks."""
    drafts: tuple[int, ...] = ()
    """Maximum of tokens to draft and verify for each row of `decode`; () means no drafts."""
    proposers: tuple[ProposerName, ...] = ()
    """() means n-grams."""
    watch: bool = False
    """Whether to report `Stepped.matched`."""
    kv_bound: KvBound | None = None
    report_banks: bool = False
    """Whether to report `Stepped.banks`, about once a second."""
    encode: tuple[Encode, ...] = ()
    forget: tuple[ItemId, ...] = ()
    """Encoded images, or images being encoded, that the engine drops first."""
    digest: Digest | None = None
    """State that the engine must have before the launch. RankMirror adds it."""

    @property
    def proposer_of(self) -> dict[RowId, ProposerName]:
        ngram: ProposerName = "ngram"
        return dict(zip(self.decode, self.proposers or (ngram,) * len(self.decode), strict=True))

    @property
    def has_work(self) -> bool:
        return bool(self.decode or self.prefill or self.encode)

    @property
    def fresh_rows(self) -> frozenset[RowId]:
        return frozenset(
            [*(admit.row for admit in self.admit), *(chunk.row for chunk in self.prefill)]
        )

    @property
    def rows(self) -> frozenset[RowId]:
        return self.fresh_rows.union(self.decode)

    @property
    def changes(self) -> bool:
        """Whether the plan does anything besides computing tokens."""
        return bool(
            self.drop
            or self.admit
            or self.evict
            or self.store
            or self.load
            or self.persist
            or self.release_memory
            or self.settled
            or self.forget
        )


@attrs.frozen
class Stepped:
    """Result of a plan: a token for each decoded row and each completed prompt. A row appears once
    for each token of accepted drafts, in order."""

    step: int
    rows: tuple[RowId, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[RowId, TokenLogprobs], ...] = ()
    seconds: float = 0.0
    """From the launch, or a later end of the previous step."""
    persisted: tuple[Tensors, ...] = ()
    failed: tuple[tuple[RowId, RowFault], ...] = ()
    prompt_logprobs: tuple[tuple[RowId, TokenLogprobs], ...] = ()
    embedded: tuple[tuple[RowId, bytes], ...] = ()
    """Vectors of completed prompts, as little-endian float32."""
    drafted: tuple[tuple[RowId, int, int], ...] = ()
    """(row, tokens drafted, tokens accepted)."""
    draft_s: float = 0.0
    """Before the step's own pass was built."""
    encoded: tuple[tuple[ItemId, int], ...] = ()
    """(item, bytes of its vectors) of images whose last layer the step ran."""
    encode_s: float = 0.0
    """Seconds of the encoder, part of `seconds`."""
    unencoded: tuple[tuple[ItemId, str], ...] = ()
    """(item, reason) of images whose encoder failed, or whose vectors are no numbers."""
    preparing: bool = False
    """The device prepared kernels or a graph: `seconds` predicts nothing."""
    matched: tuple[tuple[RowId, int], ...] = ()
    """With `Plan.watch`: (row, number of last tokens that occurred before or were predicted)."""
    banks: tuple[BankStats, ...] | None = None
    """With `Plan.report_banks`: the banks after the launch, shortest rows first."""
    order: int = 0
    """With a digest: `ranks.sequence` of the rows in slots and the number of decoding rows, after
    the launch."""
    tokens_hash: int = 0
    """With a digest: `ranks.sequence` of `rows` and `tokens`, seeded with the previous hash."""
