"""Converts a llama-like GGUF file to files of mlx-lm and transformers.

Q4_1 becomes MLX's affine quantization (4 bits, groups of 32). Rows of q and k, interleaved for
ggml's rope, go back to halves. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx

Metadata: TypeAlias = Mapping[str, Any]

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# By the makers of SmolLM2-135M-Instruct; at 1 it babbles.
ADVISED = {"temperature": 0.2, "top_p": 0.9}
SPECIAL = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL.


def convert(source: Path, target: Path) -> None:
    """Write an mlx-lm model directory. Raises `RuntimeError` or `KeyError` for a malformed file."""
    weights, metadata = _read(source)
    config = _config(metadata)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    renamed = dict(_rename(name, array, heads) for name, array in weights.items())
    config["tie_word_embeddings"] = "lm_head.weight" not in renamed
    mx.save_safetensors(str(target / "model.safetensors"), renamed, {"format": "mlx"})
    _write(target / "config.json", config)
    _write(target / "generation_config.json", {"eos_token_id": config["eos_token_id"]} | ADVISED)
    _write(target / "tokenizer_config.json", _tokenizer_config(metadata))
    _write(target / "tokenizer.json", _tokenizer(metadata))


def _read(source: Path) -> tuple[dict[str, mx.array], Metadata]:
    # the stubs know no format with metadata of several types
    loaded: Any = mx.load(str(source), return_metadata=True)
    weights, metadata = loaded
    return weights, metadata


def _rename(name: str, array: mx.array, heads: Mapping[str, int]) -> tuple[str, mx.array]:
    *block, part, kind = name.split(".")
    if not block:
        return f"{OTHER_NAMES[part]}.{kind}", array
    if part in heads:
        array = _halves(array, heads[part])
    return f"model.layers.{block[1]}.{LAYER_NAMES[part]}.{kind}", array


def _halves(array: mx.array, heads: int) -> mx.array:
    """Reorder rows (heads, head_dim/2, 2) to (heads, 2, head_dim/2), also of scales and biases."""
    rows, columns = array.shape
    return (
        array.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )


def _config(metadata: Metadata) -> dict[str, Any]:
    def number(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": number("attention.head_count"),
        "num_key_value_heads": number("attention.head_count_kv"),
        "rms_norm_eps": float(f"{number('attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": number("rope.freq_base"),
        "max_position_embeddings": number("context_length"),
        "vocab_size": number("vocab_size"),
        "bos_token_id": _token_id(metadata, "bos"),
        "eos_token_id": _ends(metadata),
        "quantization": {"group_size": 32, "bits": 4},
    }


def _token_id(metadata: Metadata, kind: str) -> int:
    return int(metadata[f"tokenizer.ggml.{kind}_token_id"].item())


def _ends(metadata: Metadata) -> list[int]:
    # GGUF does not name the end-of-text token.
    text_ends = [
        i
        for i, token in enumerate(metadata["tokenizer.ggml.tokens"][:64])
        if token == "<|endoftext|>"  # noqa: S105
    ]
    return sorted({_token_id(metadata, "eos"), *text_ends})


def _specials(metadata: Metadata) -> list[str]:
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"].tolist()
    return [token for token, kind in zip(tokens, types, strict=True) if kind == SPECIAL]


def _tokenizer(metadata: Metadata) -> dict[str, Any]:
    """GGUF's pre-tokenizer `smollm`: byte-level BPE that splits digits."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _specials(metadata)]
    )
    loaded: dict[str, Any] = json.loads(tokenizer.to_str())
    return loaded


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(metadata["llama.context_length"].item()),
        "clean_up_tokenization_spaces": False,
        "chat_template": metadata["tokenizer.chat_template"],
        **{
            f"{name}_token": tokens[_token_id(metadata, gguf_name)]
            for name, gguf_name in names.items()
        },
    }


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")
