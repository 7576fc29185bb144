"""What `trouper bench` does, in its order."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from statistics import median

import attrs
import trio

from trouper.cli.client import Where
from trouper.cli.commands.bench.figures import Load, Prefix, load_of
from trouper.cli.commands.bench.load import Question, Stream, together, words
from trouper.cli.exits import leaves

Told = Callable[[str], None]
"""What is measured now, for a person who waits."""
SHORT_WORDS = 3
WARM_UP_TOKENS = 8


@attrs.frozen(kw_only=True)
class Wishes:
    streams: Sequence[int]
    tokens: int
    prompt_words: int
    long_words: int
    rounds: int
    drafts: bool = False

    @property
    def parts(self) -> int:
        """So often `Told` is called."""
        return len(self.streams) * (self.rounds + 1) + self.rounds


def measure_load(where: Where, wishes: Wishes, streams: int, told: Told) -> Load:
    """A first round is not counted: kernels compile, and the server learns how fast its device is."""
    told(f"{streams} at once, warming up")
    _ask(where, [Question(words(wishes.prompt_words), WARM_UP_TOKENS, wishes.drafts) for _ in range(streams)])
    rounds = []
    for number in range(wishes.rounds):
        told(f"{streams} at once, round {number + 1} of {wishes.rounds}")
        rounds.append(
            _ask(where, [Question(words(wishes.prompt_words), wishes.tokens, wishes.drafts) for _ in range(streams)])
        )
    return load_of(rounds)


def measure_prefix(where: Where, wishes: Wishes, told: Told) -> Prefix:
    """One request at a time; each round has a prompt of its own."""
    seen: dict[str, list[Stream]] = {"cold": [], "again": [], "extended": [], "short": []}
    for number in range(wishes.rounds):
        told(f"the prefix cache, round {number + 1} of {wishes.rounds}")
        salt, prompt = secrets.token_hex(8), words(wishes.long_words)
        for name, text in (("cold", prompt), ("again", prompt), ("extended", f"{prompt}. {words(SHORT_WORDS)}?")):
            seen[name] += _ask(where, [Question(text, 2, salt=salt)])
        seen["short"] += _ask(where, [Question(words(SHORT_WORDS), 2)])
    ttft = {name: median(stream.ttft_s for stream in streams) for name, streams in seen.items()}
    return Prefix(
        prompt_tokens=round(median(stream.prompt_tokens for stream in seen["cold"])),
        cold_s=ttft["cold"],
        again_s=ttft["again"],
        extended_s=ttft["extended"],
        short_s=ttft["short"],
        cached_tokens=round(median(stream.cached_tokens for stream in seen["again"])),
    )


def _ask(where: Where, questions: Sequence[Question]) -> list[Stream]:
    """Raises `AnswerFailed`, `NotTrouper`, or httpx2's errors: of several the first."""
    try:
        return trio.run(together, where, questions)
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from None
