"""Models of random weights that copy: each token is followed by its successor in one text, whatever
the layers add. Tokens outside of the text are followed by the next number, so that an answer to a
prompt of such tokens repeats nothing.

The layers compute all that a trained model's would; but embeddings are so large that the layers'
sums are noise beside them, and the head gives the successor of the last token's embedding. So speed
is that of the shape, and answers repeat their prompt.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

VOCABULARY, HIDDEN = 8192, 768
TEXT = 200
"""Number of tokens after which the text begins again."""
LOUD = 30.0
"""Size of an embedding's elements. The layers add up to about 3."""
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
GATED_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 96,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "model_type": "qwen3_5",
        "text_config": {
            **BASE,
            **GATED_DELTA,
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    },
    "falcon_h1": {
        **BASE,
        "model_type": "falcon_h1",
        "mamba_d_ssm": 1536,
        "mamba_d_head": 64,
        "mamba_n_heads": 24,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_rms_norm": True,
    },
    "qwen3-4b": {
        **BASE,
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3_5-4b": {
        "model_type": "qwen3_5",
        "text_config": {
            **BASE,
            "model_type": "qwen3_5_text",
            "hidden_size": 2560,
            "intermediate_size": 9216,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_value_heads": 32,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    },
}
"""Three layers in four have a gated delta rule, and all layers have attention and Mamba 2 side by
side: 102 and 131 million parameters in float32. Then the shapes of Qwen3-4B and of Qwen3.5-4B in
bfloat16, for GPUs."""
HYBRIDS = ("qwen3_5", "falcon_h1")
LARGE = ("qwen3-4b", "qwen3_5-4b")
WALK = 2 * TEXT + 1
"""First token outside of the text and of its edits."""


def walked_text(tokens: int, first: int) -> tuple[int, ...]:
    """A text that repeats nothing."""
    return tuple(WALK + (first + index) % (VOCABULARY - WALK) for index in range(tokens))


def copied_text(tokens: int, first: int = 0, edited: int = 0) -> tuple[int, ...]:
    """The text from its token `first` on, again and again; each `edited`-th token is another
    one."""
    right = (1 + (first + index) % TEXT for index in range(tokens))
    last = tokens - 2 * max(edited, 1)  # The last tokens are right, or nothing goes on from there.
    return tuple(
        token + TEXT if edited and index % edited == 0 and index < last else token
        for index, token in enumerate(right)
    )


def save_copying(name: str, directory: Path) -> Path:
    """Write such a model, with the byte-level tokenizer of the tests' tiny models."""
    from tests.families import END, save_tokenizer

    config = CONFIGS[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16 if name in LARGE else mx.float32)
    weights = dict(tree_flatten(model.parameters()))
    [embedding] = [path for path in weights if "embed" in path]
    [head] = [path for path in weights if "lm_head" in path]
    shape, dtype = weights[embedding].shape, weights[embedding].dtype
    weights[embedding] = (LOUD * mx.random.normal(shape)).astype(dtype)
    after = mx.arange(1, VOCABULARY + 1)
    after[VOCABULARY - 1] = WALK
    after[2 : TEXT + 1] = mx.arange(1, TEXT)
    after[1] = TEXT
    # Each token is followed by one: of two the first would always be said.
    after[0], after[WALK - 1] = TEXT + 1, 0
    assert len(np.unique(np.array(after))) == VOCABULARY, "two tokens would follow the same one"
    weights[head] = weights[embedding][after] / LOUD
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    (directory / "config.json").write_text(
        json.dumps({**config, "eos_token_id": END}), encoding="utf-8"
    )
    save_tokenizer(directory)
    _name_all_tokens(directory)
    return directory


def _name_all_tokens(directory: Path) -> None:
    """A model whose tokenizer has few of its tokens is refused."""
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    first = tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<{token}>" for token in range(first, VOCABULARY)])
    tokenizer.save(path)
