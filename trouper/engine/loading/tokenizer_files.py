"""Opens a directory's tokenizer and chat template, by mlx-lm where possible."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, meta
from jinja2.ext import loopcontrols
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trouper.engine.loading.message_adaptation import Message
from trouper.engine.platform.error_text import is_of_library
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import read_json
from trouper.storage.foreign_files import require_content
from trouper.storage.model_files import no_tokenizer

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
WORDS = "vocab.txt"
NAMED_PARSER = "named_tool_parser"
SAMPLE = 'The  cat\'s 12345 mats:\n\n\tnaïve café, 東京 🙂! {"a": [1, 2.50]}'
HINTS = {"chat_template_type": "chat_templates", "tool_parser_type": "tool_parsers"}
SWITCH, EFFORT = "enable_thinking", "reasoning_effort"

# Values for off and on: DeepSeek V3.1, Granite, Kimi and Hermes 4; Cohere's North; MiniMax M3;
# Seed-OSS, whose budget of -1 has no end.
OTHER_SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "thinking": (False, True),
    "reasoning": (False, True),
    "thinking_mode": ("disabled", "enabled"),
    "thinking_budget": (0, -1),
}
EFFORTS = {"minimal": "low", "xhigh": "max"}  # Kimi K3's names, in `thinking_effort`.
# Tokenizers alone are opened by it: models that it does not know are no matter for a warning.
logging.getLogger("transformers.configuration_utils").setLevel(logging.ERROR)
GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")  # A tag of transformers' own.


# transformers also reads config.json: unknown model types are refused, a missing tokenizer.json
# gives an empty tokenizer, and some types replace the file's pre-tokenizer.
def open_tokenizer(directory: Path) -> TokenizerWrapper:
    """Never runs the directory's code. Raises `ModelUnusable` and exceptions of the libraries."""
    options = {"trust_remote_code": False, **_processor_template(directory), **_hints(directory)}
    path = directory / TOKENIZER
    if not path.exists():
        return _open_without_file(directory, options)
    try:
        opened = load_tokenizer(directory, options)
    except BaseException as error:
        # mlx-lm asks the architecture's module, too, and OLMo's ends the process.
        if not is_of_library(error) and not isinstance(error, SystemExit):
            raise
        require_content(path)
        return _open_file(directory, options)
    return opened if _agrees(opened, path) else _open_file(directory, options)


def _open_without_file(directory: Path, options: Mapping[str, Any]) -> TokenizerWrapper:
    """Raises `ModelUnusable` for an empty tokenizer."""
    try:
        opened = load_tokenizer(directory, options)
    except BaseException as error:
        if not is_of_library(error):
            raise
        raise ModelUnusable(no_tokenizer(directory)) from error
    kept = opened.decode(opened.encode(SAMPLE, add_special_tokens=False)).strip() == SAMPLE
    if not kept and not _has_words(opened, directory / WORDS):
        raise ModelUnusable(no_tokenizer(directory))
    return opened


def _has_words(opened: TokenizerWrapper, path: Path) -> bool:
    """Whether all of BERT's vocabulary was read: it does not keep a text's case and blanks."""
    return path.exists() and set(path.read_text("utf-8").split("\n")) - {""} <= {
        *opened.get_vocab()
    }


def _open_file(directory: Path, options: Mapping[str, Any]) -> TokenizerWrapper:
    kept = {key: value for key, value in options.items() if key != "trust_remote_code"}
    return TokenizerWrapper(PreTrainedTokenizerFast.from_pretrained(str(directory), **kept))


def _agrees(opened: TokenizerWrapper, path: Path) -> bool:
    plain = Tokenizer.from_file(str(path))
    plain.no_truncation()
    plain.no_padding()
    tokens = [*opened.encode(SAMPLE, add_special_tokens=False)]
    same = plain.encode(SAMPLE, add_special_tokens=False).ids == tokens
    if not same:
        _configure(plain, path.with_name(CONFIG))
        same = plain.encode(SAMPLE, add_special_tokens=False).ids == tokens
    # A class of transformers may number added tokens anew.
    return bool(same and plain.get_vocab().items() <= opened.get_vocab().items())


