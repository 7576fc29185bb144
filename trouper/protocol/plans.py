"""The ordered stream of plans from Scheduler to ModelStepper, and what comes back.

A plan is everything that one engine step does. It is deterministic: clocks, randomness, withdrawal
and every choice of size have already been turned into data, so that another rank that replays the
same plans computes the same thing. Protocol: each plan is answered by one `Stepped`, in order, and
at most `PLANS_IN_FLIGHT` are unanswered. The engine launches plan n before it reads the tokens of
plan n-1, so it may answer n-1 only when n has arrived; a plan without work flushes the pipeline.
"""

from __future__ import annotations

from typing import Literal, NewType

import attrs

from trouper.protocol.blocks import Tensors
from trouper.protocol.grammar import Grammar
from trouper.protocol.kv import BankStats
from trouper.protocol.ranks import Digest
from trouper.protocol.replies import TokenLogprobs
from trouper.protocol.sampling import Sampling
from trouper.protocol.work import Run

RowId = NewType("RowId", int)
NO_ROW = RowId(-1)
"""The id of no row."""
BlockId = NewType("BlockId", int)
"""Id of a stored block or a stored snapshot. An id is never reused."""

ProposerName = Literal["ngram", "draft_model", "mtp"]
"""What drafts: the row's own n-grams, the draft model, or the model's own MTP head."""
Pooling = Literal["mean", "mean_sqrt", "last", "first", "max", "weighted"]
"""Tokens whose hidden states are pooled into the vector of a prompt."""
PLANS_IN_FLIGHT = 2
"""Maximum number of unanswered plans: one that the device computes, and one whose tokens are read
next."""


@attrs.frozen
class RowFault:
    """Why a row cannot continue: what failed, and the reason."""

    kind: Literal["not_a_number", "grammar", "logits_processor", "no_choice"]
    reason: str


NOT_A_NUMBER = RowFault(
    "not_a_number",
    "the model has computed no numbers (NaN) for this text: it overflows, or its weights are "
    "damaged",
)
"""Fault of a row whose keys and values are of no use to anybody."""
NO_CHOICE = RowFault("no_choice", "no token is left to choose")
"""Fault of a row for which all tokens are forbidden: one parameter of its request does that, or
several do it together."""


@attrs.frozen
class Store:
    """Copy KV of a live row into blocks, before this plan changes anything. blocks[i] gets sizes[i]
    tokens, from `start` on."""

    row: RowId
    start: int
    sizes: tuple[int, ...]
    blocks: tuple[BlockId, ...]
    snapshot: BlockId | None = None
    """Id of a copy of rings and states as of start + sum(sizes) tokens: the row's length, or its
    length two steps with drafts ago."""


@attrs.frozen
class Restore:
    """The part of a new row's prompt that need not be computed: `tokens` tokens, from blocks (the
    last one possibly in part), then from the KV of the live row `source`."""

    tokens: int
    blocks: tuple[BlockId, ...] = ()
    source: RowId | None = None
    snapshot: BlockId | None = None


@attrs.frozen
class Load:
    """Bytes from disk become a block or a snapshot. No bytes travel to other ranks: each rank uses
    its own shard, which is the block at `index` (or the snapshot of that block) of the read with
    this `ticket`."""

    block: BlockId
    payload: Tensors
    ticket: int = -1
    index: int = 0
    snapshot: bool = False


@attrs.frozen
class ThinkingLimit:
    """Limit on a row's reasoning: after `tokens` tokens of it the row writes `end`. `start` and
    `end` are the markers around reasoning."""

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    begun: bool = False
    """Whether the prompt already contains the start marker."""


@attrs.frozen
class Breakers:
    """Sequence breakers of DRY as tokens."""

    tokens: bytes = b""
    """Tokens that contain one, as little-endian int32."""
    sequences: tuple[tuple[int, ...], ...] = ()
    """Tokens over which one is spread; the first may begin before it."""


@attrs.frozen
class Admit:
    """A row enters the engine, for the first time or again. `prompt` is little-endian int32 bytes,
    the cheap way to carry many tokens. A row that has left the engine and resumes brings its output
    tokens as the end of `prompt`."""

    row: RowId
    prompt: bytes
    sampling: Sampling
    logprobs: int | None = None
    restore: Restore | None = None
    grammar: Grammar | None = None
    min_tokens: int = 0
    """Minimum number of output tokens before any token of `ends` may be sampled."""
    ends: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    """Number of most likely tokens for the log-probabilities of prompt tokens, which are answered
    chunk by chunk; then nothing is restored. None: no such log-probabilities."""
    thinking: ThinkingLimit | None = None
    embed: Pooling | None = None
    """Pooling of the prompt's vector, which comes with the last chunk. No token is sampled, and the
    row waits to be dropped."""
    drafts: bool = False
    """Whether the row may draft by prompt lookup, in which case the engine indexes the n-grams of
    its prompt and output. A draft model and a head need no announcement."""
    logprob_tokens: tuple[int, ...] = ()
    """Tokens whose log-probabilities are returned in place of those of the most likely ones. Only
    with `logprobs`."""
    breakers: Breakers | None = None
    """Sequence breakers of a row with DRY."""
    logits_processors: tuple[str, ...] = ()
    """Names of the embedding program's functions that change the row's logits, in order."""
    adapter: str = ""
    """Name of the row's LoRA adapter; "": none."""
    num_output_tokens: int = 0
    """Trailing tokens of `prompt` that the row has sampled already. They count as output wherever
    prompt and output are distinguished: the position that keys the next draw, penalties,
    `min_tokens`, the grammar, the thinking limit."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of `prompt`."""
        return len(self.prompt) // 4


