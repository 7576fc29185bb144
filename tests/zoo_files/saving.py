"""A family's directory: config, weights, tokenizer and template as its makers lay them out."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer

from tests.families import save_tokenizer, write_json
from tests.zoo.building import build
from tests.zoo.catalogue import CONFIGS
from tests.zoo_files.families import Family
from tests.zoo_files.templates import CALLS, TURNS, specials, template

Config = dict[str, Any]
VOCABULARY = 576
"""Bytes, pairs and all markers, and some padding."""
METADATA: Config = {
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0",
    "initializer_range": 0.02,
    "use_cache": True,
    "attention_dropout": 0.0,
    "output_router_logits": False,
    "pad_token_id": None,
}
"""Keys that most configs have beside an architecture's own."""
ROPE = ("rope_theta", "rope_scaling")


def save_family(family: Family, directory: Path) -> nn.Module:
    """Returns the same model by mlx-lm's code alone."""
    directory.mkdir(parents=True, exist_ok=True)
    config = config_of(family)
    model = build(family.config, config)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    end = _save_tokenizer(family, directory)
    published = deepcopy(config) | METADATA | {"eos_token_id": end}
    if family.kind:
        _text_of(published)["model_type"] = published["model_type"] = family.kind
    if family.transformers == 5:
        _move_rope(_text_of(published))
    write_json(directory / "config.json", published)
    write_json(
        directory / "generation_config.json",
        {"do_sample": True, "temperature": 0.6, "eos_token_id": [end]},
    )
    return model


def config_of(family: Family) -> Config:
    """As mlx-lm's module reads it."""
    config = deepcopy(CONFIGS[family.config])
    text = _text_of(config)
    for part in (config, text):
        if "vocab_size" in part:
            part["vocab_size"] = VOCABULARY
        if "vocab_size_per_layer_input" in part:
            part["vocab_size_per_layer_input"] = VOCABULARY
    if family.context:
        text["max_position_embeddings"] = family.context
    text.update(deepcopy(family.changes))
    return config


def _text_of(config: Config) -> Config:
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _move_rope(text: Config) -> None:
    if "rope_parameters" in text or "rope_theta" not in text:
        return
    scaling = text.get("rope_scaling") or {"rope_type": "default"}
    text["rope_parameters"] = scaling | {"rope_theta": text["rope_theta"]}
    for key in ROPE:
        text.pop(key, None)


def _save_tokenizer(family: Family, directory: Path) -> int:
    """Returns the id of the token that ends an answer."""
    save_tokenizer(directory)
    turns, calls = TURNS[family.turns], CALLS.get(family.calls)
    markers = specials(turns, calls, family.thinking)
    path = directory / "tokenizer.json"
    backend = Tokenizer.from_file(str(path))
    backend.add_special_tokens([AddedToken(text, special=True) for text in markers])
    backend.save(str(path))
    text = template(turns, calls, family.thinking)
    config: Config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(backend.token_to_id(marker)): {
                "content": marker,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for marker in markers
        },
        "bos_token": None,
        "eos_token": turns.end,
        "pad_token": turns.end,
        "model_max_length": 1000000000000000019884624838656,
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": {},
    }
    match family.template_in:
        case "config":
            config["chat_template"] = text
        case "named":
            named = [{"name": name, "template": text} for name in ("default", "tool_use")]
            config["chat_template"] = named
        case "processor":
            write_json(directory / "chat_template.json", {"chat_template": text})
        case _:
            (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    write_json(directory / "tokenizer_config.json", config)
    end = backend.token_to_id(turns.end)
    assert end is not None
    return int(end)
