"""States and drafts of drafters as the code that was published with them gives
(`tapped_references.py`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.arithmetic import full_float32
from tests.engine.tapped_references import (
    DFLASH,
    DRAFTS,
    DSPARK,
    EAGLE3,
    FILE,
    PROMPTS,
    TARGET,
    target_weights,
    weights_of,
)
from tests.families import save_tokenizer
from tests.tapped import save_drafter
from trouper.engine.loading.model_loading import load
from trouper.engine.spec_decode.tapped_drafters import TappedDrafter
from trouper.protocol.settings import Settings

REFERENCES = json.loads((Path(__file__).parent / FILE).read_text(encoding="utf-8"))
NUMBERS = range(len(PROMPTS))


@cache
def drafter(kind: str) -> TappedDrafter:
    config = {"eagle3": EAGLE3, "dflash": DFLASH, "dspark": DSPARK}[kind]
    with TemporaryDirectory() as directory:
        target, own = Path(directory, "target"), Path(directory, "drafter")
        save_drafter(target, TARGET, target_weights())
        save_tokenizer(target)
        save_drafter(own, config, weights_of(kind, config))
        settings = Settings(model=str(target), draft_model=str(own), self_check="off")
        reader = load(settings, lambda _: None).drafters.reader
    assert isinstance(reader, TappedDrafter)
    return reader


def near(states: mx.array, answer: dict[str, Any]) -> bool:
    theirs = np.array(answer["states"], np.float32)
    return bool(np.abs(np.array(states[0, -3:]) - theirs).max() < 1e-4)


@full_float32
@pytest.mark.parametrize("number", NUMBERS)
def test_eagle3(number: int) -> None:
    one, prompt, answer = drafter("eagle3"), PROMPTS[number], REFERENCES["eagle3"][number]
    caches, draft = one.make_cache(), list[int]()
    _, taps = one.target_states(mx.array([prompt]), None)
    states = one(mx.array([prompt[1:]]), taps[:, :-1], caches)
    assert near(states, answer)
    last = states[:, -1:]
    for _ in range(DRAFTS):
        draft.append(int(one.picked(last).item()))  # type: ignore[arg-type]
        last = one(mx.array([draft[-1:]]), last, caches)
    assert draft == answer["draft"]


@full_float32
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_blocks(kind: str, number: int) -> None:
    one, prompt, answer = drafter(kind), PROMPTS[number], REFERENCES[kind][number]
    caches = one.make_cache()
    _, taps = one.target_states(mx.array([prompt]), None)
    one(mx.array([prompt[:-1]]), taps[:, :-1], caches)
    block = [prompt[-1], *[one.mask_token] * (one.block - 1)]
    states = one(mx.array([block]), None, caches)
    assert near(one.norm(states), answer)
    states = states if one.anchored else states[:, 1:]
    draft = one.picked(states[:, :DRAFTS], mx.array(prompt[-1:]))
    assert draft[0].tolist() == answer["draft"]