def _configure(plain: Tokenizer, path: Path) -> None:
    """Apply tokenizer_config.json to parts of BERT's and RoBERTa's: transformers prefers it."""
    config = read_json(path) if path.exists() else {}
    if isinstance(plain.normalizer, normalizers.BertNormalizer):
        plain.normalizer = normalizers.BertNormalizer(
            lowercase=config.get("do_lower_case", True),
            strip_accents=config.get("strip_accents"),
            handle_chinese_chars=config.get("tokenize_chinese_chars", True),
        )
    if isinstance(plain.pre_tokenizer, pre_tokenizers.ByteLevel):
        plain.pre_tokenizer.add_prefix_space = config.get("add_prefix_space", False)


def put_into_lower_case(opened: TokenizerWrapper) -> None:
    """Special tokens keep their case, as in sentence-transformers. Raises `AttributeError` for a
    tokenizer without a backend."""
    backend = inner_tokenizer(opened).backend_tokenizer
    own = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])


def _hints(directory: Path) -> dict[str, Any]:
    """Drop names of modules that this mlx-lm lacks; a tool parser may be this server's."""
    path = directory / CONFIG
    config = read_json(path) if path.exists() else {}
    absent = {
        key: None
        for key, package in HINTS.items()
        if (name := config.get(key)) and not _has_module(package, name)
    }
    return absent | {NAMED_PARSER: config.get("tool_parser_type")}


def _has_module(package: str, name: object) -> bool:
    return (
        isinstance(name, str)
        and name.isidentifier()
        and find_spec(f"mlx_lm.{package}.{name}") is not None
    )


def _processor_template(directory: Path) -> dict[str, str]:
    # Older vision checkpoints have the chat template in a processor's file.
    file, own = directory / "chat_template.json", directory / CONFIG
    if not file.exists() or (directory / "chat_template.jinja").exists():
        return {}
    if own.exists() and read_json(own).get("chat_template"):
        return {}
    return {"chat_template": str(read_json(file)["chat_template"])}


def apply_template(
    wrapped: TokenizerWrapper, messages: Sequence[Message], options: Mapping[str, Any]
) -> Any:
    """Thinking stays the template's default unless requested. Raises any exception of a
    template."""
    options = {"add_generation_prompt": True, **rename_switches(wrapped.chat_template, options)}
    if wrapped.init_kwargs.get("chat_template_type"):
        return wrapped.apply_chat_template([*messages], **options)
    return inner_tokenizer(wrapped).apply_chat_template([*messages], return_dict=False, **options)


# Requests switch thinking by `enable_thinking` and `reasoning_effort`; some makers' templates read
# other names.
def rename_switches(template: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` with the template's own names of thinking; a name that the request has stays.
    `template`: text, or texts by name."""
    texts = template.values() if isinstance(template, Mapping) else (template,)
    read = frozenset[str]().union(*(_variables_of(str(text)) for text in texts))
    added: dict[str, Any] = {}
    if isinstance(enabled := options.get(SWITCH), bool) and SWITCH not in read:
        switches = OTHER_SWITCHES.items()
        added = {name: values[enabled] for name, values in switches if name in read}
    if isinstance(effort := options.get(EFFORT), str) and "thinking_effort" in read:
        added["thinking_effort"] = EFFORTS.get(effort, effort)
    return added | dict(options)


@lru_cache(maxsize=32)
def _variables_of(template: str) -> frozenset[str]:
    try:
        environment = Environment(extensions=[loopcontrols])  # noqa: S701 - nothing is rendered
        parsed = environment.parse(GENERATION.sub("", template))
        return frozenset(meta.find_undeclared_variables(parsed))
    except (TemplateError, RecursionError):
        return frozenset()


def inner_tokenizer(wrapped: TokenizerWrapper) -> Any:
    return wrapped._tokenizer
