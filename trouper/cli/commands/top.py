"""`trouper top`: watch a server from a terminal."""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, TypeAlias

import attrs
import click
import httpx2
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trouper.cli.client import (
    DetailsHidden,
    UnusableAnswer,
    Where,
    client_of,
    read_as_trouper,
    refused_in_one_line,
)
from trouper.cli.flags import Finite
from trouper.cli.terminal_text import data_shown

Health: TypeAlias = Mapping[str, Any]
KEPT = 60
LEVELS = " ▁▂▃▄▅▆▇█"
COUNTERS = {
    "decoded": "tokens_generated",
    "prefilled": "total_prefill_tokens",
    "spared": "total_cached_tokens",
}
"""Rates in tokens per second, and the counter of each"""
COLOURS = {
    "ok": "green",
    "running": "green",
    "ready": "green",
    "degraded": "yellow",
    "starting": "yellow",
    "restarting": "yellow",
    "draining": "yellow",
    "unloading": "yellow",
    "stalled": "red",
    "stuck": "red",
    "stopped": "red",
    "failed": "red",
}
BAR_WIDTH = 30
STATE_WIDTH = 12  # Room for an actor's state


@attrs.define
class Rates:
    _at: float | None = None
    _counted: dict[str, int] = attrs.field(factory=dict)
    seen: dict[str, deque[float]] = attrs.field(
        factory=lambda: {name: deque(maxlen=KEPT) for name in COUNTERS}
    )

    def observe(self, stats: Mapping[str, Any], now: float) -> None:
        # A counter that went back belongs to a restarted server.
        counted = {name: int(stats[counter]) for name, counter in COUNTERS.items()}
        if self._at is not None and now > self._at:
            for name, count in counted.items():
                self.seen[name].append(max(0, count - self._counted[name]) / (now - self._at))
        self._at, self._counted = now, counted


