"""Decoding passes behind images are compiled, with positions as inputs; passes with images are
not."""

from __future__ import annotations

import random

import attrs
import pytest

from tests.engine.driver import Request
from tests.engine.oracle import Foretelling
from tests.engine.test_decode_attention import ONE_BANK, compiled, masked
from tests.engine.vision.driver import ImageDriver
from tests.engine.vision.families import VOCABULARY, Models, text
from tests.engine.vision.test_image_rows import (
    TOKENS,
    certain_prompt,
    engine_of,
    no_image,
    one_image,
    two_images,
)
from trouper.engine.kv import decode_attention, decode_kernel


@pytest.fixture(autouse=True)
def _kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_kernel, "run", masked)
    monkeypatch.setattr(decode_attention, "HEAD_DIMS", range(1, 1000))
    monkeypatch.setattr(decode_attention, "computes", lambda *_: True)


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_rows_behind_images_decode_in_compiled_passes(vision_model: Models, name: str) -> None:
    model = vision_model(name)
    prompts = [certain_prompt(model, make) for make in (two_images, one_image, no_image)]
    driver = ImageDriver(engine_of(model, ONE_BANK), 16)
    items = [driver.encode(prompt.spans, prompt.images) for prompt in prompts]
    requests = [
        prompt.request(own, join=index)
        for index, (prompt, own) in enumerate(zip(prompts, items, strict=True))
    ]
    for _ in range(3):
        rows = driver.play(requests)
        assert [row.tokens for row in rows] == [prompt.answer for prompt in prompts]
    assert compiled(driver.engine)._compiled
    assert not compiled(driver.engine).fault


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_a_pass_with_an_image_is_no_compiled_one_of_the_same_shape(
    vision_model: Models, name: str
) -> None:
    model = vision_model(name)
    prompt = certain_prompt(model, one_image)
    tokens = prompt.tokens[: prompt.spans[0].start + 2]
    expected = int(model.logits(prompt.tokens, prompt.images)[len(tokens) - 1].argmax())
    driver = ImageDriver(engine_of(model, ONE_BANK), 2)
    items = driver.encode(prompt.spans, prompt.images)
    company = Request(text(4, 1), 20)
    driver.play([company, Request(text(4, 2), 20)])
    image = attrs.evolve(prompt.request(items), prompt=tokens, tokens=1, join=3)
    _, row = driver.play([company, image])
    assert row.tokens == [expected]
    # The only pass over a short prompt, which is compiled for text.
    for _ in range(3):
        [row] = driver.play([attrs.evolve(image, join=0)])
        assert row.tokens == [expected]


@pytest.mark.parametrize("name", ["qwen3_vl", "mistral3"])
def test_drafts_behind_an_image_are_verified_in_compiled_passes(
    vision_model: Models, name: str
) -> None:
    model = vision_model(name)
    prompt = certain_prompt(model, two_images)
    drafting = Foretelling(
        tokens=4,
        answers={tuple(prompt.tokens): prompt.answer},
        dice=random.Random(5),
        vocabulary=VOCABULARY,
    )
    driver = ImageDriver(engine_of(model, ONE_BANK, drafting), 16, allow=lambda _: 2)
    items = driver.encode(prompt.spans, prompt.images)
    for _ in range(4):
        [row] = driver.play([prompt.request(items, drafts=True)])
        assert row.tokens[:TOKENS] == prompt.answer
    assert any(accepted for _, _, accepted in driver.drafted)
    assert compiled(driver.engine)._compiled
