"""Rows with images answer what mlx-vlm answers with the whole prompt: alone, in company, in any
chunks, restored at any token, with drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Protocol

import attrs
import numpy as np
import pytest
from mlx import nn

from tests.arithmetic import TF32
from tests.engine.driver import Driver, Request
from tests.engine.oracle import Foretelling
from tests.engine.vision.driver import ImageDriver, ImageRequest
from tests.engine.vision.families import (
    FAMILIES,
    GEMMA,
    VOCABULARY,
    Models,
    VisionModel,
    picture,
    text,
    text_model,
)
from tests.families import build
from tests.real.serving import apart
from trouper.engine.passes.pass_shapes import EXACT, ROUNDED, Shapes
from trouper.engine.spec_decode.prompt_lookup import DRAFTING, Drafting
from trouper.engine.step import StepEngine
from trouper.engine.vision.encoder import EncodeResults, ImageEncoder
from trouper.engine.vision.tower import Tower
from trouper.engine.warm_up import warm_up
from trouper.protocol.media import ImageLayout, ItemId, MediaSpan, Pixels, chunk_end
from trouper.protocol.plans import BlockId, Encode, Load, Plan, Restore, RowId, Store

TOKENS = 6
CLOSE = 1e-2 if TF32 else 1e-4
SMALL_BANKS = attrs.evolve(EXACT, first_bank=8, shared_tokens=32)
one_of_each_kind = pytest.mark.parametrize(
    "name", ["qwen3_vl", "qwen3_5", "mistral3", "gemma3", "gemma4"]
)


@attrs.frozen(eq=False)
class Prompt:
    tokens: list[int]
    spans: tuple[MediaSpan, ...]
    images: list[Pixels]
    answer: list[int]

    def request(self, items: Sequence[ItemId], **options: object) -> ImageRequest:
        return ImageRequest(
            self.tokens,
            TOKENS,
            media=self.spans,
            items=tuple(items),
            **options,  # type: ignore[arg-type]
        )


def prompt_of(model: VisionModel, mixed: Sequence[Sequence[int] | Pixels]) -> Prompt:
    tokens, spans, images = model.prompt(mixed)
    return Prompt(tokens, spans, images, model.answer(tokens, images, TOKENS))


@cache
def certain_prompt(
    model: VisionModel, make: Callable[[int], Sequence[Sequence[int] | Pixels]]
) -> Prompt:
    """The first whose answer no rounding decides."""
    for seed in range(20):
        try:
            return prompt_of(model, make(seed))
        except AssertionError:
            continue
    raise AssertionError("no prompt has a certain answer")


def two_images(seed: int) -> Sequence[Sequence[int] | Pixels]:
    first, second = picture(16, 24, seed), picture(24, 16, seed + 50)
    return text(5, seed), first, text(4, seed + 1), second, text(6, seed + 2)


def one_image(seed: int) -> Sequence[Sequence[int] | Pixels]:
    return text(3, seed + 10), picture(16, 16, seed + 90), text(9, seed + 11)


def no_image(seed: int) -> Sequence[Sequence[int] | Pixels]:
    return [text(19, seed + 20)]


class Seeing(Protocol):
    """Both halves of a vision model."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def tower(self) -> Tower: ...


def engine_of(model: Seeing, shapes: Shapes = EXACT, drafting: Drafting = DRAFTING) -> StepEngine:
    return StepEngine(model.model, VOCABULARY, tower=model.tower, shapes=shapes, drafting=drafting)


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        *((name, EXACT) for name in (*FAMILIES, *GEMMA)),
        ("qwen3_vl", SMALL_BANKS),
        ("qwen3_vl", ROUNDED),
        ("mistral3", SMALL_BANKS),
        ("gemma3", SMALL_BANKS),
        ("gemma3", ROUNDED),
    ],
)
def test_rows_with_images_and_text_share_passes(
    vision_model: Models, name: str, shapes: Shapes
) -> None:
    model = vision_model(name)
    prompts = [certain_prompt(model, make) for make in (two_images, one_image, no_image)]
    share_passes(model, prompts, shapes)


