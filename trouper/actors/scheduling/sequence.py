"""A prompt and the answer, from the queue to the end. Pure, except for the replies."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Ordered
from enum import Enum
from math import inf
from typing import Protocol

import attrs

from trouper.actors.scheduling.answer_output import AnswerOutput
from trouper.actors.scheduling.crash_attribution import Standing
from trouper.actors.scheduling.draft_estimates import UNCHOSEN, Records
from trouper.actors.scheduling.prefill_budget import Work
from trouper.actors.scheduling.prepared_request import PreparedRequest
from trouper.actors.scheduling.tree_node import Chain, Node
from trouper.protocol.kv import NO_USAGE, KvUsage
from trouper.protocol.media import ItemId, MediaSpan, chunk_end
from trouper.protocol.model import Tokenizer
from trouper.protocol.plans import NO_ROW, RowId
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Finished, Started, TokenLogprobs
from trouper.protocol.requests import BATCH_PRIORITY, Generate
from trouper.protocol.waits import RequestState, WaitReason


class State(Enum):
    WAITING = "waiting"
    WAITING_FOR_PREFIX = "waiting for a prefix"
    """Queued until a running sequence has prefilled a shared prefix."""
    WAITING_FOR_DISK = "waiting for the disk"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    LAST_TOKEN_SCHEDULED = "last token scheduled"  # noqa: S105 - no password.
    """The last token is in flight; the next plan drops the row."""
    PREEMPTED = "preempted"
    """Left the row early; in the queue, or aborted."""
    FINISHED = "finished"


QUEUED = frozenset({State.WAITING, State.WAITING_FOR_PREFIX, State.WAITING_FOR_DISK})
NOTED: Mapping[State, RequestState] = {
    **dict.fromkeys(QUEUED, "queued"),
    State.PREFILLING: "prefilling",
    State.PREEMPTED: "preempted",
}
"""States as the request's history names them. It decodes from its row's first token on, which comes
a step after the last chunk was scheduled."""
TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.WAITING: QUEUED | {State.PREFILLING, State.FINISHED},
    State.WAITING_FOR_PREFIX: QUEUED | {State.PREFILLING, State.FINISHED},
    State.WAITING_FOR_DISK: QUEUED | {State.PREFILLING, State.FINISHED},
    State.PREFILLING: frozenset(
        {State.DECODING, State.LAST_TOKEN_SCHEDULED, State.PREEMPTED, State.FINISHED}
    ),
    State.DECODING: frozenset({State.LAST_TOKEN_SCHEDULED, State.PREEMPTED, State.FINISHED}),
    State.LAST_TOKEN_SCHEDULED: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: QUEUED | {State.PREFILLING, State.FINISHED},
    State.FINISHED: frozenset(),
}


class IllegalTransitionError(Exception):
    """`TRANSITIONS` lacks this change of state: a fault of the scheduler."""


class ImageLeft(Protocol):
    """An image that the row needs (`image_items.py`)."""

    @property
    def id(self) -> ItemId: ...

    @property
    def span(self) -> MediaSpan: ...

    @property
    def encoded(self) -> bool: ...


class DiskRead(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def done(self) -> bool: ...

    @property
    def read_tokens(self) -> int: ...


@attrs.define(eq=False)
class Sequence:
    """State of one answer. `num_scheduled_tokens` counts tokens that sent plans certainly sample,
    `num_output_tokens` the answered ones, with accepted drafts."""

    client: PreparedRequest
    standing: Standing
    chain: Chain
    output: AnswerOutput
    num_prompt_tokens: int = attrs.field(init=False)
    since: float = 0.0
    """Time of arrival, on Trio's clock; once started, of the first admission."""
    state: State = State.WAITING
    noted: WaitReason = ""

    arrived_at: float = 0.0
    queued_at: float = 0.0
    overdue: bool = False

    # In the queue.
    primary: Sequence | None = None
    """Running sequence that prefills shared tokens."""
    shared_tokens: int = 0
    """Tokens that the primary must have prefilled."""
    read: DiskRead | None = None
    """Ordered at most once for each row."""

    # In a row of the engine.
    id: RowId = NO_ROW
    num_unscheduled_tokens: int = 0
    num_resumed_tokens: int = 0
    """Output tokens at entry, prefilled behind the prompt."""
    num_scheduled_tokens: int = 0
    num_draft_tokens: int = 0
    """Most drafts in unanswered plans."""
    kv_usage: KvUsage = NO_USAGE
    """Counted KV until `kv_usage_until` scheduled tokens."""
    kv_usage_until: int = 0
    dropped: bool = False
    node: Node | None = None
    """End of the row's stored blocks, if any."""
    boundaries: list[int] = attrs.field(factory=list)
    """Where a chunk must end, in tokens; ascending."""
    snapshot_at: int = 0
    stores_from: int = 0
    """Output tokens before the next store."""
    no_room_at: int = 0
    images_left: Ordered[ImageLeft] = ()
    """Images whose tokens are not all computed, ascending."""
    records: Records = UNCHOSEN
    """Drafts of each permitted proposer; empty: no drafts."""

    started: bool = False
    num_cached_tokens: int = 0

    @num_prompt_tokens.default
    def _count_prompt(self) -> int:
        return len(self.client.prompt)

    @classmethod
    def of(
        cls,
        client: PreparedRequest,
        standing: Standing,
        tokenizer: Tokenizer,
        chain: Chain,
        now: float = 0.0,
        *,
        stream_interval: int = 1,
    ) -> Sequence:
        output = AnswerOutput.of(client, tokenizer, stream_interval)
        return cls(client, standing, chain, output, now, arrived_at=now, queued_at=now)

    @property
    def request(self) -> Generate:
        return self.client.request

    @property
    def max_tokens(self) -> int:
        return self.output.max_tokens

    @property
    def priority(self) -> float:
        """Lower goes first; overdue first of all."""
        return -inf if self.overdue else self.request.priority

    @property
    def spans(self) -> tuple[MediaSpan, ...]:
        return tuple(image.span for image in self.client.images)

    @property
    def of_batch(self) -> bool:
        return self.request.priority == BATCH_PRIORITY

    @property
    def can_be_preempted(self) -> bool:
        # An isolated sequence must stay alone after a crash; an embedding would begin anew.
        return not (self.standing.isolated or self.request.embed)

    # -- transitions -----------------------------------------------------------------------------

    def enter_state(self, state: State, reason: WaitReason = "", detail: str = "") -> None:
        """Enter a state, and note the reason for a wait. Raises `IllegalTransitionError`."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"{self.request.request_id}: from {self.state.value} to {state.value}"
            )
        self.state, self.noted = state, reason
        if state in NOTED:
            self.client.note(NOTED[state], reason, detail)

    def wait_for_admission(self, reason: WaitReason) -> None:
        """Note why a queued sequence gets no row. Other waits keep their own reasons."""
        if self.noted != reason and self.state is not State.PREEMPTED and self.is_ready:
            self.noted = reason
            self.client.note("queued", reason)

    def wait_for_image(self) -> None:
        """Note that the next tokens of the prompt are an image without vectors."""
        if self.noted != "image":
            self.noted = "image"
            self.client.note("prefilling", "image")

    def go_on(self) -> None:
        """Note that the image is encoded."""
        if self.noted == "image":
            self.noted = ""
            self.client.note("prefilling")

    def wait_for_disk(self, read: DiskRead) -> None:
        self.enter_state(State.WAITING_FOR_DISK, "disk")
        self.read = read

    def wait_for_prefix(self, primary: Sequence, shared_tokens: int) -> None:
        self.enter_state(
            State.WAITING_FOR_PREFIX, "prefix", f" (request {primary.request.request_id})"
        )
        self.primary, self.shared_tokens = primary, shared_tokens

    def enter(self, row: RowId) -> None:
        # Tokens in flight in an earlier row are sampled again.
        self.enter_state(State.PREFILLING)
        self.id, self.primary, self.node = row, None, None
        self.num_resumed_tokens = self.num_scheduled_tokens = self.num_output_tokens
        self.num_unscheduled_tokens = self.num_prompt_tokens + self.num_output_tokens
        self.num_draft_tokens = self.snapshot_at = self.no_room_at = self.kv_usage_until = (
            self.stores_from
        ) = 0
        self.boundaries, self.images_left, self.dropped = [], (), False
        self.output.scores.clear()

    def schedule_chunk(self, tokens: int) -> bool:
        """Count a chunk; the last one samples a token. Returns whether that ends the answer."""
        self.num_unscheduled_tokens -= tokens
        if self.num_unscheduled_tokens:
            return False
        self.num_scheduled_tokens = self.num_resumed_tokens + 1
        last = self.num_scheduled_tokens >= self.max_tokens
        self.enter_state(State.LAST_TOKEN_SCHEDULED if last else State.DECODING)
        return last

    def schedule_token(self) -> bool:
        """Count a sampled token, or an accepted draft. Returns as `schedule_chunk`."""
        self.num_scheduled_tokens += 1
        if self.num_scheduled_tokens < self.output.max_tokens:
            return False
        if self.state is not State.LAST_TOKEN_SCHEDULED:
            self.enter_state(State.LAST_TOKEN_SCHEDULED)
        return True

    def preempt(self, reason: WaitReason = "") -> None:
        self.enter_state(State.PREEMPTED, reason)

    def carry_over(self) -> None:
        """Forget everything that a crash of the engine has ended."""
        waits = self.state in QUEUED | {State.PREEMPTED}
        self.enter_state(State.WAITING if waits else State.PREEMPTED, "crash")
        self.primary = self.read = self.node = None
        self.images_left = ()

    def start(self, num_cached_tokens: int, now: float) -> None:
        disk_tokens = 0 if self.read is None else min(self.read.read_tokens, num_cached_tokens)
        self.num_cached_tokens, self.since, self.started = num_cached_tokens, now, True
        self.client.reply(Started(num_cached_tokens, disk_tokens, now))

    def append_token(
        self, token: int, logprobs: TokenLogprobs | None, now: float = 0.0
    ) -> Finished | None:
        """Commit one token. Returns the following `Finished`, after the last text."""
        self.chain.append(token)
        if not self.has_decoded:
            self.client.note("decoding")
        return self.output.append(token, logprobs, now)

    def finish(self) -> None:
        self.enter_state(State.FINISHED)
        self.client.close()

    def fail(self, problem: Problem) -> None:
        self.enter_state(State.FINISHED)
        self.output.fail(problem)

    # -- counters --------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        if self.state is State.WAITING_FOR_DISK and self.read is not None:
            return self.read.done
        primary = self.primary
        return (
            primary is None
            or primary.node is None
            or primary.num_computed_tokens >= self.shared_tokens
        )

    @property
    def has_decoded(self) -> bool:
        """Whether its row, or the last one that it had, has sampled a token."""
        return self.num_output_tokens > self.num_resumed_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.output.num_tokens

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.output.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens in KV after all sent plans, without accepted drafts."""
        if self.num_unscheduled_tokens == 0:
            return self.num_prompt_tokens + self.num_scheduled_tokens - 1
        return self.num_prefill_tokens - self.num_unscheduled_tokens

    @property
    def prefilling(self) -> bool:
        return self.num_unscheduled_tokens > 0

    @property
    def work(self) -> Work:
        if self.request.embed:
            return "embed"
        return (
            "text" if self.num_resumed_tokens or self.request.prompt_logprobs is None else "score"
        )

    @property
    def turns(self) -> list[int]:
        ends = self.output.tokenizer.eos_token_ids
        return [index + 1 for index, token in enumerate(self.client.prompt) if token in ends]

    @property
    def next_chunk(self) -> int:
        """Tokens to the next boundary, to the next image without vectors, or to the prompt's end; 0
        while such an image is next."""
        at = self.num_computed_tokens
        if not self.prefilling:
            return 0
        index = bisect_right(self.boundaries, at)
        tokens = (
            self.boundaries[index] - at
            if index < len(self.boundaries)
            else self.num_unscheduled_tokens
        )
        missing = next((left.span.start for left in self.images_left if not left.encoded), None)
        return tokens if missing is None else max(0, min(tokens, missing - at))

    def needs_image(self, items: Collection[ItemId]) -> bool:
        """Whether tokens of any of these images are still to be computed."""
        return any(left.id in items for left in self.images_left)

    def items_touched(self, tokens: int) -> tuple[ItemId, ...]:
        at = self.num_computed_tokens
        return tuple(
            left.id
            for left in self.images_left
            if left.span.start < at + tokens and at < left.span.end
        )

    def drop_passed_images(self) -> None:
        at = self.num_computed_tokens
        self.images_left = [left for left in self.images_left if left.span.end > at]

    def uncut_chunk(self, tokens: int) -> int:
        """Tokens of a chunk of about `tokens` tokens that ends in no atomic span."""
        at = self.num_computed_tokens
        return chunk_end((left.span for left in self.images_left), at, at + tokens) - at

    def add_boundary(self, num_tokens: int) -> None:
        if num_tokens not in self.boundaries:
            insort(self.boundaries, num_tokens)

    def last_boundary(self, until: int) -> int:
        index = bisect_right(self.boundaries, until)
        last = self.boundaries[index - 1] if index else 0
        return last if last > self.num_computed_tokens else 0

    def snapshot_due(self, interval: int) -> bool:
        """Whether to take a snapshot. `interval`: tokens, for a decoding row."""
        at = self.num_computed_tokens
        if at == self.snapshot_at:
            return False
        if at < self.num_prefill_tokens:
            index = bisect_left(self.boundaries, at)
            return index < len(self.boundaries) and self.boundaries[index] == at
        return self.until_snapshot(interval) <= 0

    def until_snapshot(self, interval: int) -> int:
        return max(self.snapshot_at, self.num_prefill_tokens) + interval - self.num_computed_tokens

    @property
    def room(self) -> int:
        """Tokens beyond the next plan's one that the answer certainly takes."""
        return self.max_tokens - self.num_scheduled_tokens - self.num_draft_tokens - 1
