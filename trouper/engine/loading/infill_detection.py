"""The vocabulary's tokens for filling in the middle."""

from __future__ import annotations

from collections.abc import Mapping

from trouper.protocol.model import InfillTokens

# Tokens before prefix, suffix and answer. Without the last the answer continues the prefix, which
# follows the suffix.
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
FILES = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
REPOSITORIES = ("<|repo_name|>", "<reponame>", "<repo_name>")

# End tokens, as in llama.cpp: another file or padding follows the middle.
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


def infill_tokens_of(vocabulary: Mapping[str, int]) -> InfillTokens | None:
    """`vocabulary`: ids by name."""
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
