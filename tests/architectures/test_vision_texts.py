"""Text models of mlx-lm within vision checkpoints of another `model_type`."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.engine.vision_models import CONFIGS
from trouper.engine.architectures.architecture_lookup import find_architecture
from trouper.engine.loading.config_translation import translate
from trouper.protocol.problems import ModelUnusable


def made(config: dict[str, Any]) -> Any:
    kind, arguments = find_architecture(config).get_classes()
    return kind(arguments.from_dict(config | translate(config, arguments)))


@pytest.mark.parametrize("name", ["internvl", "internvl_chat", "glm4v", "glm4v_moe"])
def test_the_architecture_is_mlx_lms(name: str) -> None:
    assert find_architecture(CONFIGS[name]).native
    assert type(made(CONFIGS[name]).language_model).__module__.startswith("mlx_lm.models.")


@pytest.mark.parametrize(
    ("body", "head"),
    [("model.language_model.", ""), ("language_model.model.", "language_model.")],
)
def test_names_of_transformers_older_and_newer_versions_are_read(body: str, head: str) -> None:
    model = made(CONFIGS["internvl"])
    names = [name for name, _ in tree_flatten(model.parameters())]
    stored = {
        name.replace("language_model.model.", body).replace(
            "language_model.lm_head", f"{head}lm_head"
        )
        for name in names
    }
    weights = {
        name: mx.zeros(1) for name in (*stored, "model.vision_tower.cls_token", "mlp1.0.bias")
    }
    assert sorted(model.sanitize(weights)) == sorted(names)


def test_a_tied_head_has_no_weights() -> None:
    tied = made(CONFIGS["internvl"] | {"tie_word_embeddings": True})
    assert "lm_head" in made(CONFIGS["internvl"]).language_model
    assert "lm_head" not in tied.language_model


@pytest.mark.parametrize(
    ("kind", "reason"), [("mystery", "no text model of model_type 'mystery'"), ("base", "no model")]
)
def test_a_text_that_mlx_lm_lacks_is_named(kind: str, reason: str) -> None:
    config = CONFIGS["internvl_chat"] | {"llm_config": {"model_type": kind}}
    with pytest.raises(ModelUnusable, match=reason):
        find_architecture(config).get_classes()
