"""Small files of sentence-transformers: prompts, the longest text, and lower case.

Source: https://sbert.net/docs/package_reference/sentence_transformer/models.html.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from trouper.protocol.names import Kind
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import read_json, section
from trouper.storage.context import context_length

PROMPTS_FILE = "config_sentence_transformers.json"
EMBEDDER = "SentenceTransformer"
"""Class of sentence-transformers whose modules make vectors."""
TOKENIZER_FILE = "tokenizer_config.json"
KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
LIMIT_FILES = tuple(f"sentence_{kind}_config.json" for kind in KINDS)
"""The first that exists counts."""


@attrs.frozen(kw_only=True)
class SentenceFiles:
    prompts: tuple[tuple[str, str], ...] = ()
    """Name and text that precedes a text."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none."""
    model_class: str = EMBEDDER
    max_tokens: int | None = None
    dimensions: int | None = None
    """Of vectors, which are cut to so many."""
    takes_texts: bool = True
    """False: texts become messages of a chat."""
    lower_case: bool = False
    """Whether texts are put into lower case first."""


def read_sentence_files(directory: Path) -> SentenceFiles:
    """Raises `ModelUnusable` for a file that is none, or names a prompt that it lacks."""
    named, limits = _read(directory, (PROMPTS_FILE,)), _read(directory, LIMIT_FILES)
    prompts = named.get("prompts")
    kept = {
        str(name): str(text or "")
        for name, text in (prompts.items() if isinstance(prompts, dict) else ())
    }
    default = named.get("default_prompt_name")
    if default is not None and not (isinstance(default, str) and default in kept):
        raise ModelUnusable(
            f"{directory / PROMPTS_FILE} has no prompt of the name default_prompt_name, {default!r}"
        )
    return SentenceFiles(
        prompts=tuple(kept.items()),
        default_prompt=default,
        model_class=str(named.get("model_type") or EMBEDDER),
        dimensions=_positive(named.get("truncate_dim")),
        takes_texts="text" in (section(limits, "modality_config") or {"text"}),
        max_tokens=_positive(limits.get("max_seq_length")),
        lower_case=limits.get("do_lower_case") is True,
    )


def context_of(directory: Path, config: Mapping[str, Any], kind: Kind) -> int:
    """The longest text or prompt in tokens: of the config, and of sentence-transformers' files or,
    without one in them, of an embedder's or a reranker's tokenizer."""
    try:
        longest = read_sentence_files(directory).max_tokens
        if longest is None and kind != "generator":
            longest = _positive(_read(directory, (TOKENIZER_FILE,)).get("model_max_length"))
    except ModelUnusable:
        longest = None
    context = context_length(config)
    return context if longest is None else min(longest, context)


def _positive(number: object) -> int | None:
    return number if isinstance(number, int) and number > 0 else None


def _read(directory: Path, names: tuple[str, ...]) -> dict[str, Any]:
    existing = next((directory / name for name in names if (directory / name).exists()), None)
    return {} if existing is None else read_json(existing)
