"""Completions, complete and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs

from trouper.actors.runtime.answer import Answer
from trouper.protocol.model import Tokenizer
from trouper.protocol.replies import Delta, Finished, TokenLogprobs
from trouper.web.openai.openai_dialect import Envelope, Extras, OpenAiDialect, encode
from trouper.web.output.content_logprobs import UTF8, ContentLogprobs
from trouper.web.output.dialect import Choice, Json, Usage, total


class CompletionDialect(OpenAiDialect):
    """`echo`: the prompt precedes each answer; `scores`: with log-probabilities. `silent`: only the
    prompt was requested. `pick` chooses the returned answers."""

    def __init__(
        self,
        envelope: Envelope,
        extras: Extras,
        *,
        echo: Callable[[int], str] | None,
        scores: bool,
        silent: bool,
        pick: Callable[[Sequence[Choice]], Sequence[Choice]],
    ) -> None:
        super().__init__("text_completion", envelope, extras)
        self._echo, self._scores, self._silent, self._pick = echo, scores, silent, pick
        self._offsets: dict[int, TextOffsets] = {}
        self._shown: dict[int, ContentLogprobs] = {}
        self._before, self._after = self.template(self._choice(0, "\0", None, None))

    def _choice(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: Json | None,
        matched: str | int | None = None,
    ) -> Json:
        choice: Json = {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}
        return choice | ({"matched_stop": matched} if reason is not None else {})

    def body(self, choices: Sequence[Choice]) -> Json:
        usage = self.counted(total([choice.usage for choice in choices], self.extras.choices))
        bodies = [
            self._choice_body(index, choice) for index, choice in enumerate(self._pick(choices))
        ]
        return self.envelope.around("text_completion", bodies, usage)

    def counted(self, usage: Usage) -> Usage:
        return attrs.evolve(usage, completion_tokens=0) if self._silent else usage

    def _ended(self, finished: Finished) -> Finished:
        return Finished("length", 0) if self._silent else finished

    def _choice_body(self, index: int, choice: Choice) -> Json:
        text = "" if self._silent else choice.text
        seen = [] if self._silent else self._shown_of(index, choice.logprobs, choice.text)
        prompt: tuple[TokenLogprobs | int, ...] = ()
        if self._echo is not None:
            text = self._echo(index) + text
            if self._scores:
                prompt = (choice.prompt_tokens[0], *choice.prompt_logprobs)
        logprobs = self._logprobs(index, seen, prompt) if seen or prompt else None
        finished = self._ended(choice.finished)
        body = self._choice(index, text, finished.reason, logprobs, finished.matched_stop)
        if self.extras.token_ids:
            body |= {
                "token_ids": () if self._silent else choice.tokens,
                "prompt_token_ids": choice.prompt_tokens,
            }
        return body

    def _shown_of(
        self, index: int, logprobs: Sequence[TokenLogprobs], text: str
    ) -> list[TokenLogprobs]:
        """Return those of the tokens whose text is shown now; a stop string's is not."""
        if not logprobs and index not in self._shown:
            return []
        shown = self._shown.setdefault(index, ContentLogprobs(self.envelope.tokenizer))
        shown.add(logprobs)
        shown.show_text(len(text))
        return shown.take()

    def _logprobs(
        self,
        index: int,
        answer: Sequence[TokenLogprobs | int],
        prompt: Sequence[TokenLogprobs | int] = (),
    ) -> Json:
        """A bare token is the prompt's first, which has no log-probability."""
        tokenizer = self.envelope.tokenizer
        offsets = self._offsets.setdefault(index, TextOffsets(tokenizer))
        begin: list[int] = []
        if prompt and self._echo is not None:
            begin = offsets.of_prompt(map(_token, prompt), self._echo(index))
        begin += offsets.of_answer(map(_token, answer))
        logprobs = (*prompt, *answer)
        return {
            "tokens": [self.envelope.name(_token(at)) for at in logprobs],
            "token_logprobs": [None if isinstance(at, int) else at.logprob for at in logprobs],
            "top_logprobs": [
                None if isinstance(at, int) else self._alternatives(at) for at in logprobs
            ],
            "text_offset": begin,
        }

    def _alternatives(self, at: TokenLogprobs) -> Json:
        """Return the likeliest tokens and the chosen one, as OpenAI's API does."""
        name = self.envelope.name
        return {name(token): value for token, value in at.top} | {name(at.token): at.logprob}

    def opening(self, index: int, answer: Answer) -> bytes:
        text = "" if self._echo is None or self._scores else self._echo(index)
        if not (text or self.extras.token_ids):
            return b""
        choice = self._choice(index, text, None, None)
        if self.extras.token_ids:
            choice |= {"token_ids": (), "prompt_token_ids": answer.accepted.prompt_tokens}
        return self.chunk(choice, answer)

    def text(self, index: int, delta: Delta, answer: Answer) -> bytes:
        """Format a delta as a chunk, behind the prompt if that is due; text alone goes into the
        shell."""
        shown = [] if self._silent else self._shown_of(index, delta.logprobs, delta.text)
        is_text_alone = self.plain and index == 0 and not shown and not self._silent
        if is_text_alone:
            return b"".join((self._before, encode(delta.text), self._after)) if delta.text else b""
        pending = self._prompt(index, answer)
        seen = self._logprobs(index, shown) if shown else None
        has_content = bool(delta.text or seen or self.extras.token_ids)
        if self._silent or not has_content:
            return pending
        choice = self._choice(index, delta.text, None, seen)
        if self.extras.token_ids:
            choice["token_ids"] = delta.tokens
        return pending + self.chunk(choice, answer)

    def _prompt(self, index: int, answer: Answer) -> bytes:
        if self._echo is None or not self._scores or index in self._offsets:
            return b""
        seen = self._logprobs(
            index, (), [answer.accepted.prompt_tokens[0], *answer.prompt_logprobs]
        )
        return self.chunk(self._choice(index, self._echo(index), None, seen), answer)

    def ending(self, index: int, finished: Finished, answer: Answer) -> bytes:
        ended = self._ended(finished)
        last = self._choice(index, "", ended.reason, None, ended.matched_stop)
        return self._prompt(index, answer) + self.chunk(last, answer)


def _token(at: TokenLogprobs | int) -> int:
    return at if isinstance(at, int) else at.token


class TextOffsets:
    """`text_offset` of log-probabilities, in characters, at most the text's length. A token
    within a character has the character's offset."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = UTF8("replace")
        self._end = 0

    def of_prompt(self, tokens: Iterable[int], text: str) -> list[int]:
        """The prompt's text may lack BOS and sentencepiece's space before the first word."""
        offsets = []
        for token in tokens:
            offsets.append(self._end)
            piece = self._decoder.decode(self._tokenizer.token_bytes(token))
            special = "" if piece else self._special(token)
            if special and text.startswith(special, self._end):
                piece = special
            elif self._end == 0 and piece.startswith(" ") and not text.startswith(" "):
                piece = piece[1:]
            self._end = min(self._end + len(piece), len(text))
        self._end = len(text)
        self._decoder.reset()
        return offsets

    def of_answer(self, tokens: Iterable[int]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._end)
            self._end += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return offsets

    def _special(self, token: int) -> str:
        return "" if self._tokenizer.token_bytes(token) else self._tokenizer.token_text(token)
