"""The tokens with which a model was trained to fill in the middle, found in its vocabulary by the
names that families give them."""

from __future__ import annotations

from collections.abc import Mapping

from trouper.protocol.model import InfillTokens

FAMILIES: tuple[tuple[str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, Qwen3-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, StarCoder2, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
"""Names of the tokens before the prefix, before the suffix, and before the answer. Without the last
the suffix comes first, and the answer goes on behind the prefix."""
FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
REPOSITORIES = ("<|repo_name|>", "<reponame>", "<repo_name>")
ENDS = (
    *FILES,
    *REPOSITORIES,
    "<|fim_pad|>",
    "<fim_pad>",
    "<|cursor|>",
    "▁<EOT>",
    "<EOT>",
    "<|endoftext|>",
)
"""Tokens that end an answer, as llama.cpp has it: what a model writes behind the middle is another
file, or padding."""


def infill_tokens_of(vocabulary: Mapping[str, int]) -> InfillTokens | None:
    """Find the tokens; None if the vocabulary has none. `vocabulary`: ids by name."""
    for prefix, suffix, middle in FAMILIES:
        names = (prefix, suffix) if middle is None else (prefix, suffix, middle)
        if all(name in vocabulary for name in names):
            found = {vocabulary[name] for name in (*ENDS, *names) if name in vocabulary}
            return InfillTokens(
                prefix=vocabulary[prefix],
                suffix=vocabulary[suffix],
                middle=None if middle is None else vocabulary[middle],
                file=next((vocabulary[name] for name in FILES if name in vocabulary), None),
                repository=next(
                    (vocabulary[name] for name in REPOSITORIES if name in vocabulary), None
                ),
                ends=tuple(sorted(found)),
            )
    return None
