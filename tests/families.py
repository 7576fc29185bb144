"""Tiny random models of 27 architectures, so that every kind of cache and layer is tested without a
hub.

float32, vocabulary 512, hidden size 64, about 1 MB each. Seeds are chosen so that the gap between
the best two logits is at least 3e-3 along the greedy path of `prompts()`: a correct batch differs
from the row alone by at most 1e-4, so its greedy tokens must be equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from tests.family_configs import FAMILIES, VOCABULARY, Config
from trouper_lab.engine_programs.tiny_families import SEEDS, build

__all__ = [
    "END",
    "FAMILIES",
    "LENGTHS",
    "SEEDS",
    "build",
    "prompts",
    "reference",
    "save",
    "save_tokenizer",
    "write_json",
]

LENGTHS = (3, 17, 33, 64, 100, 130)
END = VOCABULARY - 1
"""The token that ends a turn of a saved model."""


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 7) -> list[list[int]]:
    random = np.random.RandomState(seed)
    return [random.randint(1, VOCABULARY, length).tolist() for length in lengths]


def reference(model: nn.Module, prompt: list[int], n: int, step: int = 32) -> list[int]:
    """`n` greedy tokens by the model alone, with its own cache: what any engine must answer.

    The prompt goes in chunks, all but its last token, as servers and mlx-lm do it: some
    architectures (recurrent, mixture of experts) round differently in other chunks.
    """
    cache = make_prompt_cache(model)
    for begin in range(0, len(prompt) - 1, step):
        model(mx.array([prompt[begin : min(begin + step, len(prompt) - 1)]]), cache=cache)
        mx.eval([layer.state for layer in cache])
    tokens = [prompt[-1]]
    for _ in range(n):
        logits = model(mx.array([tokens[-1:]]), cache=cache)
        tokens.append(int(mx.argmax(logits[0, -1]).item()))  # type: ignore[arg-type]
    return tokens[1:]


def save(name: str, directory: Path, config: Config | None = None, seed: int | None = None) -> Path:
    """A directory that `--model` takes: the model, and a tokenizer whose tokens are bytes and byte
    pairs."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(build(name, seed, config).parameters()))
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    write_json(directory / "config.json", {**(config or FAMILIES[name]), "eos_token_id": END})
    save_tokenizer(directory)
    return directory


def save_tokenizer(directory: Path) -> None:
    """Byte-level BPE: 256 bytes, 255 pairs (space or `e` and an ASCII letter, and so on), one
    special token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [character for character in alphabet if character.isascii() and character.isalpha()]
    pairs = [(first, second) for first in "Ġetaoin" for second in letters][: END - len(alphabet)]
    vocabulary = {
        piece: i
        for i, piece in enumerate([*alphabet, *(first + second for first, second in pairs)])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|end|>{% endfor %}"
    prompt = "{% if add_generation_prompt %}assistant: {% endif %}"
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
            "clean_up_tokenization_spaces": False,
            "chat_template": template + prompt,
        },
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