def models_of(body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A single model has an empty name."""
    several: dict[str, dict[str, Any]] | None = body.get("models")
    return dict(several) if several else {"": body}


def page(
    url: str, body: dict[str, Any], rates: Mapping[str, Rates], problem: str = ""
) -> RenderableType:
    """`problem`: why the data is old"""
    parts: list[RenderableType] = [Text(problem, style="bold red")] if problem else []
    for name, health in models_of(body).items():
        title = Text(f"{name} " if name else "") + _status(health, current=not problem)
        parts.append(
            Panel(_model(health, rates.get(name, Rates())), title=title, title_align="left")
        )
    return Group(Text(url, style="bold"), *parts)


def _status(health: Health, *, current: bool) -> Text:
    state = str(health.get("status") or health.get("state"))
    if not current:
        return Text(f"{state} when it was last heard", style="dim")
    detail = f": {health['detail']}" if health.get("detail") else ""
    return Text.assemble((state, COLOURS.get(state, "")), detail)


def _model(health: Health, rates: Rates) -> RenderableType:
    if "cache_stats" not in health:
        return Text("not loaded", style="dim")
    lines = Table.grid(padding=(0, 2))
    for name, value in _lines(health, rates):
        lines.add_row(Text(name, style="dim"), value)
    return lines


def _lines(health: Health, rates: Rates) -> Iterator[tuple[str, RenderableType]]:
    stats = health["cache_stats"]
    for name, seen in rates.seen.items():
        yield name, StepPlot(seen)
    waiting, preempted = stats["queued_requests"], health["memory"].get("preempted_sequences", 0)
    again = f", {preempted} of them preempted" if preempted else ""
    yield "rows", Text(f"{stats['active_sequences']} running, {waiting} waiting{again}")
    done = stats["requests_completed"]
    errors = stats["requests_errored"]
    total = stats["total_requests"]
    yield "requests", Text(f"{done} done, {errors} failed, {total} in all")
    yield from _stores(health)
    for index, actor in enumerate(health["actors"]):
        again = (
            f"  {actor['restarts']} restarts, the last for {actor['last_error']}"
            if actor["restarts"]
            else ""
        )
        state = Text(f"{actor['state']:<{STATE_WIDTH}}", COLOURS.get(actor["state"], ""))
        yield "" if index else "actors", state + actor["name"] + again
    for rank in health.get("ranks", ()):
        yield (
            f"rank {rank['rank']}",
            Text(f"{rank['state']}, step {rank['step']}, heard {rank['silent_s']:.1f} s ago"),
        )


def _stores(health: Health) -> Iterator[tuple[str, Text]]:
    stats, memory, disk = health["cache_stats"], health["memory"], health["directory"]
    used, total = stats["used_blocks"], stats["total_blocks"]
    yield "cache", _bar(used, total) + f"  {used:,} of {total:,} blocks"
    spared, hits = stats["cache_effectiveness"], stats["cache_hit_rate"]
    yield "", Text(f"{spared:.0%} of prompt tokens spared, {hits:.0%} of blocks found")
    active, limit = memory["active_bytes"], memory["limit_bytes"]
    yield "memory", _bar(active, limit) + f"  {decimal(active)} of {decimal(limit)}"
    yield from _kv(memory, health["cache"]["bytes"])
    value = (
        f"{decimal(disk['bytes'])} in {disk['files']} files, {decimal(disk['free_disk_bytes'])} "
        "free"
    )
    yield "disk", Text(value if disk["attached"] else disk["reason"] or "none")


def _kv(memory: Mapping[str, Any], cached: int) -> Iterator[tuple[str, Text]]:
    rows = memory["kv_row_bytes"]
    limit = memory["kv_limit_bytes"]
    preemptions = memory["preemptions"]
    bound = f" of {decimal(limit)}" if limit else ""
    more = f", {preemptions} preemptions" if preemptions else ""
    yield (
        "kv",
        _bar(rows + cached, limit)
        + f"  {decimal(rows)} of rows, {decimal(cached)} cached{bound}{more}",
    )
    for index, bank in enumerate(memory.get("banks", ())):
        length = (
            "of any length"
            if bank["max_tokens"] is None
            else f"up to {bank['max_tokens']:,} tokens"
        )
        room = f"{bank['rows']} of {bank['slots']} slots of {bank['capacity_tokens']:,}"
        yield "" if index else "banks", Text(f"{length}: {room}, {decimal(bank['bytes'])}")


def _bar(part: float, total: float) -> Text:
    full = round(BAR_WIDTH * min(1.0, part / total)) if total else 0
    return Text.assemble(("━" * full, "cyan"), ("━" * (BAR_WIDTH - full), "bright_black"))


@attrs.frozen
class StepPlot:
    _values: deque[float]

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        last = f"{self._values[-1] if self._values else 0:>9,.0f} tok/s  "
        drawn = sparkline(self._values, max(1, options.max_width - len(last)))
        yield Text.assemble(last, (drawn, "cyan"), no_wrap=True)


def sparkline(values: deque[float], max_values: int = KEPT) -> str:
    newest = [*values][-max_values:]
    highest = max(newest, default=0) or 1
    return "".join(LEVELS[round(value / highest * (len(LEVELS) - 1))] for value in newest)


LONGEST_S = 86400


@click.command
@client_of
@click.option(
    "--interval-s",
    type=Finite(0.1, LONGEST_S),
    default=1.0,
    show_default=True,
    help="How often it looks.",
)
@click.option("--once", is_flag=True, help="Print the figures once, and end.")
@click.option("--json", "as_json", is_flag=True, help="The same as one JSON object.")
def top(where: Where, /, interval_s: float, once: bool, as_json: bool) -> None:
    """Watch a running server: tokens a second, rows, cache, memory, actors. Ctrl-C leaves."""
    console = Console()
    with ExitStack() as stack:
        stack.enter_context(refused_in_one_line(where))
        where.say()
        client = stack.enter_context(where.client())
        watching = Watching(where.url, client)
        watching.fetch()
        if once or as_json or not console.is_terminal:
            time.sleep(interval_s)
            figures = watching.fetch()
            if as_json:
                click.echo(json.dumps(watching.body()))
            else:
                console.print(figures)
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
    """A server that does not answer may come back."""

    _url: str
    _client: httpx2.Client
    _rates: defaultdict[str, Rates] = attrs.field(factory=lambda: defaultdict(Rates))
    _body: dict[str, Any] = attrs.field(factory=dict)
    _seen_at: float = 0.0

    def fetch(self) -> RenderableType:
        """Raises `UnusableAnswer` and httpx2's errors."""
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

    def body(self) -> dict[str, Any]:
        """Return what was fetched last, with each model's `tokens_per_s`."""
        for name, health in models_of(self._body).items():
            if (rates := self._rates.get(name)) is not None:
                health["tokens_per_s"] = {kind: seen[-1] for kind, seen in rates.seen.items()}
        return self._body

    def frame(self) -> RenderableType:
        """Show the last known state if the server does not answer as Trouper."""
        try:
            return self.fetch()
        except (UnusableAnswer, httpx2.HTTPError) as error:
            ago = time.monotonic() - self._seen_at
            message = f"no answer for {ago:.0f} s: {str(error) or type(error).__name__}"
            return page(self._url, self._body, self._rates, message)

    def _without_right(self) -> str:
        if "Authorization" not in self._client.headers:
            return (
                f"{self._url} shows its health to keys with the right observability only; give one "
                "by --api-key"
            )
        return (
            f"the key has no right to observability, which `trouper top` needs at {self._url}; "
            "whoever runs the server gives it by observability=true in --api-key-file"
        )
