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

from trouper.protocol.blocks import Payload
from trouper.protocol.grammar import Grammar
from trouper.protocol.ranks import Digest
from trouper.protocol.replies import TokenLogprobs
from trouper.protocol.sampling import Sampling
from trouper.protocol.work import Run

RowId = NewType("RowId", int)
BlockId = NewType("BlockId", int)
"""Names a stored block, or a stored snapshot. Never used again for another."""

Pooling = Literal["mean", "last", "first"]
"""Which tokens' hidden states make the vector of a prompt."""
PLANS_IN_FLIGHT = 2
"""One that computes and one whose tokens are about to be read."""


@attrs.frozen
class Store:
    """Copy what a live row's KV holds, before this plan changes anything. blocks[i] gets sizes[i] tokens, from `start` on."""

    row: RowId
    start: int
    sizes: tuple[int, ...]
    blocks: tuple[BlockId, ...]
    snapshot: BlockId | None = None
    """A copy of rings and states as they are after start + sum(sizes) tokens: the row's length, or what it was two steps
    with drafts ago."""


@attrs.frozen
class Restore:
    """What of a new row's prompt need not be computed: `tokens` of it, from blocks (the last perhaps in part), then from
    the KV of a live row."""

    tokens: int
    blocks: tuple[BlockId, ...] = ()
    source: RowId | None = None
    snapshot: BlockId | None = None


@attrs.frozen
class Load:
    """Bytes from disk become a block, or a snapshot. To other ranks no bytes travel: each takes its own, of what it has
    read for `ticket` the piece at `place`, or that one's snapshot."""

    block: BlockId
    payload: Payload
    ticket: int = -1
    place: int = 0
    snapshot: bool = False


@attrs.frozen
class ThinkingLimit:
    """After so many `tokens` of thinking a row writes `end`. `start` and `end` are what thinking stands between."""

    tokens: int
    start: tuple[int, ...]
    end: tuple[int, ...]
    begun: bool = False
    """The prompt has opened the thinking."""


@attrs.frozen
class Admit:
    """A row enters the engine, for the first time or again. `prompt` is little-endian int32 bytes, the cheap way to carry
    many tokens. A row that has left the engine and resumes brings its output tokens as the end of `prompt`."""

    row: RowId
    prompt: bytes
    sampling: Sampling
    logprobs: int | None = None
    restore: Restore | None = None
    grammar: Grammar | None = None
    min_tokens: int = 0
    """None of `ends` is sampled before so many tokens."""
    ends: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    """Answer each of its chunks with the log-probabilities of the prompt's tokens; then nothing is restored."""
    thinking: ThinkingLimit | None = None
    embed: Pooling | None = None
    """No token is sampled: the prompt's vector comes with its last chunk, and the row waits to be dropped."""
    drafts: bool = False
    """It may draft, so the engine remembers what stands where in its prompt and its answer."""
    num_output_tokens: int = 0
    """Trailing tokens of `prompt` that the row has sampled already. They count as output for everything that tells prompt
    and output apart: the position that keys the next draw, penalties, `min_tokens`, the grammar, the thinking limit."""


@attrs.frozen
class Chunk:
    """Prefill this many more of the tokens in the row's `Admit.prompt`. With the last of them the row samples a token."""

    row: RowId
    tokens: int


@attrs.frozen
class Plan:
    """One step. Order within it: evict, store, drop, load, admit, decode one token for each of `decode`, prefill the
    chunks, persist."""

    step: int
    drop: tuple[RowId, ...] = ()
    admit: tuple[Admit, ...] = ()
    decode: tuple[RowId, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    release_memory: bool = False
    """Give the allocator's spare buffers back to the system before this step."""
    evict: tuple[BlockId, ...] = ()
    """Blocks and snapshots to forget."""
    store: tuple[Store, ...] = ()
    load: tuple[Load, ...] = ()
    persist: tuple[BlockId, ...] = ()
    """Blocks and snapshots whose bytes are wanted with the answer."""
    persist_as: Run | None = None
    """As what the disk will know them, so that each rank can write its own."""
    settled: tuple[int, ...] = ()
    """With several ranks: tickets of reads of which no later plan loads anything."""
    drafts: tuple[int, ...] = ()
    """For each of `decode`: how many tokens the engine may draft for it and verify in this step; () means none for all.
    What it drafts follows from the row's tokens alone."""
    watch: bool = False
    """Say in `Stepped.matched` which rows repeat something."""
    digest: Digest | None = None
    """With several ranks: what the engine's state must be before it launches this. RankMirror adds it."""

    @property
    def has_work(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def fresh_rows(self) -> frozenset[RowId]:
        """Rows that enter or prefill."""
        return frozenset([*(admit.row for admit in self.admit), *(chunk.row for chunk in self.prefill)])

    @property
    def rows(self) -> frozenset[RowId]:
        """Rows that it computes something for, or brings in."""
        return self.fresh_rows.union(self.decode)

    @property
    def changes(self) -> bool:
        """Whether it does anything besides computing."""
        return bool(
            self.drop or self.admit or self.evict or self.store or self.load or self.persist or self.release_memory
            or self.settled
        )  # fmt: skip


@attrs.frozen
class Stepped:
    """What a plan produced: a token for each decoded row and for each row whose prompt ended in this step. A row whose
    drafts were accepted is named once for each of its tokens, in their order.

    `decode_s` and `prefill_s` are measured seconds of device time, as far as the device lets them
    be told apart; they size the next chunks.
    """

    step: int
    rows: tuple[RowId, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[tuple[RowId, TokenLogprobs], ...] = ()
    seconds: float = 0.0
    """From launch, or from the end of the previous step if that was later, to this step's tokens."""
    persisted: tuple[Payload, ...] = ()
    """One for each of the plan's `persist`, in order."""
    failed: tuple[tuple[RowId, str], ...] = ()
    """Rows that cannot go on, and why: a grammar that became too complex."""
    prompt_logprobs: tuple[tuple[RowId, TokenLogprobs], ...] = ()
    """Of prompts' tokens, in order, for rows that asked."""
    embedded: tuple[tuple[RowId, bytes], ...] = ()
    """Vectors of prompts that ended in this step, as little-endian float32."""
    drafted: tuple[tuple[RowId, int, int], ...] = ()
    """(row, tokens drafted, tokens of those accepted), for rows that had drafts."""
    matched: tuple[tuple[RowId, int], ...] = ()
    """If the plan asked: (row, how many of its last tokens stand somewhere before, or were foretold by what stood there),
    for rows that have something to draft."""
    order: int = 0
    """With a digest in its plan: `ranks.sequence` of the rows in their slots, then how many of them decode, after this step
    was launched."""
    tokens_hash: int = 0
    """With a digest in its plan: `ranks.sequence` of this step's `rows` and `tokens`, before them the step before's hash."""
