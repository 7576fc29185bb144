"""What drafters that read taps are worth, and what a useless one costs: `python -m
benchmarks.tapped_drafters`.

The model is that of `benchmarks/mtp_head.py`. `--drafter right`: an oracle is planted into the
drafter, which computes all that it would, and then says what the model will say. In each step all
rows draft, so a step brings all drafted tokens and one more, and the rate should be that of one
draft and one verification, which are timed on the engine's rows alone. `--drafter random`: rows
draft where the policy expects it to pay, beside a server without a drafter, in turns. The output is
the steps that drafted, and the mean ratios of seconds and of CPU seconds with their intervals of
95 %; some twenty rounds of an idle machine tell a fiftieth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import attrs

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import numpy as np
import trio

from benchmarks.copying import HIDDEN, TEXT, VOCABULARY, save_copying
from benchmarks.draft_model import Always
from benchmarks.paired import interval
from benchmarks.speculation import Said, ask, prompt
from tests.engine.tapped_references import weights_of
from tests.tapped import save_drafter
from trouper import Runtime, Settings, TokenPrompt, run_runtime
from trouper.actors.scheduling import core
from trouper.actors.scheduling.speculation_policy import Allowed, Drafter, Speculation
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.kv.rows import rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.loading import tapped_loading
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.passes.pass_shapes import of_device
from trouper.engine.spec_decode.tapped_drafters import DFlash, Eagle3
from trouper.protocol.plans import RowId
from trouper.protocol.requests import Speculation as WhatDrafts

FAMILY, TASK, ROUNDS_OF_PASSES = "qwen3_5", "copy", 12
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
}
SHAPES: dict[str, dict[str, Any]] = {
    "eagle3": SHAPE
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
    },
    "dflash": SHAPE
    | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 3,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 8000, "target_layer_ids": [1, 5, 9]},
    },
}


def saved(kind: str, directory: Path) -> str:
    weights = weights_of(kind, SHAPES[kind])
    for name in ("embed_tokens.weight", "d2t", "t2d"):  # The target's own; all tokens.
        weights.pop(name, None)
    return str(save_drafter(directory / kind, SHAPES[kind], weights))


# -- planted oracles -----------------------------------------------------------------------------


def following(tokens: mx.array) -> mx.array:
    """The token after each one of the text (`benchmarks/copying.py`)."""
    return tokens.astype(mx.int32) % TEXT + 1


def planted(states: mx.array, tokens: mx.array) -> mx.array:
    """States whose first value is the token to be said."""
    return mx.concatenate([tokens[..., None].astype(states.dtype), states[..., 1:]], axis=-1)


class SayPlanted:
    """Says what is planted, after the drafter's own computation."""

    def picked(self, states: mx.array, before: mx.array | None = None) -> mx.array:
        own: mx.array = super().picked(states, before)  # type: ignore[misc]
        return states[..., 0].astype(mx.uint32) + 0 * own