def share_passes(model: Seeing, prompts: Sequence[Prompt], shapes: Shapes = EXACT) -> None:
    """The first prompt is played twice."""
    for chunk in (1, 7, 64):
        driver = ImageDriver(engine_of(model, shapes), chunk)
        items = [driver.encode(prompt.spans, prompt.images) for prompt in prompts]
        requests = [
            prompt.request(own, join=index)
            for index, (prompt, own) in enumerate(zip(prompts, items, strict=True))
        ]
        rows = driver.play([*requests, attrs.evolve(requests[0], join=1)])
        expected = [*(prompt.answer for prompt in prompts), prompts[0].answer]
        assert [row.tokens for row in rows] == expected, chunk
        driver.step(forget=tuple(item for own in items for item in own))
        assert driver.engine._encoder is not None
        assert driver.engine._encoder.nbytes == 0


@one_of_each_kind
def test_an_engine_that_was_warmed_up_with_an_image_answers_as_ever(
    vision_model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vision_model(name)
    answer_after_warming_up(
        model, model.layout, certain_prompt(model, two_images), monkeypatch, VOCABULARY
    )


def answer_after_warming_up(
    model: Seeing,
    layout: ImageLayout,
    prompt: Prompt,
    monkeypatch: pytest.MonkeyPatch,
    vocabulary: int,
) -> None:
    driver = ImageDriver(engine_of(model))
    seen = list[Encode]()
    encode = ImageEncoder.encode

    def noted(self: ImageEncoder, orders: Sequence[Encode]) -> EncodeResults:
        seen.extend(orders)
        return encode(self, orders)

    monkeypatch.setattr(ImageEncoder, "encode", noted)
    warm_up(driver.engine, vocabulary, context=512, images=layout)
    assert len(seen) == 1
    assert driver.engine.lengths() == {}
    assert driver.engine._encoder is not None
    assert driver.engine._encoder.nbytes == 0
    [row] = driver.play([prompt.request(driver.encode(prompt.spans, prompt.images))])
    assert row.tokens == prompt.answer


@pytest.mark.parametrize(
    "name", ["qwen3_vl", "qwen3_5", "mistral3", "pixtral", "gemma3", "gemma4", "gemma4_unified"]
)
def test_a_row_is_restored_at_every_token(vision_model: Models, name: str) -> None:
    model = vision_model(name)
    live = name != "qwen3_5" and name not in GEMMA
    restore_at_every_token(model, certain_prompt(model, two_images), live=live)


def restore_at_every_token(model: Seeing, prompt: Prompt, *, live: bool) -> None:
    """From a block, a live row, and bytes in another engine; at every token at which a chunk may
    end. `live`: False for a model with a recurrent state or a ring, which is behind all tokens of a
    live row; a block needs a snapshot of it."""
    driver, other = ImageDriver(engine_of(model)), ImageDriver(engine_of(model))
    items, others = (each.encode(prompt.spans, prompt.images) for each in (driver, other))
    for tokens in range(1, len(prompt.tokens)):
        if chunk_end(prompt.spans, 0, tokens) != tokens:
            continue
        block = BlockId(2 * tokens)
        snapshot = None if live else BlockId(2 * tokens + 1)
        blocks = (block,) if snapshot is None else (block, snapshot)
        row, step = RowId(driver._next), driver._step
        stored = Store(row, 0, (tokens,), (block,), snapshot)
        driver._orders = {step + 1: {"store": (stored,), "persist": blocks}}
        driver._chunk = partial(_first, step=0, tokens=tokens)
        restored = Restore(tokens, (block,), None, snapshot)
        request = prompt.request(items, logprobs=3)
        script = [request, attrs.evolve(request, join=1, restore=restored)]
        if live:
            script.append(attrs.evolve(request, join=1, restore=Restore(tokens, (), row)))
        rows = driver.play(script)
        driver.step(evict=blocks)
        loads = map(Load, blocks, driver.persisted[-len(blocks) :])
        other._orders = {other._step: {"load": tuple(loads)}}
        rows += other.play([prompt.request(others, logprobs=3, restore=restored)])
        other.step(evict=blocks)
        assert [row.tokens for row in rows] == [prompt.answer] * len(rows), tokens
        assert max(apart(row.logprobs, rows[0].logprobs) for row in rows) < CLOSE, tokens


def _first(now: int, step: int, tokens: int) -> int:
    return tokens if now == step else 64


@one_of_each_kind
def test_drafts_behind_an_image_change_nothing(vision_model: Models, name: str) -> None:
    model = vision_model(name)
    draft_behind_images(model, [certain_prompt(model, make) for make in (two_images, one_image)])


def draft_behind_images(
    model: Seeing, prompts: Sequence[Prompt], vocabulary: int = VOCABULARY
) -> None:
    dice = random.Random(3)
    answers = {tuple(prompt.tokens): prompt.answer for prompt in prompts}
    drafting = Foretelling(tokens=4, answers=answers, dice=dice, vocabulary=vocabulary)
    driver = ImageDriver(engine_of(model, drafting=drafting), 9, allow=lambda _: dice.randint(0, 4))
    requests = []
    for prompt in prompts:
        items = driver.encode(prompt.spans, prompt.images)
        requests.append(prompt.request(items, drafts=True))
    rows = driver.play(requests)
    # Accepted drafts may go beyond the last token.
    assert [row.tokens[:TOKENS] for row in rows] == [prompt.answer for prompt in prompts]
    assert any(accepted for _, _, accepted in driver.drafted)


@one_of_each_kind
def test_a_row_resumes_behind_its_answer(vision_model: Models, name: str) -> None:
    model = vision_model(name)
    prompt = certain_prompt(model, two_images)
    driver = ImageDriver(engine_of(model), 11)
    items = driver.encode(prompt.spans, prompt.images)
    resumed = attrs.evolve(
        prompt.request(items),
        prompt=[*prompt.tokens, *prompt.answer[:3]],
        tokens=TOKENS - 3,
        output_tokens=3,
    )
    [row] = driver.play([resumed])
    assert row.tokens == prompt.answer[3:]


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "mistral3", "gemma4_small"])
def test_a_prompt_may_end_inside_an_image(vision_model: Models, name: str) -> None:
    model = vision_model(name)
    prompt = certain_prompt(model, one_image)
    tokens = prompt.tokens[: prompt.spans[0].start + 2]
    [expected] = [int(model.logits(prompt.tokens, prompt.images)[len(tokens) - 1].argmax())]
    driver = ImageDriver(engine_of(model), 2)
    items = driver.encode(prompt.spans, prompt.images)
    image = attrs.evolve(prompt.request(items), prompt=tokens, tokens=1)
    [row] = driver.play([image])
    assert row.tokens == [expected]
    # With a row that decodes, its last token is not alone.
    _, row = driver.play([Request(text(4, 1), 9), attrs.evolve(image, join=2)])
    assert row.tokens == [expected]


