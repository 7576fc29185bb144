"""A sequence: one prompt and its answer in the scheduler's core, from the queue to its end. Pure,
except for the replies."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from math import inf
from typing import Protocol

import attrs

from trouper.actors.scheduling.answer_output import AnswerOutput
from trouper.actors.scheduling.block_keys import Chain
from trouper.actors.scheduling.crash_attribution import Standing
from trouper.actors.scheduling.draft_estimates import UNCHOSEN, Records
from trouper.actors.scheduling.prefill_budget import Work
from trouper.actors.scheduling.prepared_request import PreparedRequest
from trouper.actors.scheduling.sequence_state import (
    QUEUED,
    TRANSITIONS,
    IllegalTransitionError,
    State,
)
from trouper.actors.scheduling.tree_node import Node
from trouper.protocol.kv import NO_USAGE, KvUsage
from trouper.protocol.model import Tokenizer
from trouper.protocol.plans import NO_ROW, RowId
from trouper.protocol.problems import Problem
from trouper.protocol.replies import Finished, Started, TokenLogprobs
from trouper.protocol.requests import BATCH_PRIORITY, Generate


class DiskRead(Protocol):
    """A read from disk for a sequence."""

    @property
    def number(self) -> int: ...

    @property
    def done(self) -> bool: ...

    @property
    def read_tokens(self) -> int:
        """Number of tokens that were read so far."""


@attrs.define(eq=False)
class Sequence:
    """State of one answer. `num_scheduled_tokens` counts output tokens that the sent plans sample
    at least, one each; `num_output_tokens` those that were answered. How many drafted tokens are
    accepted is unknown until a plan is answered."""

    client: PreparedRequest
    standing: Standing
    chain: Chain
    """Prompt and output tokens, as the prefix cache knows them."""
    output: AnswerOutput
    num_prompt_tokens: int = attrs.field(init=False)
    """Length of the prompt."""
    since: float = 0.0
    """Time of arrival, on Trio's clock; once started, time of the first admission."""
    state: State = State.WAITING

    arrived_at: float = 0.0
    """Time of arrival, on Trio's clock."""
    queued_at: float = 0.0
    """Time at which the sequence last entered the queue."""
    overdue: bool = False
    """Whether it has waited in the queue longer than --priority-max-wait-s."""

    # In the queue.
    primary: Sequence | None = None
    """Running sequence that prefills tokens of this sequence's prompt."""
    shared_tokens: int = 0
    """Number of tokens up to which the primary must have prefilled."""
    read: DiskRead | None = None
    """Read from disk for this sequence. It is ordered at most once for each row."""

    # In a row of the engine.
    id: RowId = NO_ROW
    """Id of the row, or of the last one."""
    num_unscheduled_tokens: int = 0
    """Tokens that no plan prefills yet."""
    num_resumed_tokens: int = 0
    """Output tokens that the sequence had when it entered its row, which prefills them behind the
    prompt."""
    num_scheduled_tokens: int = 0
    num_draft_tokens: int = 0
    """Maximum number of tokens that the row drafts in unanswered plans."""
    kv_usage: KvUsage = NO_USAGE
    """What the row counts for memory, while it decodes and has fewer scheduled tokens than
    `kv_usage_until`."""
    kv_usage_until: int = 0
    dropped: bool = False
    """Whether a sent plan or the next plan drops the row from the engine."""
    node: Node | None = None
    """Node of the prefix tree at which the row's stored blocks end; None: nothing of the row is
    stored."""
    boundaries: list[int] = attrs.field(factory=list)
    """Numbers of tokens at which a prefill chunk must end, for a snapshot; ascending."""
    snapshot_at: int = 0
    """Number of tokens at the last snapshot."""
    stores_from: int = 0
    """Number of output tokens before which the row, while it decodes, has nothing to store."""
    no_room_at: int = 0
    """Number of tokens when the cache last had no room for a block of them."""
    records: Records = UNCHOSEN
    """History of drafts by each proposer that the sequence may use; empty: it never drafts."""

    started: bool = False
    """Whether the client was told that prefill begins."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that came from the cache."""

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
        """Lower goes first. A sequence that waited too long goes before those of any priority, from
        then on."""
        return -inf if self.overdue else self.request.priority

    @property
    def of_batch(self) -> bool:
        """Whether its request is of a batch."""
        return self.request.priority == BATCH_PRIORITY

    # -- transitions -----------------------------------------------------------------------------

    def enter_state(self, state: State) -> None:
        """Raises `IllegalTransitionError` for a transition that the table does not have."""
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"{self.request.request_id}: from {self.state.value} to {state.value}"
            )
        self.state = state

    def wait_for_disk(self, read: DiskRead) -> None:
        self.enter_state(State.WAITING_FOR_DISK)
        self.read = read

    def wait_for_prefix(self, primary: Sequence, shared_tokens: int) -> None:
        self.enter_state(State.WAITING_FOR_PREFIX)
        self.primary, self.shared_tokens = primary, shared_tokens

    def enter(self, row: RowId) -> None:
        """Begin to prefill the prompt, and the output tokens so far if the sequence resumes. Tokens
        that were in flight in its last row are sampled again."""
        self.enter_state(State.PREFILLING)
        self.id, self.primary, self.node = row, None, None
        self.num_resumed_tokens = self.num_scheduled_tokens = self.num_output_tokens
        self.num_unscheduled_tokens = self.num_prompt_tokens + self.num_output_tokens
        self.num_draft_tokens = self.snapshot_at = self.no_room_at = self.kv_usage_until = (
            self.stores_from
        ) = 0
        self.boundaries, self.dropped = [], False
        self.output.scores.clear()

    def schedule_chunk(self, tokens: int) -> bool:
        """A plan prefills the next tokens. The last chunk of a prompt samples the next token.
        Returns whether that was the answer's last."""
        self.num_unscheduled_tokens -= tokens
        if self.num_unscheduled_tokens:
            return False
        self.num_scheduled_tokens = self.num_resumed_tokens + 1
        last = self.num_scheduled_tokens >= self.max_tokens
        self.enter_state(State.LAST_TOKEN_SCHEDULED if last else State.DECODING)
        return last

    def schedule_token(self) -> bool:
        """A plan samples the next token, or a drafted token was accepted that no plan counted.
        Returns whether that was the last."""
        self.num_scheduled_tokens += 1
        if self.num_scheduled_tokens < self.output.max_tokens:
            return False
        if self.state is not State.LAST_TOKEN_SCHEDULED:
            self.enter_state(State.LAST_TOKEN_SCHEDULED)
        return True

    def preempt(self) -> None:
        """Leave the row before the end of the answer."""
        self.enter_state(State.PREEMPTED)

    def carry_over(self) -> None:
        """The engine crashed: nothing of its KV, of the tree and of reads from disk exists any
        more."""
        self.enter_state(
            State.WAITING if self.state in QUEUED | {State.PREEMPTED} else State.PREEMPTED
        )
        self.primary = self.read = self.node = None

    def start(self, num_cached_tokens: int, now: float) -> None:
        """Tell the client that prefill begins."""
        disk_tokens = 0 if self.read is None else min(self.read.read_tokens, num_cached_tokens)
        self.num_cached_tokens, self.since, self.started = num_cached_tokens, now, True
        self.client.reply(Started(num_cached_tokens, disk_tokens, now))

    def append_token(
        self, token: int, logprobs: TokenLogprobs | None, now: float = 0.0
    ) -> Finished | None:
        """Commit one token. Returns the `Finished` that it caused, after the last text was sent."""
        self.chain.append(token)
        return self.output.append(token, logprobs, now)

    def finish(self) -> None:
        """The terminal event was sent, or the client aborted."""
        self.enter_state(State.FINISHED)
        self.client.close()

    def fail(self, problem: Problem) -> None:
        self.enter_state(State.FINISHED)
        self.output.fail(problem)

    # -- counters --------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether what the sequence waits for in the queue has come."""
        if self.state is State.WAITING_FOR_DISK and self.read is not None:
            return self.read.done
        primary = self.primary
        return (
            primary is None
            or primary.node is None
            or primary.num_computed_tokens >= self.shared_tokens
        )

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that were answered."""
        return self.output.num_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens that the row prefills or has from a cache: its prompt, and its output
        tokens if it resumes."""
        return self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens that are known."""
        return self.num_prompt_tokens + self.output.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens in the row's KV once all sent plans are done; more, if drafts are
        accepted."""
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
        """Ends of the turns of the prompt: after each token that would end an answer."""
        ends = self.output.tokenizer.eos_token_ids
        return [index + 1 for index, token in enumerate(self.client.prompt) if token in ends]

    @property
    def next_chunk(self) -> int:
        """Number of tokens to prefill up to the next boundary, or to the end of the prompt."""
        at = self.num_computed_tokens
        if not self.prefilling:
            return 0
        index = bisect_right(self.boundaries, at)
        return (
            self.boundaries[index] - at
            if index < len(self.boundaries)
            else self.num_unscheduled_tokens
        )

    def add_boundary(self, num_tokens: int) -> None:
        if num_tokens not in self.boundaries:
            insort(self.boundaries, num_tokens)

    def last_boundary(self, until: int) -> int:
        """The last boundary at most `until` at which the row still pauses; 0: there is none."""
        index = bisect_right(self.boundaries, until)
        last = self.boundaries[index - 1] if index else 0
        return last if last > self.num_computed_tokens else 0

    def snapshot_due(self, interval: int) -> bool:
        """Whether a snapshot of the row's rings and states is due now. `interval`: in tokens, while
        the answer grows."""
        at = self.num_computed_tokens
        if at == self.snapshot_at:
            return False
        if at < self.num_prefill_tokens:
            index = bisect_left(self.boundaries, at)
            return index < len(self.boundaries) and self.boundaries[index] == at
        return self.until_snapshot(interval) <= 0

    def until_snapshot(self, interval: int) -> int:
        """Number of tokens that a decoding row is to grow by until its next snapshot."""
        return max(self.snapshot_at, self.num_prefill_tokens) + interval - self.num_computed_tokens

    @property
    def room(self) -> int:
        """Number of tokens, beyond the one of the next plan, for which the answer certainly has
        room."""
        return self.max_tokens - self.num_scheduled_tokens - self.num_draft_tokens - 1
