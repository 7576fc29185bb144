"""What the scheduler keeps of one request that has a row, and when its answer ends. Pure but for the replies."""

from __future__ import annotations

from bisect import insort

import attrs

from trouper.actors.scheduling.admitted import Admitted
from trouper.actors.scheduling.crash_attribution import Standing
from trouper.actors.scheduling.detokenizer import TextStream
from trouper.actors.scheduling.prefill_budget import Work
from trouper.actors.scheduling.prefix_tree import Chain, Node
from trouper.actors.scheduling.speculation_policy import Record
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
    """Token ids that end the answer."""
    chain: Chain
    """Prompt and answer as the prefix cache knows them."""
    unplanned: int
    """Tokens that no plan prefills yet."""
    resumed: int = 0
    """Tokens of the answer that it had when it entered the engine, which prefills them behind the prompt; 0: it had none, or
    never was there before."""
    planned: int = 0
    produced: int = 0
    record: Record | None = None
    """Of its drafts; None: it never drafts."""
    hoped: int = 0
    """What it may draft in plans that are not answered."""
    dropped: bool = False
    """A plan told the engine, or the next one will, to forget it."""
    node: Node | None = None
    """What the index holds of it ends here; None: nothing of it is kept."""
    boundaries: list[int] = attrs.field(factory=list)
    """Where a prefill chunk must end, since a snapshot is wanted there; ascending."""
    snapshot_at: int = 0
    """Tokens at the last snapshot."""
    cached_tokens: int = 0
    """Of the prompt, so many were not computed."""
    since: float = 0.0
    """When it was started; trio's time."""
    first_token_at: float | None = None
    scores: list[TokenLogprobs] = attrs.field(factory=list)
    """The prompt's, if they are wanted, until the first token."""
    now: float = 0.0
    """When the step of the token at hand was answered."""

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
            unplanned=self.prompt_tokens + self.produced, resumed=self.produced, planned=self.produced,
            produced=self.produced, record=self.record, cached_tokens=self.cached_tokens, since=self.since,
            first_token_at=self.first_token_at, now=self.now,
        )  # fmt: skip

    @property
    def prompt_tokens(self) -> int:
        return len(self.admitted.prompt)

    @property
    def prefill_tokens(self) -> int:
        """What it prefills, or has from a cache: its prompt, and the answer's tokens if it resumes."""
        return self.prompt_tokens + self.resumed

    @property
    def prefilling(self) -> bool:
        return self.unplanned > 0

    @property
    def work(self) -> Work:
        request = self.admitted.submission.request
        if request.embed:
            return "embed"
        return "text" if self.resumed or request.prompt_logprobs is None else "score"

    @property
    def kv_tokens(self) -> int:
        """What its KV holds once all sent plans are done; more, if drafts are right."""
        return self.prompt_tokens + self.planned - 1 if self.unplanned == 0 else self.prefill_tokens - self.unplanned

    @property
    def known_tokens(self) -> int:
        """Prompt and answer, as far as it was read."""
        return self.prompt_tokens + self.produced

    @property
    def turns(self) -> list[int]:
        """Where turns of the prompt end: after each token that would end an answer."""
        ends = self.tokenizer.eos_token_ids
        return [place + 1 for place, token in enumerate(self.admitted.prompt) if token in ends]

    @property
    def next_chunk(self) -> int:
        """Tokens to prefill up to the next boundary, or to their end."""
        at = self.kv_tokens
        return next((place - at for place in self.boundaries if place > at), self.unplanned) if self.prefilling else 0

    def add_boundary(self, place: int) -> None:
        if place not in self.boundaries:
            insort(self.boundaries, place)

    def snapshot_due(self, every: int) -> bool:
        """Whether its rings and states are wanted as they are now."""
        at = self.kv_tokens
        if at == self.snapshot_at:
            return False
        return (
            at in self.boundaries
            if at < self.prefill_tokens
            else at - max(self.snapshot_at, self.prefill_tokens) >= every
        )

    @property
    def wants_token(self) -> bool:
        """Whether the prefill is planned and the answer is not yet planned to the end."""
        return self.unplanned == 0 and self.planned < self.admitted.max_tokens

    @property
    def room(self) -> int:
        """For so many tokens beyond the next plan's one there is surely room."""
        return self.admitted.max_tokens - self.planned - self.hoped - 1

    @property
    def withdrawn(self) -> bool:
        return self.admitted.submission.withdrawn

    def start(self, cached_tokens: int, disk_tokens: int, now: float) -> None:
        self.cached_tokens, self.since = cached_tokens, now
        self.admitted.submission.reply(Started(cached_tokens, disk_tokens, now))

    def take(self, token: int, logprobs: TokenLogprobs | None, now: float = 0.0) -> Finished | None:
        """Commit one token. The Finished that it caused, already preceded by the last text. The one place that decides."""
        self.now = now
        if not self.produced:
            self._begin()
        self.produced += 1
        self.chain.append(token)
        if token in self.ends:
            return self._finish("stop", (token,), None, None if token in self.tokenizer.eos_token_ids else token)
        may_stop = self.produced > self.admitted.submission.request.min_tokens
        shown = self.text.push(self.tokenizer.token_bytes(token), may_stop=may_stop)
        if shown.stop is not None:
            self._say(shown.text, (token,), logprobs)
            return Finished("stop", self.produced, shown.stop, now)
        if self.produced == self.admitted.max_tokens:
            return self._finish("length", (token,), logprobs, None, shown.text)
        self._say(shown.text, (token,), logprobs)
        return None

    def _begin(self) -> None:
        """Its first token is there."""
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
            return Finished("stop", self.produced, rest.stop, self.now)
        return Finished("stop" if reason == "stop" else "length", self.produced, matched, self.now)

    def _say(self, text: str, tokens: tuple[int, ...], logprobs: TokenLogprobs | None) -> None:
        self.admitted.submission.reply(Delta(text, tokens, () if logprobs is None else (logprobs,), self.now))
