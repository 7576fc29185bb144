"""What drafts are worth: the same requests with `speculation` off and on, in turns on one runtime.
`just bench-speculation`; of a model of random weights that copies its prompt, `just
bench-speculation --copying qwen3_5 --rows 1 4 8`; on a GPU, `qwen3-4b`.

Decoding only: from the first token of all to the last one's end, of prompts that are cached. Each
round asks twice, in the other order than the round before; the ratio is that of the rounds'
medians, and behind it the mean of the rounds' ratios with its interval of 95 %. Tokens are
compared, too. `--twice-off` compares `off` with itself: what differs then is the machine's noise
and the benchmark's own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import trio

from benchmarks.copying import CONFIGS, copied_text, save_copying, walked_text
from benchmarks.paired import interval
from trouper import Generate, Runtime, Sampling, Settings, TextPrompt, TokenPrompt, run_runtime
from trouper.protocol.requests import Speculation

STORY = (
    "The old lighthouse stood at the end of the long stone pier, where the waves broke against the "
    "rocks day and night. "
    "Every evening the keeper climbed the narrow stairs with a lamp in one hand and a book in the "
    "other. He had lived there "
    "for thirty years, and he knew the name of every ship that passed. In winter the storms came "
    "from the north, and the "
    "windows shook until the morning. In summer the children of the village walked out to the pier "
    "with their fishing rods, "
    "and he told them about the whales that he had seen when he was young. One day a small boat "
    "with a red sail came into "
    "the bay. A woman sat in it, and she had a letter for the keeper. He read it twice, folded it, "
    "and put it into his "
    "pocket. Then he looked at the sea for a long time. The letter said that the lighthouse would "
    "be closed in the spring, "
    "and that a machine would do the work from then on. The keeper did not complain. He cleaned "
    "the lamp, oiled the hinges, "
    "painted the door, and wrote down everything that he knew about the tides, the winds and the "
    "birds. When the men came to "
    "bring the machine, they found the book on the table, and on the first page it said: take good "
    "care of the light. "
)
LIST = "".join(
    f"{n}. Item number {n}: buy bread, milk, eggs and butter at the market, then go home.\n"
    for n in range(1, 9)
)
NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Frank", "Greta", "Henry") * 2
TASKS = {
    "rewrite": lambda name: (
        f"The first version of the story:\n\n{STORY}\n\nThe second version of the story, in which "
        f"the keeper is called {name}, "
        "and which is the same otherwise:\n\nThe old lighthouse stood at the end of the long stone "
        "pier,"
    ),
    "list": lambda name: f"The shopping list of {name}:\n\n{LIST}",
    "fresh": lambda name: f"{name} had never been to the mountains before. On the first morning",
}
COPIED = {"copy": 0, "edit": 12}
"""The tasks of copying models: which tokens of the text are others in the prompt, so that drafts
are right in part. 0: none. `walk` is a prompt and an answer that repeat nothing."""
WITH_COPYING = (*COPIED, "walk")
HOT = {"rewrite": 0.0, "list": 0.0, "fresh": 0.9}
GOALS = {
    ("copy", 1): 1.8,
    ("rewrite", 1): 2.0,
    ("list", 1): 2.0,
    ("rewrite", 4): 1.5,
    ("list", 4): 1.5,
}


@attrs.frozen
class Said:
    tokens: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def rate(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def prompt(task: str, place: int) -> TextPrompt | TokenPrompt:
    if task in COPIED:
        return TokenPrompt(copied_text(260, 13 * place, COPIED[task]))
    if task == "walk":
        return TokenPrompt(walked_text(260, 230 * place))
    return TextPrompt(TASKS[task](NAMES[place]))


async def ask(runtime: Runtime, task: str, rows: int, tokens: int, how: Speculation) -> Said:
    """All at once, and how long they took from the first token on."""
    said: list[list[int]] = [[] for _ in range(rows)]
    began = float("inf")

    async def one(place: int) -> None:
        nonlocal began
        request = Generate(
            request_id=f"{task} {place}",
            prompt=prompt(task, place),
            sampling=Sampling(
                temperature=HOT.get(task, 0.0), seed=place, top_p=0.95 if HOT.get(task) else 1.0
            ),
            max_tokens=tokens,
            ignore_eos=True,
            speculation=how,
        )
        with await runtime.submit(request) as answer:
            async for delta in answer:
                began = min(began, trio.current_time())
                said[place] += delta.tokens

    async with trio.open_nursery() as nursery:
        for place in range(rows):
            nursery.start_soon(one, place)
    return Said(tuple(map(tuple, said)), trio.current_time() - began)


async def compare(runtime: Runtime, task: str, rows: int, options: argparse.Namespace) -> float:
    tokens, rounds = options.tokens, options.rounds
    with_drafts: Speculation = "off" if options.twice_off else "ngram"
    off: list[Said] = []
    on: list[Said] = []
    await ask(runtime, task, rows, 2, "off")
    before = runtime.health().scheduler.speculation
    for place in range(rounds):
        for said in (off, on) if place % 2 else (on, off):
            said.append(
                await ask(runtime, task, rows, tokens, "off" if said is off else with_drafts)
            )
    facts = runtime.health().scheduler.speculation
    drafted, accepted = facts.drafted - before.drafted, facts.accepted - before.accepted
    ratio = statistics.median(said.rate for said in on) / statistics.median(
        said.rate for said in off
    )
    same = {said.tokens for said in (*off, *on)}
    each = (
        interval([new.rate / old.rate for new, old in zip(on, off, strict=True)])
        if rounds > 2
        else ""
    )
    goal = GOALS.get((task, rows), 0.97)
    print(
        f"{task:8} {rows:2} rows: {statistics.median(said.rate for said in off):6.1f} -> "
        f"{statistics.median(said.rate for said in on):6.1f} tok/s, {ratio:5.2f}, by rounds {each} "
        f"(at least {goal} is wanted); "
        f"{accepted} of {drafted} drafted tokens were right in {facts.steps - before.steps} steps; "
        f"{'the same tokens' if len(same) == 1 else 'TOKENS DIFFER'}",
        flush=True,
    )
    return ratio


async def run(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as directory:
        copying = options.copying and str(
            save_copying(options.copying, Path(directory) / options.copying)
        )
        await measure(
            options,
            copying or options.model,
            options.tasks or [*(WITH_COPYING if copying else TASKS)],
        )


async def measure(options: argparse.Namespace, model: str | None, tasks: Sequence[str]) -> None:
    settings = Settings(model=model, no_ssd=True, gather_ms=20, self_check="off")
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(run_runtime, settings)
        for rows in options.rows:
            for task in tasks:
                await compare(runtime, task, rows, options)
        await runtime.drain(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument(
        "--copying",
        choices=CONFIGS,
        help="a model of this shape instead, and a text that it copies",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tasks", nargs="+", choices=(*TASKS, *WITH_COPYING))
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--twice-off", action="store_true", help="compare `off` with itself")
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