def test_rows_decode_while_an_image_is_encoded(vision_model: Models) -> None:
    model = vision_model("qwen3_vl")
    text_prompt, image_prompt = (certain_prompt(model, make) for make in (no_image, one_image))
    [span], [pixels] = image_prompt.spans, image_prompt.images
    engine = engine_of(model)
    orders = {
        step: {"encode": (Encode(ItemId(7), span, 1, pixels if step == 2 else None),)}
        for step in range(2, 3 + model.tower.num_layers)
    }
    driver = ImageDriver(engine, 64, orders)
    rows = driver.play(
        [Request(text_prompt.tokens, TOKENS), image_prompt.request([ItemId(7)], join=6)]
    )
    assert [row.tokens for row in rows] == [text_prompt.answer, image_prompt.answer]


def test_the_last_slice_reports_the_bytes_of_the_vectors(vision_model: Models) -> None:
    model = vision_model("qwen3_vl")
    prompt = certain_prompt(model, one_image)
    driver = ImageDriver(engine_of(model))
    order = Encode(ItemId(1), prompt.spans[0], 3, prompt.images[0])
    assert driver.step(encode=(order,)).encoded == ()
    stepped = driver.step(encode=(attrs.evolve(order, pixels=None),))
    dim, terms = 64, 1 + model.tower.num_deepstack
    assert stepped.encoded == ((1, 4 * dim * terms * len(prompt.spans[0].tokens)),)
    assert 0 < stepped.encode_s <= stepped.seconds