@attrs.frozen
class Chunk:
    """Prefill the next `tokens` tokens of the row's `Admit.prompt`. With the last token of the
    prompt the row samples a token."""

    row: RowId
    tokens: int


@attrs.frozen
class KvBound:
    """What the buffers of rows may take in a step, where memory is scarce."""

    limit_bytes: int
    """What cached blocks leave of the memory for KV."""
    needed_bytes: int
    """Upper bound of what the rows of the step need, if no buffer has room to spare."""


@attrs.frozen
class Plan:
    """One step of the engine.

    The engine carries out its parts in this order: evict, store, drop, load, admit, prefill the
    chunks, persist, decode one token for each row of `decode` and for each row whose prompt is
    complete. Evicted blocks make room for stored ones. A dropped row can be stored, since stores
    precede drops. Loaded blocks can be restored by an admitted row, and stored ones, too.
    """

    step: int
    drop: tuple[RowId, ...] = ()
    admit: tuple[Admit, ...] = ()
    decode: tuple[RowId, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    release_memory: bool = False
    """Whether to release the allocator's spare buffers to the system before this step."""
    evict: tuple[BlockId, ...] = ()
    """Blocks and snapshots to free."""
    store: tuple[Store, ...] = ()
    load: tuple[Load, ...] = ()
    persist: tuple[BlockId, ...] = ()
    """Blocks and snapshots whose bytes the answer returns."""
    persist_as: Run | None = None
    """Keys under which the disk will store them, so that each rank can write its own shard."""
    settled: tuple[int, ...] = ()
    """Tickets of reads of which no later plan loads anything. Only with several ranks."""
    drafts: tuple[int, ...] = ()
    """Maximum number of tokens to draft and verify in this step for each row of `decode`; () means
    no drafts. The drafted tokens follow from the row's tokens alone."""
    proposers: tuple[ProposerName, ...] = ()
    """What drafts them, for each row of `decode`; () means n-grams for all rows."""
    watch: bool = False
    """Whether `Stepped.matched` reports the rows whose last tokens occurred before."""
    kv_bound: KvBound | None = None
    """Bound of the buffers of rows; None: they may have room to spare."""
    report_banks: bool = False
    """Whether `Stepped.banks` reports the banks. The scheduler requests it once a second, not with
    each step."""
    digest: Digest | None = None
    """State that the engine must have before it launches this plan. RankMirror adds it when there
    are several ranks."""

    @property
    def proposer_of(self) -> dict[RowId, ProposerName]:
        """What drafts for each row of `decode`."""
        ngram: ProposerName = "ngram"
        return dict(zip(self.decode, self.proposers or (ngram,) * len(self.decode), strict=True))

    @property
    def has_work(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def fresh_rows(self) -> frozenset[RowId]:
        """Rows that are admitted or prefill in this plan."""
        return frozenset(
            [*(admit.row for admit in self.admit), *(chunk.row for chunk in self.prefill)]
        )

    @property
    def rows(self) -> frozenset[RowId]:
        """Rows that this plan admits, prefills or decodes."""
        return self.fresh_rows.union(self.decode)

    @property
    def changes(self) -> bool:
        """Whether this plan does anything besides computing tokens."""
        return bool(
            self.drop
            or self.admit
            or self.evict
            or self.store
            or self.load
            or self.persist
            or self.release_memory
            or self.settled
        )


@attrs.frozen
class Stepped:
    """The result of a plan: a token for each decoded row and for each row whose prompt ended in
    this step. A row whose drafts were accepted is named once for each of its tokens, in their
    order.

    `decode_s` and `prefill_s` are measured seconds of device time, as far as the device lets them
    be told apart; they size the next chunks.
    """

    step: int
    rows: tuple[RowId, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[RowId, TokenLogprobs], ...] = ()
    seconds: float = 0.0
    """Seconds from the launch, or from the end of the previous step if that was later, to this
    step's tokens."""
    persisted: tuple[Tensors, ...] = ()
    """Bytes of each block and snapshot of the plan's `persist`, in order."""
    failed: tuple[tuple[RowId, RowFault], ...] = ()
    """Rows that cannot continue. Of several faults of a row the first one tells the cause."""
    prompt_logprobs: tuple[tuple[RowId, TokenLogprobs], ...] = ()
    """Log-probabilities of prompt tokens, in order, for rows that requested them."""
    embedded: tuple[tuple[RowId, bytes], ...] = ()
    """Vectors of prompts that ended in this step, as little-endian float32."""
    drafted: tuple[tuple[RowId, int, int], ...] = ()
    """(row, tokens drafted, tokens of those accepted), for rows that had drafts."""
    draft_s: float = 0.0
    """Seconds of `seconds` that proposers took before the step's own pass was built."""
    preparing: bool = False
    """Whether the device prepared kernels or a graph for this step, or, meanwhile, for the next
    one, so that `seconds` says nothing of later steps."""
    matched: tuple[tuple[RowId, int], ...] = ()
    """If the plan has `watch`: (row, number of its last tokens that occurred before, or that such
    an occurrence predicted), for rows that have something to draft."""
    banks: tuple[BankStats, ...] | None = None
    """If the plan has `report_banks`: the banks after this step was launched, that of the shortest
    rows first."""
    order: int = 0
    """`ranks.sequence` of the rows in their slots and of the number of decoding rows, after this
    step was launched. Only if the plan has a digest."""
    tokens_hash: int = 0
    """`ranks.sequence` of this step's `rows` and `tokens`, seeded with the hash of the previous
    step. Only if the plan has a digest."""