class RightEagle3(SayPlanted, Eagle3):
    def __call__(
        self, tokens: mx.array, states: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        return planted(super().__call__(tokens, states, cache), following(tokens))


class RightDFlash(SayPlanted, DFlash):
    def __call__(
        self, tokens: mx.array, states: mx.array | None = None, cache: Any = None
    ) -> mx.array:
        out = super().__call__(tokens, states, cache)
        if states is not None:
            return out
        later = tokens[:, :1] - 1 + mx.arange(tokens.shape[1])
        return planted(out, later % TEXT + 1)


@contextmanager
def all_right() -> Iterator[None]:
    """Drafters are right, and all rows draft in each step."""
    classes = {"EAGLE-3": RightEagle3, "DFlash": RightDFlash}
    with patch.dict(tapped_loading.CLASSES, classes), patch.object(core, "Speculation", Always):
        yield


# -- what a draft and a verification take --------------------------------------------------------


class Passes:
    """Bare steps of rows that draft, and keep all drafts."""

    def __init__(self, loaded: EvaluatedModel, rows: int, drafts: int) -> None:
        made, _ = rows_for(
            loaded.model,
            PLAIN,
            0,
            of_device(),
            loaded.card.capabilities,
            head=loaded.drafters.reader,
        )
        assert isinstance(made, SlotRows) and made.head is not None
        self._rows, self._head, self._drafts = made, made.head, drafts
        self.ids = [RowId(place) for place in range(rows)]
        prompts = {row: _tokens(row) for row in self.ids}
        self._rows.make_room([len(tokens) for tokens in prompts.values()])
        for row, tokens in prompts.items():
            self._rows.open(row, len(tokens))
            self._head.open(row, tokens, 0)
        mx.eval(self._rows.prefill({row: tokens[:-1] for row, tokens in prompts.items()}))
        for row in self.ids:
            self._rows.promote(row)
        self._step()

    def _step(self) -> tuple[float, float]:
        began = time.perf_counter()
        drafts: dict[RowId, list[int]] = {row: [] for row in self.ids}
        if all(self._head._knows_last(row) for row in self.ids):
            sizes = dict.fromkeys(self.ids, self._drafts)
            drafts = self._head.draft(sizes, lambda tokens: tokens, self._drafts + 1)
        drafted = time.perf_counter()
        tokens = self._head.tokens
        inputs = [[tokens[row][-1], *drafts[row]] for row in self.ids]
        counts = np.full(len(self.ids), len(inputs[0]), np.int32)
        mx.eval(self._rows.verify(mx.array(inputs, mx.uint32), counts))
        verified = time.perf_counter()
        self._rows.accepted(counts - 1)
        for row in self.ids:
            tokens[row] += [*drafts[row], (drafts[row] or tokens[row])[-1] % TEXT + 1]
        return drafted - began, verified - drafted

    def seconds(self) -> tuple[float, float]:
        """The medians of a draft and a verification."""
        costs = [self._step() for _ in range(ROUNDS_OF_PASSES)]
        draft, verification = (statistics.median(each) for each in zip(*costs, strict=True))
        return draft, verification


def _tokens(row: int) -> list[int]:
    asked = prompt(TASK, row)
    assert isinstance(asked, TokenPrompt)
    return [*asked.tokens]


async def compare_with_predicted(
    runtime: Runtime, loaded: EvaluatedModel, rows: int, options: argparse.Namespace
) -> None:
    costs, said = list[tuple[float, float]](), dict[str, list[Said]]()
    await ask(runtime, TASK, rows, 12, "draft_model")
    before = runtime.health().scheduler.speculation
    for turn in range(options.rounds):
        costs.append(Passes(loaded, rows, options.drafts).seconds())
        for how in ("draft_model", "off")[:: 1 if turn % 2 else -1]:
            answer = await ask(runtime, TASK, rows, options.tokens, how)  # type: ignore[arg-type]
            said.setdefault(how, []).append(answer)
    after = runtime.health().scheduler.speculation
    assert len({each.tokens for every in said.values() for each in every}) == 1, "other tokens"
    drafted, right = after.drafted - before.drafted, after.accepted - before.accepted
    rates = {how: statistics.median(each.rate for each in every) for how, every in said.items()}
    draft, verification = (statistics.median(each) for each in zip(*costs, strict=True))
    each_step = 1 + drafted / (after.drafts - before.drafts)
    predicted = rows * each_step / (draft + verification)
    print(
        f"{options.kind}, {rows} rows: a draft {1000 * draft:.1f} ms, a verification "
        f"{1000 * verification:.1f} ms, {right} of {drafted} drafted tokens right; predicted "
        f"{predicted:.1f} tok/s, measured {rates['draft_model']:.1f} "
        f"({rates['draft_model'] / predicted:.2f} of that); without drafts {rates['off']:.1f} "
        f"({rates['draft_model'] / rates['off']:.2f} times as many)",
        flush=True,
    )


# -- a random drafter ----------------------------------------------------------------------------


@attrs.define
class Log:
    steps: int = 0
    drafted: list[int] = attrs.Factory(list)
    """Steps whose plans drafted."""


LOG = Log()


class Logged(Speculation):
    def allow(self, rows: Sequence[Drafter]) -> Allowed:
        allowed = super().allow(rows)
        if any(row.records for row in rows):
            LOG.steps += 1
            if allowed.drafts:
                LOG.drafted.append(LOG.steps)
        return allowed


async def compare_with_none(
    drafting: Runtime, bare: Runtime, rows: int, options: argparse.Namespace
) -> None:
    ways: dict[str, tuple[Runtime, WhatDrafts]]
    ways = {"drafter": (drafting, "auto"), "off": (drafting, "off"), "bare": (bare, "auto")}
    said: dict[str, list[tuple[Said, float]]] = {name: [] for name in ways}
    drafted: list[list[int]] = []
    for turn in range(options.rounds):
        for name in list(said)[:: 1 if turn % 2 else -1]:
            runtime, how = ways[name]
            LOG.steps, LOG.drafted = 0, []
            began = time.process_time()
            answer = await ask(runtime, "walk", rows, options.tokens, how)
            said[name].append((answer, time.process_time() - began))
            if name == "drafter":
                drafted.append(LOG.drafted)
    assert len({each.tokens for every in said.values() for each, _ in every}) == 1, "other tokens"
    print(f"random {options.kind}, {rows} rows: steps that drafted in each turn: {drafted}")
    for name in ("drafter", "off"):
        pairs = list(zip(said[name], said["bare"], strict=True))
        seconds = interval([mine.seconds / other.seconds for (mine, _), (other, _) in pairs])
        cpu = interval([mine / other for (_, mine), (_, other) in pairs])
        print(
            f"  {name}: seconds from the first token {seconds} times those without a drafter, "
            f"CPU seconds {cpu}",
            flush=True,
        )


async def run(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as directory:
        model = str(save_copying(FAMILY, Path(directory) / FAMILY))
        drafter = saved(options.kind, Path(directory))
        settings = Settings(
            model=model,
            draft_model=drafter,
            spec_draft_tokens=options.drafts,
            speculation="auto",
            no_ssd=True,
            gather_ms=20,
        )
        async with trio.open_nursery() as nursery:
            if options.drafter == "right":
                with all_right():
                    loaded = load(settings, lambda _: None)
                    runtime: Runtime = await nursery.start(run_runtime, settings)
                    for rows in options.rows:
                        await compare_with_predicted(runtime, loaded, rows, options)
                    await runtime.drain(10)
                return
            with patch.object(core, "Speculation", Logged):
                drafting: Runtime = await nursery.start(run_runtime, settings)
            bare: Runtime = await nursery.start(
                run_runtime, attrs.evolve(settings, draft_model=None, speculation="auto")
            )
            for rows in options.rows:
                await compare_with_none(drafting, bare, rows, options)
            await drafting.drain(10)
            await bare.drain(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("eagle3", "dflash"), default="eagle3")
    parser.add_argument("--drafter", choices=("right", "random"), default="right")
    parser.add_argument("--drafts", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
