"""A draft model against what the cost of its passes predicts: `python -m benchmarks.draft_model`.

The model drafts for itself, so every draft is right, and each step brings all drafted tokens and
one more. Its rate should then be that of one pass of each kind: `drafts` passes of the draft model
and one that verifies. These are timed on the engine's rows alone, without sampling, scheduler and
streams, in turns with the server's whole way. `--draft-layers` drafts with the first layers
instead. On a machine that others use, `--cpu-time` with OPENBLAS_NUM_THREADS=1 compares seconds of
this process in place of seconds: both sides then pay for the same work, whoever interrupts it. On a
GPU it says nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import numpy as np
import trio

from benchmarks.models import save_truncated
from benchmarks.speculation import NAMES, TASKS
from trouper import Generate, Runtime, Sampling, Settings, TextPrompt, run_runtime
from trouper.actors.scheduling import core
from trouper.actors.scheduling.speculation_policy import Allowed, Drafter, Speculation
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.loading import bundled_model
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.passes.pass_shapes import of_device
from trouper.protocol.plans import ProposerName, RowId
from trouper.protocol.requests import Speculation as WhatDrafts

TASK = "list"
Clock = Callable[[], float]


class Always(Speculation):
    """Every row drafts with the draft model in each step, whether it pays or not."""

    def allow(self, rows: Sequence[Drafter]) -> Allowed:
        most = max(self._sizes)
        drafts = tuple(max(0, min(most, row.room)) if row.records else 0 for row in rows)
        model: ProposerName = "draft_model"
        return Allowed(drafts, (model,) * len(rows)) if any(drafts) else Allowed()


class Passes:
    """Bare passes over rows of a model and its draft model, as long as those of the server in the
    middle of their answers."""

    def __init__(self, loaded: EvaluatedModel, rows: int, drafts: int, tokens: int) -> None:
        draft = loaded.model if loaded.draft is None else loaded.draft.model
        made, _ = rows_for(
            loaded.model, PLAIN, 0, of_device(), loaded.card.capabilities, draft=draft
        )
        assert isinstance(made, SlotRows) and made.draft is not None
        self._rows, self._draft, self._drafts = made, made.draft, drafts
        self.ids = [RowId(place) for place in range(rows)]
        prompts = {
            row: [*loaded.tokenizer.encode(TASKS[TASK](NAMES[row])), *range(3, 3 + tokens // 2)]
            for row in self.ids
        }
        self._rows.make_room([len(prompt) for prompt in prompts.values()])
        for row, prompt in prompts.items():
            self._rows.open(row, len(prompt))
            self._draft.lengths[row] = 0
        mx.eval(self._rows.prefill(prompts))
        for row in self.ids:
            self._rows.promote(row)
        self._draft.prefill(prompts)

    def seconds(self, clock: Clock) -> tuple[float, float]:
        """Of a pass of the draft model, and of one that verifies; what they wrote is taken back."""
        before = dict(self._draft.lengths)
        began = clock()
        self._draft.propose(
            {row: [5] for row in self.ids},
            dict.fromkeys(self.ids, self._drafts),
            lambda tokens: tokens,
        )
        drafted = clock()
        self._draft.lengths.update(before)
        counts = np.full(len(self.ids), self._drafts + 1, np.int32)
        mx.eval(self._rows.verify(mx.ones((len(self.ids), self._drafts + 1), mx.uint32), counts))
        verified = clock()
        self._rows.accepted(np.full(len(self.ids), -1, np.int32))
        return (drafted - began) / self._drafts, verified - drafted


async def steady_rate(
    runtime: Runtime, rows: int, tokens: int, how: WhatDrafts, clock: Clock
) -> float:
    """Tokens a second that clients get while all rows decode: from the last one's first tokens to
    the first one's last."""
    heard: list[list[tuple[float, int]]] = [[] for _ in range(rows)]

    async def one(row: int) -> None:
        prompt = TextPrompt(TASKS[TASK](NAMES[row]))
        request = Generate(
            request_id=f"{how} {row}",
            prompt=prompt,
            sampling=Sampling(temperature=0),
            max_tokens=tokens,
            ignore_eos=True,
            speculation=how,
        )
        with await runtime.submit(request) as answer:
            async for delta in answer:
                heard[row].append((clock(), len(delta.tokens)))

    async with trio.open_nursery() as nursery:
        for row in range(rows):
            nursery.start_soon(one, row)
    began, ended = max(events[0][0] for events in heard), min(events[-1][0] for events in heard)
    return sum(count for events in heard for at, count in events if began < at <= ended) / (
        ended - began
    )


async def compare(runtime: Runtime, passes: Passes, options: argparse.Namespace, rows: int) -> None:
    rates, costs, plain = list[float](), list[tuple[float, float]](), list[float]()
    clock: Clock = time.process_time if options.cpu_time else time.perf_counter
    await steady_rate(runtime, rows, 12, "draft_model", clock)
    before = runtime.health().scheduler.speculation
    for _ in range(options.rounds):
        costs += [passes.seconds(clock) for _ in range(8)]
        rates.append(await steady_rate(runtime, rows, options.tokens, "draft_model", clock))
        plain.append(await steady_rate(runtime, rows, options.tokens // 2, "off", clock))
    stats = runtime.health().scheduler.speculation
    drafted, accepted = stats.drafted - before.drafted, stats.accepted - before.accepted
    one, verified = (statistics.median(column) for column in zip(*costs, strict=True))
    right = accepted / max(stats.drafts - before.drafts, 1)
    predicted = rows * (1 + right) / (options.drafts * one + verified)
    rate = statistics.median(rates)
    print(
        f"{rows:2} rows: a draft pass {1000 * one:.1f} ms, a verification of {options.drafts + 1} "
        f"tokens {1000 * verified:.1f} ms, "
        f"{accepted} of {drafted} drafted tokens right; predicted {predicted:.1f} tok/s, measured "
        f"{rate:.1f}, "
        f"{rate / predicted:.2f} of that; without drafts {statistics.median(plain):.1f}",
        flush=True,
    )


async def run(options: argparse.Namespace, model: str, draft: str) -> None:
    # A model that drafts for itself need not be read twice here.
    own = None if draft == model else draft
    loaded = load(Settings(model=model, draft_model=own, no_ssd=True), lambda _: None)
    settings = Settings(
        model=model, draft_model=draft, spec_draft_tokens=options.drafts, no_ssd=True, gather_ms=20
    )
    with patch.object(core, "Speculation", Always):
        async with trio.open_nursery() as nursery:
            runtime: Runtime = await nursery.start(run_runtime, settings)
            for rows in options.rows:
                await compare(
                    runtime, Passes(loaded, rows, options.drafts, options.tokens), options, rows
                )
            await runtime.drain(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--draft-layers", type=int, default=None)
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    model = options.model or str(bundled_model.directory())
    with TemporaryDirectory() as directory:
        draft = model
        if options.draft_layers is not None:
            draft = str(Path(directory) / "draft")
            save_truncated(model, draft, options.draft_layers)
        trio.run(run, options, model, draft)


if __name__ == "__main__":
    main()
