"""The fixture itself: every family builds, generates, saves and loads."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.families import END, FAMILIES, build, prompts, reference, save
from trouper.engine.adaptations.adaptation_registry import adapted
from trouper.engine.loading.model_loading import load
from trouper.protocol.settings import Settings

every_family = pytest.mark.parametrize("name", FAMILIES)
of_each_kind = pytest.mark.long(
    but=("llama", "deepseek_v3", "gemma3_text", "gpt_oss", "falcon_h1", "mamba2", "qwen3_next")
)


def test_there_are_27() -> None:
    assert len(FAMILIES) == 27


@every_family
@of_each_kind
def test_builds_and_generates_the_same_each_time(name: str) -> None:
    prompt = prompts()[2]
    tokens = reference(build(name), prompt, 6)
    assert tokens == reference(build(name), prompt, 6)
    assert len(set(tokens)) > 1


@every_family
@of_each_kind
def test_a_saved_model_is_the_same_model(name: str, tmp_path: Path) -> None:
    loaded = load(Settings(model=str(save(name, tmp_path))), lambda line: None)
    model = build(name)
    adapted(model)
    built = dict(tree_flatten(model.parameters()))
    again = dict(tree_flatten(loaded.model.parameters()))
    assert built.keys() == again.keys()
    assert all(mx.array_equal(built[path], again[path]) for path in built)
    assert loaded.tokenizer.eos_token_ids == {END}
    assert loaded.card.context_length in (2048, 32768)


def test_the_saved_tokenizer_covers_the_vocabulary(tmp_path: Path) -> None:
    tokenizer = load(Settings(model=str(save("llama", tmp_path))), lambda line: None).tokenizer
    text = "The tea is 42 °C – ok? 🫖\n"
    tokens = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
    assert len(tokens) < len(text.encode())
    assert all(tokenizer.token_bytes(token) for token in range(END))
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])
