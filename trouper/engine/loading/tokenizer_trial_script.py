"""Script that tries a directory's tokenizer and chat templates before the server does: a template
may loop or grow without end. Imports nothing of the package."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

MEMORY_BYTES = 2 * 2**30
FAULT = "fault: "
TOKENIZER, TEMPLATE, END = "tokenizer.json", "chat template", "end"
MAX_ADDED = 2**16  # Added tokens cost transformers 50 us each. Models have up to 6,000.

# Most backtracking expressions backtrack on texts of few characters.
TEXTS = tuple(text * 64 for text in ("a", " ", "1", "!", "\n", "é", "a b ", " \n", "aA1!"))


def main() -> None:
    # stdin: JSON with `directory`, `conversations`, `cpu_s`. stdout: a line per part before the
    # trial, and `FAULT` lines.
    order = json.load(sys.stdin)
    for limit, maximum in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, order["cpu_s"]),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(OSError, ValueError):
            resource.setrlimit(limit, (maximum, maximum))
    directory = Path(order["directory"])
    tell(TOKENIZER)
    try_tokenizer(directory / TOKENIZER)
    tell(TEMPLATE)
    for source in templates(directory):
        try_template(source, order["conversations"])
    tell(END)


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def try_tokenizer(path: Path) -> None:
    # The server reports a tokenizer that cannot be loaded.
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the server finds the same, and says it
        return
    if (count := len(tokenizer.get_added_tokens_decoder())) > MAX_ADDED:
        tell(FAULT + f"it has {count} added tokens, and at most {MAX_ADDED} are taken")
        os._exit(1)
    try:
        for text in TEXTS:
            tokenizer.encode(text)
    except BaseException as error:  # noqa: BLE001 - a panic of Rust is no Exception
        tell(FAULT + f"it fails on a plain text: {str(error)[:200]!r}")
        os._exit(1)


def templates(directory: Path) -> Iterator[str]:
    for name in ("tokenizer_config.json", "chat_template.json"):
        with suppress(OSError, ValueError, AttributeError, RecursionError):
            found = json.loads((directory / name).read_text("utf-8")).get("chat_template")
            named = found if isinstance(found, list) else [{"template": found}]
            yield from (each["template"] for each in named if isinstance(each.get("template"), str))
    for pattern in ("chat_template.jinja", "additional_chat_templates/*.jinja"):
        for path in directory.glob(pattern):
            with suppress(OSError, ValueError):
                yield path.read_text("utf-8")


def try_template(source: str, conversations: list[tuple[list[Any], dict[str, Any]]]) -> None:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005
    try:
        template = environment.from_string(source)
    except MemoryError:
        too_large()
    except Exception:  # noqa: BLE001 - the server finds the same, and says it
        return
    for messages, options in conversations:
        try:
            template.render(messages=messages, add_generation_prompt=True, **options)
        except MemoryError:
            too_large()
        except Exception:  # noqa: BLE001, S110 - templates refuse by raising what they like
            pass


def too_large() -> None:
    tell(FAULT + f"it takes more than {MEMORY_BYTES / 2**30:g} GiB of memory")
    os._exit(1)


if __name__ == "__main__":
    main()
