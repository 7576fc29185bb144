"""The output of a server that is ready: its address, and examples to type next."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator

import click

from trouper.actors.runtime.model_manager import ModelManager
from trouper.cli.exits import forget
from trouper.cli.terminal_text import line_shown
from trouper.web.tool_support import notice

KEY_VARIABLE = "TROUPER_API_KEY"


def announce(url: str, models: ModelManager, keyed: bool) -> None:
    """Print to stdout. If nobody reads it (`| head -1`, a full disk, `>&-`), the server goes on."""
    try:
        for line in lines_of(url, models, keyed):
            click.echo(line_shown(line))
    except OSError:
        forget(sys.stdout)


def lines_of(url: str, models: ModelManager, keyed: bool) -> Iterator[str]:
    """Return the lines. The first is for programs, too: it ends in `is ready at URL/v1`."""
    first, *others = models.entries()
    assert first.runtime is not None, "the first model is loaded before the server starts"
    card = first.runtime.model
    yield (
        f"{first.names[0]} ({card.architecture}, {card.dtype}, {card.batching}) on {card.device} "
        f"is ready at {url}/v1"
    )
    for other in others:
        yield f"{other.names[0]} is loaded now, if it fits, or when it is first asked for"
    yield f"live: {url}/   chat: trouper chat --url {shlex.quote(url)}   the API: {url}/docs"
    yield from snippets(url, first.names[0], keyed)
    if lacking := notice(first.names[0], first.runtime):
        yield lacking


def snippets(url: str, model: str, keyed: bool) -> Iterator[str]:
    """Return examples to paste as they are, into a shell and into Python."""
    messages = [{"role": "user", "content": "Hello!"}]
    body = shlex.quote(json.dumps({"model": model, "messages": messages}))
    header = f' -H "Authorization: Bearer ${KEY_VARIABLE}"' if keyed else ""
    yield (
        f"curl {shlex.quote(f'{url}/v1/chat/completions')} -H 'Content-Type: "
        f"application/json'{header} -d {body}"
    )
    key = f'os.environ["{KEY_VARIABLE}"]' if keyed else '"none"'
    yield f"{'import os, openai' if keyed else 'import openai'}"
    yield f'client = openai.OpenAI(base_url="{url}/v1", api_key={key})'
    yield (
        f"answer = client.chat.completions.create(model={json.dumps(model)}, "
        f"messages={json.dumps(messages)})"
    )
    yield "print(answer.choices[0].message.content)"
