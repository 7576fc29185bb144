"""An MTP head drafts for rows with images, which it does not see, and changes nothing."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from tests.engine.driver import Request
from tests.engine.vision.driver import ImageDriver
from tests.engine.vision.families import FAMILIES, VOCABULARY, Models, checkpoint, text
from tests.engine.vision.test_image_rows import TOKENS, certain_prompt, two_images
from tests.heads import head_weights, published
from trouper.engine.loading.model_loading import load
from trouper.engine.step import StepEngine
from trouper.protocol.settings import Settings

NAME = "qwen3_5"


def with_head(directory: Path) -> Path:
    checkpoint(NAME, directory)
    file, config = directory / "model.safetensors", FAMILIES[NAME]
    weights = dict(mx.load(str(file)))  # type: ignore[arg-type]
    head = head_weights(NAME, "random", config=config)
    weights |= published(NAME, head, original=False, config=config)
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    return directory


def test_a_row_with_images_and_one_of_text(vision_model: Models, tmp_path: Path) -> None:
    model = vision_model(NAME)
    prompt = certain_prompt(model, two_images)
    loaded = load(Settings(model=str(with_head(tmp_path / NAME))), lambda _: None)
    assert loaded.head is not None
    assert loaded.card.no_images == ""
    engine = StepEngine(
        loaded.model,
        VOCABULARY,
        head=loaded.head,
        tower=loaded.images.tower,
        capabilities=loaded.card.capabilities,
    )
    driver = ImageDriver(engine, 9, allow=lambda _: 3, propose=lambda _: "mtp")
    items = driver.encode(prompt.spans, prompt.images)
    rows = driver.play([prompt.request(items), Request(text(20, 9), TOKENS)])
    assert rows[0].tokens[:TOKENS] == prompt.answer
    assert {row for row, _, _ in driver.drafted} == {0, 1}
