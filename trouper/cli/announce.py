"""What a server says once it is ready."""

from __future__ import annotations

import json
import sys

import click

from trouper.actors.fleet import Fleet


def announce(url: str, fleet: Fleet, keyed: bool) -> None:
    first, *others = fleet.listed()
    assert first.runtime is not None, "the first model is loaded before the server starts"
    body = json.dumps({"model": first.names[0], "messages": [{"role": "user", "content": "Hello!"}]})
    key = ' -H "Authorization: Bearer $TROUPER_API_KEY"' if keyed else ""
    card = first.runtime.model
    click.echo(
        f"{first.names[0]} ({card.architecture}, {card.dtype}, {card.batching}) on {card.device} is ready at {url}/v1"
    )
    for other in others:
        click.echo(f"{other.names[0]} is loaded now, if it fits, or when it is first asked for")
    click.echo(f"the API: {url}/docs")
    click.echo(f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'")
    sys.stdout.flush()
