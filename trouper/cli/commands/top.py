"""`trouper top`: watch a server from a terminal."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import attrs
import click
import httpx2
from rich.console import Console, RenderableType
from rich.live import Live

from trouper.cli.client import (
    DetailsHidden,
    UnusableAnswer,
    Where,
    client_of,
    read_as_trouper,
    refused_in_one_line,
)
from trouper.cli.dashboard import Rates, models_of, page
from trouper.cli.flags import Finite
from trouper.cli.terminal_text import data_shown

LONGEST_S = 86400


@click.command(short_help="Watch a running server.")
@client_of
@click.option(
    "--interval-s",
    type=Finite(0.1, LONGEST_S),
    default=1.0,
    show_default=True,
    help="How often it looks.",
)
@click.option("--once", is_flag=True, help="Print what it sees after two looks, and end.")
def top(where: Where, /, interval_s: float, once: bool) -> None:
    """Watch a running server: tokens a second, rows, cache, memory, actors. Ctrl-C leaves."""
    console = Console()
    with ExitStack() as stack:
        stack.enter_context(refused_in_one_line(where))
        where.say()
        client = stack.enter_context(where.client())
        watching = Watching(where.url, client)
        watching.fetch()
        if once or not console.is_terminal:
            time.sleep(interval_s)
            console.print(watching.fetch())
            return
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    live.update(watching.frame(), refresh=True)
                    time.sleep(interval_s)
        except KeyboardInterrupt:
            pass


@attrs.define
class Watching:
    """The data seen so far. A server that does not answer may come back."""

    _url: str
    _client: httpx2.Client
    _rates: defaultdict[str, Rates] = attrs.field(factory=lambda: defaultdict(Rates))
    _body: dict[str, Any] = attrs.field(factory=dict)
    _seen_at: float = 0.0

    def fetch(self) -> RenderableType:
        """Fetch the health and render it. Raises `UnusableAnswer` and httpx2's errors."""
        answer = self._client.get("/health").raise_for_status()
        with read_as_trouper(self._client):
            body = data_shown(answer.json())
            if body.keys() == {"status"}:
                raise DetailsHidden(self._without_right())
            for name, health in models_of(body).items():
                if stats := health.get("cache_stats") if name else health["cache_stats"]:
                    self._rates[name].observe(stats, time.monotonic())
            shown = page(self._url, body, self._rates)
        self._body, self._seen_at = body, time.monotonic()
        return shown

    def frame(self) -> RenderableType:
        """Render like `fetch`, but show the last known state if the server does not answer, or is
        not Trouper."""
        try:
            return self.fetch()
        except (UnusableAnswer, httpx2.HTTPError) as error:
            ago = time.monotonic() - self._seen_at
            message = f"no answer for {ago:.0f} s: {str(error) or type(error).__name__}"
            return page(self._url, self._body, self._rates, message)

    def _without_right(self) -> str:
        """Say why there are no details."""
        if "Authorization" not in self._client.headers:
            return (
                f"{self._url} shows its health to keys with the right observability only; give one "
                "by --api-key"
            )
        return (
            f"the key has no right to observability, which `trouper top` needs at {self._url}; "
            "whoever runs the server gives it by "
            "observability=true in --api-key-file"
        )
