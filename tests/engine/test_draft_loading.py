"""A draft model that cannot draft is refused in one line, which names the flag and a remedy; one
that can is counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx import nn

from tests.families import FAMILIES, save, write_json
from trouper.actors.scheduling.cache_namespace import cache_namespace
from trouper.engine.kv.quantized_kv import PLAIN
from trouper.engine.loading import checkpoint
from trouper.engine.loading.draft_loading import FoundDraft, load_draft
from trouper.engine.loading.model_loading import EvaluatedModel, load, measured
from trouper.engine.loading.weights import bytes_of
from trouper.engine.self_check.starting import Candidate
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.problems import ModelUnusable
from trouper.protocol.settings import Settings

SMALLER: dict[str, Any] = {"num_hidden_layers": 2}


pytestmark = pytest.mark.usefixtures("own_cache")


def draft(directory: Path, name: str = "llama", seed: int = 5, **changes: Any) -> str:
    return str(
        save(
            name, directory / f"draft-{name}-{seed}", {**FAMILIES[name], **SMALLER, **changes}, seed
        )
    )


def loaded(target: str, draft_model: str | None, **settings: Any) -> EvaluatedModel:
    return load(Settings(model=target, draft_model=draft_model, **settings), lambda _: None)


def refused(target: str, draft_model: str, **settings: Any) -> str:
    with pytest.raises(ModelUnusable) as problem:
        loaded(target, draft_model, **settings)
    text = str(problem.value)
    assert text.startswith("--draft-model ") and "\n" not in text
    return text


def test_weights_kv_and_fingerprint_are_of_both(target: str, tmp_path: Path) -> None:
    alone, small = loaded(target, None), draft(tmp_path)
    both, settings = loaded(target, small), Settings(model=target, draft_model=small)
    assert both.draft is not None and both.card.draft_model == small
    assert alone.draft is None and alone.card.draft_model is None
    assert both.card.weights_bytes == alone.card.weights_bytes + bytes_of(both.draft.model)
    assert measured(settings).weights_bytes == measured(
        Settings(model=target)
    ).weights_bytes + bytes_of(both.draft.model)
    assert both.card.kv.token_bytes == alone.card.kv.token_bytes * 3 // 2, "two layers beside four"
    other = loaded(target, draft(tmp_path, seed=6))
    spaces = {cache_namespace(one.card, settings) for one in (alone, both, other)}
    assert len(spaces) == 3, "blocks have the KV of both models"
    assert cache_namespace(loaded(target, small).card, settings) in spaces


@pytest.mark.parametrize(
    ("name", "why"), [("gpt_oss", "sliding windows"), ("lfm2", "recurrent state")]
)
def test_models_without_full_attention_are_refused(
    target: str, tmp_path: Path, name: str, why: str
) -> None:
    said = refused(target, str(save(name, tmp_path / name)))
    assert why in said and "give a model with full attention" in said


def test_a_target_whose_rows_draft_nothing(target: str, tmp_path: Path) -> None:
    """As the self-check may find."""
    found = FoundDraft("small", checkpoint.inspect(Path(draft(tmp_path))))
    candidate = Candidate(
        model=nn.Module(), config={}, directory=Path(target), digest=0, vocabulary=512, kv=PLAIN
    )
    with pytest.raises(ModelUnusable) as problem:
        load_draft(found, candidate, Capabilities(drafts="they differ"), lambda *_: None)
    said = str(problem.value)
    assert "cannot take drafts back (they differ)" in said and said.endswith(
        "leave --draft-model out"
    )


def test_other_tokens_are_refused(target: str, tmp_path: Path) -> None:
    small = draft(tmp_path)
    path = Path(small) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    write_json(path, tokenizer)
    said = refused(target, small)
    assert "2 differ" in said and "'a' and 'b'" in said.replace("'b' and 'a'", "'a' and 'b'")
    assert "give a smaller model of the same family" in said


def test_a_smaller_vocabulary_is_refused(target: str, tmp_path: Path) -> None:
    """Each of its tokens is one of the target's."""
    small = draft(tmp_path)
    path = Path(small) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    model = tokenizer["model"]
    model["vocab"] = {text: token for text, token in model["vocab"].items() if token < 480} | {
        "<|end|>": 511
    }
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in model["vocab"]]
    write_json(path, tokenizer)
    said = refused(target, small)
    assert "has 481 tokens, and" in said and "512, of which 31 are tokens of one alone" in said
    assert "give a smaller model of the same family" in said


@pytest.mark.parametrize("logits", [640, 448])
def test_another_number_of_logits_is_no_other_vocabulary(
    target: str, tmp_path: Path, logits: int
) -> None:
    """Families pad the logits of their sizes differently."""
    both = loaded(target, draft(tmp_path, vocab_size=logits))
    assert both.draft is not None and both.card.vocab_size == 512
    assert (both.draft.limits.num_tokens, both.draft.limits.target_tokens) == (logits, 512)


def test_rows_may_be_longer_than_a_draft_models_context(target: str, tmp_path: Path) -> None:
    small, lines = draft(tmp_path, max_position_embeddings=100), list[str]()
    both = load(Settings(model=target, draft_model=small), lines.append)
    assert both.draft is not None and both.draft.limits.context == both.card.draft_context == 100
    assert both.card.context_length > 100
    assert (
        f"--draft-model {small} has a context of 100 tokens: rows have no drafts of it beyond"
        in lines
    )
    lines.clear()
    load(Settings(model=target, draft_model=small, max_kv_size=100), lines.append)
    assert not any("has a context" in line for line in lines), "no row is longer"


@pytest.mark.parametrize("wrong", ["nowhere", "config.json"])
def test_what_is_no_model_is_named_by_its_flag(target: str, tmp_path: Path, wrong: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    refused(target, str(tmp_path / wrong))
