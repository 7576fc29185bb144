"""The formats of model families: a chat template, the markers that are tokens, and how a call is
written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from tests.families import save_tokenizer, write_json
from trouper.engine.loading import bundled_model
from trouper.engine.loading.tokenizer import HubTokenizer, load
from trouper.engine.vision.layouts import Layout, layout_of

TEMPLATES = Path(__file__).parent.parent / "chat_templates"
CHAT_MARKERS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
)
TURNS = ("<|im_start|>", "<|im_end|>")
Calls = Sequence[tuple[str, dict[str, Any]]]


@attrs.frozen
class Family:
    """`template` is a file of tests/chat_templates. `markers` become tokens of the tokenizer."""

    name: str
    template: str
    write: Callable[[str, Calls, str], str]
    """From text, calls and reasoning to an answer in the model's own format."""
    markers: tuple[str, ...] = CHAT_MARKERS
    specials: tuple[str, ...] = ()
    """Markers that are special tokens."""
    ends: tuple[str, ...] = ()
    """Special tokens beside <|im_end|> that end a turn."""
    thinks: bool = True
    """Whether it writes reasoning."""
    speaks: bool = True
    """Whether text may stand in front of a call."""
    parallel: bool = True
    """Whether an answer may have several calls; else a script's further ones are not written."""
    config: Mapping[str, Any] = attrs.field(factory=dict, eq=False)
    """Of config.json, for a model that takes images."""

    def answer(self, text: str, calls: Calls, reasoning: str) -> str:
        calls = calls if self.parallel else calls[:1]
        return self.write(
            text if self.speaks or not calls else "", calls, reasoning if self.thinks else ""
        )

    def tokenizer(self, directory: Path, *, small: bool = False) -> HubTokenizer:
        """A tokenizer with a vocabulary of real size, so that prompts have as many tokens as with a
        real model; or a `small` one, which takes a tenth of a second instead of one."""
        from tokenizers import AddedToken, Tokenizer

        if small:
            save_tokenizer(directory)
        base = directory if small else bundled_model.directory()
        backend = Tokenizer.from_file(str(base / "tokenizer.json"))
        backend.add_special_tokens(
            [
                AddedToken(marker, special=True, normalized=False)
                for marker in (*TURNS, *self.specials, *self.ends)
            ]
        )
        backend.add_tokens(
            [AddedToken(marker, special=False, normalized=False) for marker in self.markers]
        )
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
        ends = [backend.token_to_id(end) for end in self.ends]
        return load(directory, {**self.config, "eos_token_id": ends})

    def layout(self, tokenizer: HubTokenizer) -> Layout | None:
        """How images become tokens; None: it takes none."""
        if not self.config:
            return None
        ids = {text: tokenizer.marker_tokens(text)[0] for text in self.specials}
        return layout_of(self.config, {}, ids)


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
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        )
        parts.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return f"{reasoning}\n</think>\n\n" + "\n".join(parts)


def harmony(text: str, calls: Calls, reasoning: str) -> str:
    """The prompt has begun the first message of the assistant. A call ends the answer."""
    messages = [f"<|channel|>analysis<|message|>{reasoning}<|end|>"] if reasoning else []
    if not calls:
        return "<|start|>assistant".join(
            [*messages, f"<|channel|>final<|message|>{text}<|return|>"]
        )
    messages += [f"<|channel|>commentary<|message|>{text}<|end|>"] if text else []
    [(name, arguments)] = calls
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return "<|start|>assistant".join([*messages, f"{header}{json.dumps(arguments)}<|call|>"])


def llama3(text: str, calls: Calls, _reasoning: str) -> str:
    return text + "".join(
        json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls
    )


def mistral(text: str, calls: Calls, _reasoning: str) -> str:
    return text + "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls
    )


def glm(text: str, calls: Calls, reasoning: str) -> str:
    parts = [f"<think>{reasoning}</think>", *([text] if text else [])]
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n"
            f"<arg_value>{value if isinstance(value, str) else json.dumps(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        parts.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(parts)


def deepseek(text: str, calls: Calls, _reasoning: str) -> str:
    if not calls:
        return text
    written = "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n"
        "```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"{text}<｜tool▁calls▁begin｜>{written}<｜tool▁calls▁end｜>"


HARMONY_SPECIALS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
LLAMA_SPECIALS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
MISTRAL_SPECIALS = (
    *(
        f"[{slash}{name}]"
        for name in ("SYSTEM_PROMPT", "AVAILABLE_TOOLS", "INST", "TOOL_RESULTS")
        for slash in ("", "/")
    ),
    "<s>",
    "[TOOL_CALLS]",
    "[ARGS]",
)
IMAGE_SPECIALS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
MISTRAL_IMAGE_SPECIALS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
ENCODER_LAYERS = 3
"""The fake engine has four pieces of work for each image: the patches, and a layer each."""
GLM_SPECIALS = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>")
GLM_MARKERS = (*CHAT_MARKERS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DEEPSEEK_MARKERS = tuple(
    f"<｜{name}｜>"
    for name in (
        "tool▁calls▁begin",
        "tool▁calls▁end",
        "tool▁call▁begin",
        "tool▁call▁end",
        "tool▁sep",
    )
)
FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3", "qwen3", hermes),
        Family("qwen3_5", "qwen3_5", qwen_xml),
        Family(
            "gpt_oss",
            "gpt_oss",
            harmony,
            markers=(),
            specials=HARMONY_SPECIALS,
            ends=("<|return|>", "<|call|>"),
            parallel=False,
        ),
        Family(
            "llama3",
            "llama3",
            llama3,
            markers=(),
            specials=LLAMA_SPECIALS,
            ends=("<|eot_id|>",),
            thinks=False,
            speaks=False,
            parallel=False,
        ),
        Family(
            "mistral",
            "devstral",
            mistral,
            markers=(),
            specials=MISTRAL_SPECIALS,
            ends=("</s>",),
            thinks=False,
        ),
        Family(
            "glm",
            "glm",
            glm,
            markers=GLM_MARKERS,
            specials=GLM_SPECIALS,
            ends=("<|user|>", "<|observation|>"),
        ),
        Family(
            "deepseek",
            "deepseek",
            deepseek,
            markers=DEEPSEEK_MARKERS,
            ends=("<eos>",),
            thinks=False,
        ),
    )
}

SEEING_FAMILIES = {
    family.name: family
    for family in (
        Family(
            "qwen3_vl",
            "qwen3_vl",
            hermes,
            specials=IMAGE_SPECIALS,
            thinks=False,
            config={"model_type": "qwen3_vl", "vision_config": {"depth": ENCODER_LAYERS}},
        ),
        Family(
            "mistral3",
            "mistral3",
            mistral,
            markers=(),
            specials=(*MISTRAL_SPECIALS, *MISTRAL_IMAGE_SPECIALS),
            ends=("</s>",),
            thinks=False,
            config={
                "model_type": "mistral3",
                "vision_config": {"num_hidden_layers": ENCODER_LAYERS},
            },
        ),
    )
}
"""Families that take images. Mistral's template has no place for one in a tool's result."""
EVERY_FAMILY = {**FAMILIES, **SEEING_FAMILIES}
