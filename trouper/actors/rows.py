"""What the scheduler keeps of one request that has a row, and when its answer ends. Pure but for the replies."""

from __future__ import annotations

import attrs

from trouper.actors.intake import Admitted
from trouper.actors.text import TextStream
from trouper.protocol.model import Tokenizer
from trouper.protocol.plans import RowId
from trouper.protocol.replies import Delta, Finished, Started, TokenLogprobs


@attrs.define(eq=False)
class Row:
    """One answer in the making. `planned` counts tokens that sent plans will produce, `produced` those that came."""

    id: RowId
    admitted: Admitted
    tokenizer: Tokenizer
    text: TextStream
    ends: frozenset[int]
    """Token ids that end the answer."""
    unplanned: int
    """Prompt tokens that no plan prefills yet."""
    planned: int = 0
    produced: int = 0
    dropped: bool = False
    """A plan told the engine, or the next one will, to forget it."""

    @classmethod
    def of(cls, row: RowId, admitted: Admitted, tokenizer: Tokenizer) -> Row:
        request = admitted.submission.request
        ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else tokenizer.eos_token_ids)
        return cls(row, admitted, tokenizer, TextStream(request.stop), ends, len(admitted.prompt))

    @property
    def wants_token(self) -> bool:
        """Its prompt is planned and its answer is not yet planned to the end."""
        return self.unplanned == 0 and self.planned < self.admitted.max_tokens

    @property
    def withdrawn(self) -> bool:
        return self.admitted.submission.withdrawn

    def start(self, cached_tokens: int) -> None:
        self.admitted.submission.reply(Started(cached_tokens))

    def take(self, token: int, logprobs: TokenLogprobs | None) -> Finished | None:
        """Commit one token. The Finished that it caused, already preceded by the last text. The one place that decides."""
        self.produced += 1
        if token in self.ends:
            return self._finish("stop", (token,), None, None if token in self.tokenizer.eos_token_ids else token)
        shown = self.text.push(self.tokenizer.token_bytes(token))
        if shown.stop is not None:
            self._say(shown.text, (token,), logprobs)
            return Finished("stop", self.produced, shown.stop)
        if self.produced == self.admitted.max_tokens:
            return self._finish("length", (token,), logprobs, None, shown.text)
        self._say(shown.text, (token,), logprobs)
        return None

    def _finish(
        self, reason: str, tokens: tuple[int, ...], logprobs: TokenLogprobs | None, matched: int | None, text: str = ""
    ) -> Finished:
        rest = self.text.flush()
        self._say(text + rest.text, tokens, logprobs)
        if rest.stop is not None:
            return Finished("stop", self.produced, rest.stop)
        return Finished("stop" if reason == "stop" else "length", self.produced, matched)

    def _say(self, text: str, tokens: tuple[int, ...], logprobs: TokenLogprobs | None) -> None:
        self.admitted.submission.reply(Delta(text, tokens, () if logprobs is None else (logprobs,)))
