"""Drafters that read taps, in the batch: whatever they draft, rows say what they say without; and
they draft what they would say alone."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import mlx.core as mx
import numpy as np
import pytest

from tests.engine.driver import Driver, Request
from tests.engine.test_draft_model import SHAPES, SMALL_BANKS, assert_all_right, play_on
from tests.engine.test_drafts import foretelling
from tests.engine.test_exactness import greedy_requests, model_of, seeded_requests
from tests.engine.test_mtp import CLOSE, plain_answers, requests_of, watching
from tests.families import save
from tests.family_configs import VOCABULARY
from tests.heads import save_with_head
from tests.tapped import BLOCK, Kind, saved_drafter
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.spec_decode.tapped_drafters import DFlash, TappedDrafter
from trouper.engine.step import StepEngine
from trouper.protocol.plans import BlockId, Restore, RowId, Store
from trouper.protocol.settings import Settings

TOKENS = 24
KINDS: tuple[Kind, ...] = ("eagle3", "dflash", "dspark")
FAMILIES = (
    *("llama", "gpt_oss", "qwen3", "gemma2", "deepseek_v3", "cohere2", "phi3", "llama4_text"),
    *("qwen3_5", "falcon_h1", "lfm2", "granitemoehybrid"),
)
"""The last four have recurrent states, too."""


@cache
def loaded(name: str, kind: Kind, *, right: bool = False) -> EvaluatedModel:
    """`right`: a model that counts, and an EAGLE-3 drafter that does."""
    with TemporaryDirectory() as directory:
        path = Path(directory)
        drafter = saved_drafter(path, kind, name, right=right)
        target = path / "target"
        model = save_with_head(name, target, "of states") if right else save(name, target)
        settings = Settings(model=str(model), draft_model=str(drafter), self_check="off")
        return load(settings, lambda _: None)


def drafter_of(one: EvaluatedModel) -> TappedDrafter:
    assert isinstance(one.drafters.reader, TappedDrafter)
    return one.drafters.reader


def engine_of(one: EvaluatedModel, **how: Any) -> StepEngine:
    capabilities = one.card.capabilities
    if how.get("shapes") is not None and not capabilities.allows("banks"):
        how["shapes"] = attrs.evolve(how["shapes"], first_bank=4096)
    return StepEngine(
        one.model, VOCABULARY, head=one.drafters.reader, capabilities=capabilities, **how
    )


def by_drafter(engine: StepEngine, size: int = 4, **how: Any) -> Driver:
    """Rows draft by the drafter alone."""
    allow = how.pop("allow", lambda _: size)
    return Driver(engine, allow=allow, propose=lambda _: "draft_model", **how)


@pytest.mark.parametrize("size", [1, 5])
def test_a_right_drafter_is_always_right(size: int) -> None:
    """Also beside rows that join later: from the right tap, and then from its own states."""
    requests = [
        attrs.evolve(request, join=3 * place) for place, request in enumerate(requests_of())
    ]
    driver = by_drafter(engine_of(loaded("mimo", "eagle3", right=True)), size)
    rows = driver.play(requests)
    assert_all_right(driver)
    plain = plain_answers("mimo", requests_of(), "of states")
    assert [row.tokens[:TOKENS] for row in rows] == plain


def said_alone(drafter: TappedDrafter, tokens: Sequence[int], size: int) -> tuple[list[int], float]:
    """What the drafter drafts after these tokens, by passes over all of them and no slots; and the
    smallest difference of two best logits."""
    _, states = drafter.target_states(mx.array([tokens]), None)
    states = states[:, :-1]
    if isinstance(drafter, DFlash):
        caches = drafter.make_cache()
        drafter(mx.array([tokens[:-1]]), states, caches)
        block = [tokens[-1], *[drafter.mask_token] * (BLOCK - 1)]
        first = 0 if drafter.anchored else 1
        out = drafter(mx.array([block]), None, caches)[:, first : first + size]
        return np.array(drafter.picked(out, mx.array([tokens[-1]]))[0]).tolist(), gap_of(
            drafter, out
        )
    following, gap, said, own = list(tokens[1:]), np.inf, list[int](), drafter.make_cache()
    out = drafter(mx.array([following]), states, own)[:, -1:]
    for _ in range(size):
        gap = min(gap, gap_of(drafter, out))
        said.append(int(drafter.picked(out)[0, 0].item()))  # type: ignore[arg-type]
        out = drafter(mx.array([said[-1:]]), out, own)
    return said, gap


def gap_of(drafter: TappedDrafter, states: mx.array) -> float:
    normed = drafter.norm(states)
    head = drafter.lm_head if "lm_head" in drafter else drafter._shared.logits_of
    best = mx.sort(head(normed).astype(mx.float32), axis=-1)
    return float((best[..., -1] - best[..., -2]).min().item())  # type: ignore[arg-type]


class Comparing:
    """Compares each draft with what the drafter says alone."""

    def __init__(self, drafter: TappedDrafter) -> None:
        self.drafter, self.same, self.others = drafter, 0, list[tuple[Any, ...]]()

    def __call__(
        self, tokens: Mapping[RowId, Sequence[int]], drafts: dict[RowId, list[int]]
    ) -> None:
        for row, draft in drafts.items():
            said, gap = said_alone(self.drafter, tokens[row], len(draft))
            if said == draft or gap < CLOSE:
                self.same += 1
            else:
                self.others.append((row, len(tokens[row]), said, draft, gap))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *(("llama", shapes) for shapes in SHAPES),
        *(("gpt_oss", "banks"), ("qwen3_5", "rounded"), ("gemma2", "rounded")),
    ],
)
@pytest.mark.long(but=("llama-banks-*", "qwen3_5-rounded-*"))
def test_it_drafts_what_it_says_alone(name: str, shapes: str, kind: Kind) -> None:
    """After prompts in chunks, wrong drafts, rests, in other company and other banks."""
    one = loaded(name, kind)
    dice, engine = random.Random(f"{name} {shapes}"), engine_of(one, shapes=SHAPES[shapes])
    watching(engine, comparing := Comparing(drafter_of(one)))
    driver = by_drafter(
        engine, chunk=lambda step: (1, 16, 200)[step % 3], allow=lambda _: dice.choice((0, 1, 3, 9))
    )
    seeded = [request for request, _ in seeded_requests(name)][:3]
    requests = [
        attrs.evolve(request, join=dice.randrange(9)) for request in (*requests_of(), *seeded)
    ]
    driver.play(requests)
    assert comparing.same > 40 and not comparing.others


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.long(but=("gpt_oss-eagle3", "qwen3_5-dflash", "llama-dspark", "falcon_h1-eagle3"))
def test_r9_f22_a_row_says_the_same_with_a_drafter(name: str, kind: Kind) -> None:
    cases = [*greedy_requests(name), *seeded_requests(name)]
    dice = random.Random(f"{name} {kind}")
    drafting = foretelling(cases, dice, 6)
    one = loaded(name, kind)
    engine = engine_of(one, drafting=drafting, shapes=SMALL_BANKS)
    watching(engine, comparing := Comparing(drafter_of(one)))
    driver = play_on(engine, name, cases, dice, ("ngram", "draft_model", "draft_model"))
    assert {0, 1} <= {right for _, _, right in driver.drafted}
    assert comparing.same > 10 and not comparing.others, "also behind drafts that were right"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_from_blocks_brings_the_drafters_kv(kind: Kind) -> None:
    one = loaded("llama", kind)
    engine, comparing = engine_of(one), Comparing(drafter_of(one))
    [request] = requests_of((40,), 20)
    # It goes on with the token that the first row went on with.
    second = Request([*request.prompt[:33], 7, 8, 9], 12)
    store = Store(RowId(0), 0, (16, 16), (BlockId(1), BlockId(2)))
    restore = Restore(32, (BlockId(1), BlockId(2)))
    driver = by_drafter(
        engine, allow=lambda step: 4 if step > 7 else 0, orders={6: {"store": (store,)}}
    )

    def of_second(by_row: Mapping[RowId, Any]) -> dict[RowId, Any]:
        return {row: value for row, value in by_row.items() if row == RowId(1)}

    watching(engine, lambda tokens, drafts: comparing(of_second(tokens), of_second(drafts)))
    rows = driver.play([request, attrs.evolve(second, join=7, restore=restore)])
    plain = Driver(StepEngine(model_of("llama"), VOCABULARY)).play([second])
    assert rows[1].tokens[:12] == plain[0].tokens[:12]
    assert comparing.same > 3 and not comparing.others
