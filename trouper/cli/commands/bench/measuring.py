"""The measurements of `trouper bench`, in their order."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from statistics import median

import attrs
import trio

from trouper.cli.client import Where
from trouper.cli.commands.bench.figures import LoadFigures, PrefixFigures, load_of
from trouper.cli.commands.bench.load import Question, Stream, random_words, run_streams
from trouper.protocol.exception_groups import leaves

ProgressCallback = Callable[[str], None]
"""Called with a description of the current measurement, for the user who waits."""
SHORT_WORDS = 3
WARM_UP_TOKENS = 8


@attrs.frozen(kw_only=True)
class BenchOptions:
    streams: Sequence[int]
    tokens: int
    prompt_words: int
    long_words: int
    rounds: int
    drafts: bool = False

    @property
    def parts(self) -> int:
        """The number of measurements, which is how often the progress callback is called."""
        return len(self.streams) * (self.rounds + 1) + self.rounds


def measure_load(
    where: Where, options: BenchOptions, streams: int, show_progress: ProgressCallback
) -> LoadFigures:
    """Measure one load. A first round is not counted: kernels compile, and the server learns how
    fast its device is."""
    show_progress(f"{streams} at once, warming up")
    _ask(
        where,
        [
            Question(random_words(options.prompt_words), WARM_UP_TOKENS, options.drafts)
            for _ in range(streams)
        ],
    )
    rounds = []
    for number in range(options.rounds):
        show_progress(f"{streams} at once, round {number + 1} of {options.rounds}")
        rounds.append(
            _ask(
                where,
                [
                    Question(random_words(options.prompt_words), options.tokens, options.drafts)
                    for _ in range(streams)
                ],
            )
        )
    return load_of(rounds)


def measure_prefix(
    where: Where, options: BenchOptions, show_progress: ProgressCallback
) -> PrefixFigures:
    """Measure the prefix cache, one request at a time; each round has a prompt of its own."""
    seen: dict[str, list[Stream]] = {"cold": [], "again": [], "extended": [], "short": []}
    for number in range(options.rounds):
        show_progress(f"the prefix cache, round {number + 1} of {options.rounds}")
        salt, prompt = secrets.token_hex(8), random_words(options.long_words)
        for name, text in (
            ("cold", prompt),
            ("again", prompt),
            ("extended", f"{prompt}. {random_words(SHORT_WORDS)}?"),
        ):
            seen[name] += _ask(where, [Question(text, 2, salt=salt)])
        seen["short"] += _ask(where, [Question(random_words(SHORT_WORDS), 2)])
    ttft = {name: median(stream.ttft_s for stream in streams) for name, streams in seen.items()}
    return PrefixFigures(
        prompt_tokens=round(median(stream.prompt_tokens for stream in seen["cold"])),
        cold_s=ttft["cold"],
        again_s=ttft["again"],
        extended_s=ttft["extended"],
        short_s=ttft["short"],
        cached_tokens=round(median(stream.cached_tokens for stream in seen["again"])),
    )


def _ask(where: Where, questions: Sequence[Question]) -> list[Stream]:
    """Run the requests. Raises the first of `AnswerFailed`, `NotTrouper`, or httpx2's errors."""
    try:
        return trio.run(run_streams, where, questions)
    except BaseExceptionGroup as group:
        raise next(leaves(group)) from None
