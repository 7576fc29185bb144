"""The tiny models whose rows may draft."""

from __future__ import annotations

from pathlib import Path

from tests.families import save

DRAFTING = (
    "llama", "gpt_oss", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gemma3n", "phi3", "cohere2", "llama4_text",
    "mixtral", "deepseek_v3", "kimi_k25", "olmo3", "exaone4",
)  # fmt: skip


def saved(name: str, directory: Path) -> str:
    """Written once."""
    path = directory / name
    return str(path if path.exists() else save(name, path))
