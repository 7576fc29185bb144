"""The tiny models whose rows may draft."""

from __future__ import annotations

from pathlib import Path

from tests.families import FAMILIES, save
from tests.family_configs import wide

DRAFTING = (
    "llama", "gpt_oss", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gemma3n", "phi3", "cohere2", "llama4_text",
    "mixtral", "deepseek_v3", "kimi_k25", "olmo3", "exaone4",
)  # fmt: skip


def saved(name: str, directory: Path, kv_bits: int = 0) -> str:
    """Written once. With heads that can be quantized if they are to be: those of the tiny models are too narrow."""
    path = directory / (f"{name}-wide" if kv_bits else name)
    return str(path if path.exists() else save(name, path, wide(FAMILIES[name]) if kv_bits else None))
