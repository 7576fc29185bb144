"""Opening of a directory's tokenizer and chat template, by mlx-lm where it can.

tokenizer.json says what the tokens are. transformers also reads config.json and has an opinion of
it: it refuses configs of model types that it does not know, makes an empty tokenizer where
tokenizer.json is missing, and for some types puts a pre-tokenizer of its own in the place of the
file's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from trouper.engine.loading.message_adaptation import Message
from trouper.engine.platform.error_text import is_of_library
from trouper.protocol.problems import ModelUnusable
from trouper.storage.checkpoint_files import no_tokenizer, read_json, require_content

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
NAMED_PARSER = "named_tool_parser"
"""Under which name a tokenizer's settings have the tool parser that its files name."""
SAMPLE = 'The  cat\'s 12345 mats:\n\n\tnaïve café, 東京 🙂! {"a": [1, 2.50]}'
HINTS = {"chat_template_type": "chat_templates", "tool_parser_type": "tool_parsers"}
"""Keys that name a module of mlx-lm, and the package that it is of."""


def open_tokenizer(directory: Path) -> TokenizerWrapper:
    """Open a tokenizer, and never run code of the directory: unless told so, transformers asks on
    stdin, and runs it after a "y". Raises `ModelUnusable`, and whatever the libraries raise."""
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
    """Open a tokenizer of other files, which transformers converts. Raises `ModelUnusable` if it
    makes an empty one."""
    try:
        opened = load_tokenizer(directory, options)
    except BaseException as error:
        if not is_of_library(error) or own_code(directory):
            raise
        raise ModelUnusable(no_tokenizer(directory)) from error
    if opened.decode(opened.encode(SAMPLE, add_special_tokens=False)).strip() != SAMPLE:
        raise ModelUnusable(no_tokenizer(directory))
    return opened


def _open_file(directory: Path, options: Mapping[str, Any]) -> TokenizerWrapper:
    """Open tokenizer.json itself, without config.json."""
    kept = {key: value for key, value in options.items() if key != "trust_remote_code"}
    return TokenizerWrapper(PreTrainedTokenizerFast.from_pretrained(str(directory), **kept))


def _agrees(opened: TokenizerWrapper, path: Path) -> bool:
    """Whether a tokenizer gives the tokens of tokenizer.json."""
    plain = Tokenizer.from_file(str(path))
    plain.no_truncation()
    plain.no_padding()
    tokens = plain.encode(SAMPLE, add_special_tokens=False).ids
    return bool(tokens == [*opened.encode(SAMPLE, add_special_tokens=False)])


def own_code(directory: Path) -> str:
    """Names of the directory's own Python code for its tokenizer; "" for none."""
    try:
        named = read_json(directory / CONFIG).get("auto_map")
    except ModelUnusable:
        return ""
    code = named.get("AutoTokenizer") if isinstance(named, dict) else None
    return ", ".join(filter(None, code if isinstance(code, list) else [code or ""]))


def _hints(directory: Path) -> dict[str, Any]:
    """Leave out names of modules that this mlx-lm does not have: the template and the vocabulary
    say the same. The name of a tool parser may be one of this server's."""
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
    """Return the chat template of older checkpoints of models that see: it is in their processor's
    file, which tokenizers do not read."""
    file, own = directory / "chat_template.json", directory / CONFIG
    if not file.exists() or (directory / "chat_template.jinja").exists():
        return {}
    if own.exists() and read_json(own).get("chat_template"):
        return {}
    return {"chat_template": str(read_json(file)["chat_template"])}


def apply_template(
    wrapped: TokenizerWrapper, messages: Sequence[Message], options: Mapping[str, Any]
) -> Any:
    """Render messages, as tokens if `options` say so. Thinking is left to the template where the
    request does not say: mlx-lm would ask for it wherever the vocabulary has the markers. A
    template of mlx-lm's own gets mlx-lm's default. Raises whatever a template raises."""
    options = {"add_generation_prompt": True, **options}
    if "enable_thinking" in options:  # DeepSeek V3.1 and Granite name it so.
        options.setdefault("thinking", options["enable_thinking"])
    if wrapped.init_kwargs.get("chat_template_type"):
        return wrapped.apply_chat_template([*messages], **options)
    return inner_tokenizer(wrapped).apply_chat_template([*messages], return_dict=False, **options)


def inner_tokenizer(wrapped: TokenizerWrapper) -> Any:
    """Return the tokenizer of transformers, whose own methods mlx-lm's wrapper hides."""
    return wrapped._tokenizer
