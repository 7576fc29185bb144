"""The files of examples/shapes are those that the training used."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from transformers import PreTrainedTokenizerFast

from tests.vision_model.files import (
    CONTENTS,
    DIRECTORY,
    SPECIALS,
    Renderer,
)
from tests.vision_model.questions import conversation
from trouper.engine.loading import model_source
from trouper.protocol.problems import ModelUnusable

WEIGHTS = 5 * 2**20


def test_the_files_have_the_constants() -> None:
    for name, content in CONTENTS.items():
        assert json.loads((DIRECTORY / name).read_text(encoding="utf-8")) == content
    assert (DIRECTORY / "model.safetensors").stat().st_size < WEIGHTS


def test_the_tokenizer_writes_any_text_and_prompts_as_in_the_training() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DIRECTORY)
    for text in ("Wörter, 词, \x00\t\n", *SPECIALS):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.convert_tokens_to_ids(list(SPECIALS)) == list(range(len(SPECIALS)))
    drawn, renderer = Random(3), Renderer()
    for images in (0, 1, 2, 3, 1, 2):
        messages, _ = conversation(drawn, [(128, 128)] * images)
        rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        assert rendered == renderer.render(messages)


def test_shapes_is_the_model_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any working directory; a directory of that name there comes first."""
    monkeypatch.chdir(tmp_path)
    assert model_source.local("shapes") == DIRECTORY
    (tmp_path / "shapes").mkdir()
    assert model_source.local("shapes") == Path("shapes")


def test_an_installed_package_has_no_model_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_source, "SHAPES", tmp_path / "examples" / "shapes")
    with pytest.raises(ModelUnusable, match="no such directory, and not a hub id"):
        model_source.source_of("shapes")
