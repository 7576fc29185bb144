"""A row: the scheduler's state of one admitted request, and the end of its answer. Pure except for the replies."""

from __future__ import annotations

from bisect import insort

import attrs

from trouper.actors.scheduling.admitted import Admitted
from trouper.actors.scheduling.block_keys import Chain
from trouper.actors.scheduling.crash_attribution import Standing
from trouper.actors.scheduling.detokenizer import TextStream
from trouper.actors.scheduling.prefill_budget import Work
from trouper.actors.scheduling.speculation_policy import Record
from trouper.actors.scheduling.tree_node import Node
from trouper.protocol.model import Tokenizer
from trouper.protocol.plans import RowId
from trouper.protocol.replies import Delta, Finished, Scored, Started, TokenLogprobs


@attrs.define(eq=False)
class Row:
    """One answer in the making. `planned` counts tokens that sent plans will produce at least, one each; `produced` those
    that came. Of drafts nothing is known before they are answered."""

    id: RowId
    admitted: Admitted
    standing: Standing
    tokenizer: Tokenizer
    text: TextStream
    ends: frozenset[int]
    """Ids of tokens that end the answer."""
    chain: Chain
    """Prompt and output tokens, as the prefix cache knows them."""
    num_unscheduled_tokens: int
    """Tokens that no plan prefills yet."""
    num_resumed_tokens: int = 0
    """Tokens of the answer that it had when it entered the engine, which prefills them behind the prompt; 0: it had none, or
    never was there before."""
    num_scheduled_tokens: int = 0
    num_output_tokens: int = 0
    record: Record | None = None
    """History of the row's drafts; None: the row never drafts."""
    num_draft_tokens: int = 0
    """Maximum number of tokens that the row drafts in unanswered plans."""
    dropped: bool = False
    """Whether a sent plan or the next plan drops the row from the engine."""
    node: Node | None = None
    """Node of the prefix tree at which the row's stored blocks end; None: nothing of the row is stored."""
    boundaries: list[int] = attrs.field(factory=list)
    """Numbers of tokens at which a prefill chunk must end, for a snapshot; ascending."""
    snapshot_at: int = 0
    """Number of tokens at the last snapshot."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that came from the cache."""
    since: float = 0.0
    """Time of admission, on trio's clock."""
    first_token_at: float | None = None
    scores: list[TokenLogprobs] = attrs.field(factory=list)
    """Log-probabilities of the prompt, if requested, until the first output token."""
    now: float = 0.0
    """Time of the result with the current token."""

    @classmethod
    def of(cls, row: RowId, admitted: Admitted, standing: Standing, tokenizer: Tokenizer, chain: Chain) -> Row:
        request = admitted.submission.request
        ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else tokenizer.eos_token_ids)
        return cls(row, admitted, standing, tokenizer, TextStream(request.stop), ends, chain, len(admitted.prompt))

    def again(self, row: RowId, chain: Chain) -> Row:
        """The same answer in a new row: this one has left the engine, whatever it was doing there. What it sampled and nobody
        has read is sampled again. `chain`: prompt and answer, which both rows may have in common."""
        return Row(
            row, self.admitted, self.standing, self.tokenizer, self.text, self.ends, chain,
            num_unscheduled_tokens=self.num_prompt_tokens + self.num_output_tokens, num_resumed_tokens=self.num_output_tokens, num_scheduled_tokens=self.num_output_tokens,
            num_output_tokens=self.num_output_tokens, record=self.record, num_cached_tokens=self.num_cached_tokens, since=self.since,
            first_token_at=self.first_token_at, now=self.now,
        )  # fmt: skip

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.admitted.prompt)

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens that the row prefills or has from a cache: its prompt, and its output tokens if it resumes."""
        return self.num_prompt_tokens + self.num_resumed_tokens

    @property
    def prefilling(self) -> bool:
        return self.num_unscheduled_tokens > 0

    @property
    def work(self) -> Work:
        request = self.admitted.submission.request
        if request.embed:
            return "embed"
        return "text" if self.num_resumed_tokens or request.prompt_logprobs is None else "score"

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens in the row's KV once all sent plans are done; more, if drafts are accepted."""
        return (
            self.num_prompt_tokens + self.num_scheduled_tokens - 1
            if self.num_unscheduled_tokens == 0
            else self.num_prefill_tokens - self.num_unscheduled_tokens
        )

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens that are known."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def turns(self) -> list[int]:
        """Ends of the turns of the prompt: after each token that would end an answer."""
        ends = self.tokenizer.eos_token_ids
        return [place + 1 for place, token in enumerate(self.admitted.prompt) if token in ends]

    @property
    def next_chunk(self) -> int:
        """Number of tokens to prefill up to the next boundary, or to the end of the prompt."""
        at = self.num_computed_tokens
        return (
            next((place - at for place in self.boundaries if place > at), self.num_unscheduled_tokens)
            if self.prefilling
            else 0
        )

    def add_boundary(self, place: int) -> None:
        if place not in self.boundaries:
            insort(self.boundaries, place)

    def snapshot_due(self, every: int) -> bool:
        """Whether a snapshot of the row's rings and states is due now."""
        at = self.num_computed_tokens
        if at == self.snapshot_at:
            return False
        return (
            at in self.boundaries
            if at < self.num_prefill_tokens
            else at - max(self.snapshot_at, self.num_prefill_tokens) >= every
        )

    @property
    def wants_token(self) -> bool:
        """Whether the prefill is planned and the answer is not yet planned to the end."""
        return self.num_unscheduled_tokens == 0 and self.num_scheduled_tokens < self.admitted.max_tokens

    @property
    def room(self) -> int:
        """Number of tokens, beyond the one of the next plan, for which the answer certainly has room."""
        return self.admitted.max_tokens - self.num_scheduled_tokens - self.num_draft_tokens - 1

    @property
    def aborted(self) -> bool:
        return self.admitted.submission.aborted

    def start(self, num_cached_tokens: int, disk_tokens: int, now: float) -> None:
        self.num_cached_tokens, self.since = num_cached_tokens, now
        self.admitted.submission.reply(Started(num_cached_tokens, disk_tokens, now))

    def append_token(self, token: int, logprobs: TokenLogprobs | None, now: float = 0.0) -> Finished | None:
        """Commit one token. Returns the `Finished` that it caused, after the last text was sent. Only here it is decided that an
        answer ends."""
        self.now = now
        if not self.num_output_tokens:
            self._begin()
        self.num_output_tokens += 1
        self.chain.append(token)
        if token in self.ends:
            return self._finish("stop", (token,), None, None if token in self.tokenizer.eos_token_ids else token)
        may_stop = self.num_output_tokens > self.admitted.submission.request.min_tokens
        shown = self.text.push(self.tokenizer.token_bytes(token), may_stop=may_stop)
        if shown.stop is not None:
            self._say(shown.text, (token,), logprobs)
            return Finished("stop", self.num_output_tokens, shown.stop, now)
        if self.num_output_tokens == self.admitted.max_tokens:
            return self._finish("length", (token,), logprobs, None, shown.text)
        self._say(shown.text, (token,), logprobs)
        return None

    def _begin(self) -> None:
        """Handle the first output token."""
        self.first_token_at = self.now
        if self.admitted.submission.request.prompt_logprobs is not None:
            self.admitted.submission.reply(Scored(tuple(self.scores)))
            self.scores.clear()

    def _finish(
        self, reason: str, tokens: tuple[int, ...], logprobs: TokenLogprobs | None, matched: int | None, text: str = ""
    ) -> Finished:
        rest = self.text.flush()
        self._say(text + rest.text, tokens, logprobs)
        if rest.stop is not None:
            return Finished("stop", self.num_output_tokens, rest.stop, self.now)
        return Finished("stop" if reason == "stop" else "length", self.num_output_tokens, matched, self.now)

    def _say(self, text: str, tokens: tuple[int, ...], logprobs: TokenLogprobs | None) -> None:
        self.admitted.submission.reply(Delta(text, tokens, () if logprobs is None else (logprobs,), self.now))
