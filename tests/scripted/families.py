"""The formats of model families: a chat template, the markers that are tokens, and how a call is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.families import write_json
from trouper.engine.loading import bundled_model
from trouper.engine.loading.tokenizer import HubTokenizer, load

TEMPLATES = Path(__file__).parent.parent / "chat_templates"
CHAT_MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")
Calls = Sequence[tuple[str, dict[str, Any]]]


@attrs.frozen
class Family:
    """`template` is a file of tests/chat_templates. `markers` become tokens of the tokenizer."""

    name: str
    template: str
    write: Callable[[str, Calls, str], str]
    """From text, calls and reasoning to an answer in the model's own format."""
    markers: tuple[str, ...] = CHAT_MARKERS
    ends: tuple[str, ...] = ()
    """Tokens beside <|im_end|> that end a turn."""

    def answer(self, text: str, calls: Calls, reasoning: str) -> str:
        return self.write(text, calls, reasoning)

    def tokenizer(self, directory: Path) -> HubTokenizer:
        """A tokenizer with a vocabulary of real size, so that prompts have as many tokens as with a real model."""
        from tokenizers import AddedToken, Tokenizer

        backend = Tokenizer.from_file(str(bundled_model.directory() / "tokenizer.json"))
        backend.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in self.ends])
        backend.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in self.markers])
        backend.save(str(directory / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "chat_template": (TEMPLATES / f"{self.template}.jinja").read_text("utf-8"),
        }
        write_json(directory / "tokenizer_config.json", config)
        return load(directory, {"eos_token_id": [backend.token_to_id(end) for end in self.ends]})


def _thought(reasoning: str) -> str:
    return f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""


def hermes(text: str, calls: Calls, reasoning: str) -> str:
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return _thought(reasoning) + "\n".join(
        [text][: bool(text)] + [f"<tool_call>\n{call}\n</tool_call>" for call in written]
    )


def qwen_xml(text: str, calls: Calls, reasoning: str) -> str:
    """The prompt has opened the reasoning already."""
    parts = [text] if text else []
    for name, arguments in calls:
        values = "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in arguments.items()
        )
        parts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return f"{reasoning}\n</think>\n\n" + "\n".join(parts)


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", "qwen3", hermes),
        Family("qwen3_5", "qwen3_5", qwen_xml),
    )
}