def test_a_fault_of_one_image_ends_that_item_alone(vision_model: Models) -> None:
    model = vision_model("qwen3_vl")
    prompt = certain_prompt(model, two_images)
    driver = ImageDriver(engine_of(model))
    first, second = prompt.spans
    wrong = attrs.evolve(second, embedded=((0, 1),))
    orders = (
        Encode(ItemId(1), wrong, 9, prompt.images[1]),
        Encode(ItemId(2), first, 9, prompt.images[0]),
    )
    stepped = driver.step(encode=orders)
    assert [item for item, _ in stepped.encoded] == [2]
    [(item, reason)] = stepped.unencoded
    assert item == 1
    assert "6 vectors for a span of 1" in reason


def test_vectors_that_are_no_numbers_fail_their_item(
    vision_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vision_model("mistral3")
    prompt = certain_prompt(model, one_image)
    driver = ImageDriver(engine_of(model))
    monkeypatch.setattr(
        type(model.tower), "project", lambda _self, hidden, _pixels: hidden[:4] * np.inf * 0
    )
    stepped = driver.step(encode=(Encode(ItemId(1), prompt.spans[0], 9, prompt.images[0]),))
    [(item, reason)] = stepped.unencoded
    assert item == 1
    assert "no numbers" in reason


def test_an_encoder_without_memory_ends_the_step(
    vision_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vision_model("mistral3")
    prompt = certain_prompt(model, one_image)

    def fail(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 9 bytes")

    monkeypatch.setattr(type(model.tower), "project", fail)
    driver = ImageDriver(engine_of(model))
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        driver.step(encode=(Encode(ItemId(1), prompt.spans[0], 9, prompt.images[0]),))


def test_an_item_may_be_forgotten_between_two_slices(vision_model: Models) -> None:
    model = vision_model("qwen3_vl")
    prompt = certain_prompt(model, one_image)
    driver = ImageDriver(engine_of(model))
    order = Encode(ItemId(1), prompt.spans[0], 1, prompt.images[0])
    driver.step(encode=(order,))
    assert not driver.step(forget=(ItemId(1), ItemId(5))).encoded
    items = driver.encode(prompt.spans, prompt.images)
    [row] = driver.play([prompt.request(items)])
    assert row.tokens == prompt.answer


@one_of_each_kind
def test_text_is_bit_equal_to_that_of_a_model_without_images(
    vision_model: Models, name: str
) -> None:
    model = vision_model(name)
    plain, _ = text_model(model.directory)
    request = Request(text(40, 1), TOKENS, logprobs=3)
    [row] = Driver(engine_of(model), 7).play([request])
    [other] = Driver(StepEngine(plain, VOCABULARY, shapes=EXACT), 7).play([request])
    assert row.logprobs == other.logprobs


@one_of_each_kind
def test_a_draft_model_sees_no_images_and_changes_nothing(vision_model: Models, name: str) -> None:
    model = vision_model(name)
    prompt = certain_prompt(model, two_images)
    engine = StepEngine(
        model.model, VOCABULARY, tower=model.tower, shapes=EXACT, draft_model=build("llama")
    )
    driver = ImageDriver(engine, 9, allow=lambda _: 3, propose=lambda _: "draft_model")
    items = driver.encode(prompt.spans, prompt.images)
    rows = driver.play([prompt.request(items), Request(text(12, 3), TOKENS)])
    assert rows[0].tokens[:TOKENS] == prompt.answer
    assert driver.drafted


def test_a_plan_without_rows_encodes(vision_model: Models) -> None:
    plan = Plan(0, encode=(Encode(ItemId(1), MediaSpan(0, (), (), b"", None, 0), 1),))  # type: ignore[arg-type]
    assert plan.has_work
