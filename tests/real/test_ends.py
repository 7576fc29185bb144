"""Models whose tokenizer has other ends of a turn than the model can say, through the whole
graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.families import END, save
from tests.real.serving import ask, running
from trouper import Generate, Sampling, TokenPrompt
from trouper.protocol.grammar import Grammar

LATER = "<|later|>"
"""A token behind the model's logits."""


def changed(path: Path, change: dict[str, Any]) -> None:
    config = {**json.loads(path.read_text()), **change}
    path.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


def without_end(directory: Path, *, later: bool) -> str:
    """A model that never ends a turn by itself: its tokenizer names no token for that, or one that
    the model has not."""
    path = save("llama", directory / "llama")
    changed(path / "config.json", {"eos_token_id": None})
    changed(path / "tokenizer_config.json", {"eos_token": LATER if later else None})
    if later:
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.add_special_tokens([AddedToken(LATER, special=True, normalized=False)])
        tokenizer.save(str(path / "tokenizer.json"))
    return str(path)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("later", [False, True])
async def test_a_grammar_ends_its_answer_all_the_same(
    later: bool, ignore_eos: bool, tmp_path: Path
) -> None:
    """A complete answer was once followed by exclamation marks up to max_tokens."""
    following = Generate(
        request_id="it",
        prompt=TokenPrompt((10, 20, 30)),
        sampling=Sampling(temperature=0),
        max_tokens=12,
        grammar=Grammar("regex", "ab!c"),
        ignore_eos=ignore_eos,
    )
    async with running(without_end(tmp_path, later=later)) as runtime:
        assert runtime.tokenizer.eos_token_ids == ({END + 1} if later else frozenset())
        requests = (
            following,
            attrs.evolve(following, min_tokens=6),
            attrs.evolve(following, grammar=None),
        )
        [short, least, plain] = await ask(runtime, *requests)
    assert (short.text, short.reason, short.matched) == ("ab!c", "stop", None)
    assert len(short.tokens) <= 5
    assert least == short
    assert (plain.reason, len(plain.tokens)) == ("length", 12)
