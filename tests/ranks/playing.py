"""One rank that loads models and plays scripts on its engine: `python -m tests.ranks.playing SPEC`,
a JSON object.

Its last line is what each row of each model answered, and what loading took. What the ranks do
follows from the spec alone, as in a server it follows from the plans.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from random import Random
from typing import Any

import attrs
import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map

from tests.engine.driver import GREEDY, Driver, Request, Row
from tests.engine.oracle import Foretelling
from tests.families import prompts
from trouper.engine.distributed.rank_group import RankGroup, join
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.step import StepEngine
from trouper.protocol.grammar import Grammar
from trouper.protocol.plans import BlockId, Restore, RowId, Store, ThinkingLimit
from trouper.protocol.sampling import Sampling
from trouper.protocol.settings import Settings

PROMPTS = prompts((17, 64, 130))
MORE = prompts((3, 33, 100), seed=8)
SAMPLINGS = (
    Sampling(temperature=0.8, seed=1),
    Sampling(temperature=0.8, seed=2, top_k=20, top_p=0.9, repetition_penalty=1.2),
    Sampling(temperature=0.5, seed=3, min_p=0.05, frequency_penalty=0.3, logit_bias=((7, 1.5),)),
)
SEEDED_TOKENS = 12
"""Of each row that draws: their seeds are chosen so that so many draws are certain."""
DRAFTED = 4
"""Tokens that a row guesses at a time."""
STORED = (64, 64)
"""Tokens of the blocks that are stored of the longest prompt."""


def main() -> None:
    group = join()
    invited = group.share(b"rank 0 says so" if group.leads else b"nobody asked").decode()
    told = {"rank": group.rank, "invited": invited, "gathered": group.gather(group.rank + 5)}
    sys.stdout.write(json.dumps({**told, **play_all(json.loads(sys.argv[1]), group)}) + "\n")


def play_all(spec: dict[str, Any], group: RankGroup) -> dict[str, Any]:
    """Of each model what its rows answered, and what loading took."""
    told: dict[str, Any] = {}
    for name, one in spec.items():
        mx.reset_peak_memory()
        loaded = load(
            Settings(model=one["directory"], no_ssd=True, **one.get("settings", {})),
            lambda _: None,
            group=group,
        )
        if seed := one.get("jitter"):
            jitter(loaded.model, seed)
        told[name] = {
            "weights_bytes": loaded.card.weights_bytes,
            "peak_bytes": mx.get_peak_memory(),
            "token_bytes": loaded.card.kv.token_bytes,
            "cache_bytes": loaded.card.cache_bytes,
            **play(loaded, group, one),
        }
    return told


def jitter(model: nn.Module, seed: int) -> None:
    """Other rounding: weights change by a millionth. Where that changes a token, other additions
    may, too."""
    mx.random.seed(seed)
    model.update(
        tree_map(
            lambda weight: weight * (1 + 1e-6 * mx.random.normal(weight.shape)), model.parameters()
        )
    )


def play(loaded: EvaluatedModel, group: RankGroup, spec: dict[str, Any]) -> dict[str, Any]:
    engine = StepEngine(
        loaded.model, loaded.card.vocab_size, loaded.kv, loaded.tokenizer.grammars, group
    )
    said: dict[str, Any] = {}
    if tokens := spec.get("greedy"):
        said["greedy"] = answers(
            Driver(engine).play([Request(prompt, tokens) for prompt in PROMPTS])
        )
        if spec.get("drafts"):
            said["drafted"] = drafted(loaded, group, said["greedy"])
    if seeds := spec.get("seeds"):
        said["seeded"] = answers(Driver(engine).play(seeded(seeds, group)))
        said["mixed"] = answers(Driver(engine, chunk=50).play(mixed(seeds)))
    if spec.get("prefixes"):
        said["prefixes"] = prefixes(engine)
    return said


def drafted(
    loaded: EvaluatedModel, group: RankGroup, wanted: Sequence[Sequence[int]]
) -> list[list[int]]:
    """The same once more, by rows that guess what they will say, and are wrong now and then."""
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, wanted, strict=True)}
    oracle = Foretelling(tokens=DRAFTED, answers=known, dice=Random(0))
    driver = Driver(
        StepEngine(loaded.model, loaded.card.vocab_size, loaded.kv, None, group, drafting=oracle),
        allow=lambda _: DRAFTED,
    )
    rows = driver.play(
        [Request(prompt, len(answer), drafts=True) for prompt, answer in known.items()]
    )
    tried, right = (sum(each[place] for each in driver.drafted) for place in (1, 2))
    assert 0 < right < tried, "a mix of right and wrong drafts, or this shows little"
    return [row.tokens[: row.request.tokens] for row in rows]


def answers(rows: Sequence[Row]) -> list[list[int]]:
    return [row.tokens for row in rows]


def seeded(seeds: Sequence[int], group: RankGroup) -> list[Request]:
    """F21: on each rank other seeds, as if it drew for itself. Rank 0's count."""
    shaped = [
        attrs.evolve(one, seed=seed + 1000 * group.rank)
        for one, seed in zip(SAMPLINGS, seeds, strict=True)
    ]
    return [
        Request(prompt, SEEDED_TOKENS, sampling)
        for prompt, sampling in zip(PROMPTS, shaped, strict=True)
    ]


def mixed(seeds: Sequence[int]) -> list[Request]:
    """Rows that join and leave, follow grammars, think, and want log-probabilities."""
    shaped = [attrs.evolve(one, seed=seed) for one, seed in zip(SAMPLINGS, seeds, strict=True)]
    drawn = [
        Request(*each, join=3 * place)
        for place, each in enumerate(zip(PROMPTS, [9] * 3, shaped, strict=True))
    ]
    return [
        *drawn,
        Request(MORE[0], 20, GREEDY, join=1, leave=9),
        Request(MORE[1], 12, GREEDY, join=2, grammar=Grammar("regex", "[a-z]{3}=[0-9]{4};")),
        Request(
            MORE[2],
            12,
            GREEDY,
            join=4,
            thinking=ThinkingLimit(3, (300, 301), (310, 311), begun=True),
            logprobs=2,
        ),
        Request(MORE[0], 8, GREEDY, join=5, min_tokens=4, ends=(1, 2, 3)),
    ]


def prefixes(engine: StepEngine) -> list[list[int]]:
    """A row whose blocks are stored while it decodes; another that begins with them; one that
    copies a live row."""
    prompt = PROMPTS[2]
    order = Store(RowId(0), 0, STORED, (BlockId(0), BlockId(1)))
    driver = Driver(engine, orders={7: {"store": (order,)}})
    live = Restore(64, source=RowId(0))
    rows = driver.play([Request(prompt, 10), Request(prompt[:80], 6, join=8, restore=live)])
    again = driver.play(
        [Request([*prompt, 5, 6, 7], 6, restore=Restore(sum(STORED), order.blocks))]
    )
    engine.blocks.evict(order.blocks)
    return answers([*rows, *again])


if __name__ == "__main__":
    main()
