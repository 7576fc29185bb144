"""`trouper top`: what it makes of /health, and a server that goes and comes back."""

from __future__ import annotations

import copy
import json
from io import StringIO
from typing import Any

import httpx2
import pytest
import trio
from click.testing import CliRunner
from rich.console import Console, RenderableType

from tests.web.serving import ask, serving
from trouper import cli
from trouper.cli.commands.top import KEPT, Rates, Watching, models_of, page, sparkline
from trouper.cli.exits import USAGE_ERROR


def text(shown: RenderableType, width: int = 120) -> str:
    written = StringIO()
    Console(file=written, width=width).print(shown)
    return written.getvalue()


async def health() -> dict[str, Any]:
    """A real one."""
    from tests.web.serving import exchange, get

    async with serving() as served:
        await ask(served, {"prompt": "hello", "max_tokens": 7})
        _, _, body = await exchange(served, get("/health").replace(b"Connection: close\r\n", b""))
        return dict(json.loads(body))


async def test_every_part_of_health_has_its_line() -> None:
    body = await health()
    rates = Rates()
    rates.observe(body["cache_stats"], 1.0)
    later = copy.deepcopy(body)
    later["cache_stats"]["tokens_generated"] += 50
    later["actors"][0] |= {
        "state": "restarting",
        "restarts": 2,
        "last_error": "ValueError: [bold]x[/nothing]",
    }
    rates.observe(later["cache_stats"], 3.0)
    said = text(page("http://here", later, {"": rates}))
    assert "25 tok/s" in said
    assert "ValueError: [bold]x[/nothing]" in said, "an error is no markup"
    for part in (
        "http://here",
        "ok",
        "0 running, 0 waiting",
        "1 done, 0 failed, 1 in all",
        "blocks",
        "memory",
        "disk",
    ):
        assert part in said
    assert all(actor["name"] in said for actor in body["actors"])


async def test_kv_memory_its_banks_and_who_was_preempted_have_lines() -> None:
    body = await health()
    body["cache_stats"] |= {"queued_requests": 3}
    body["cache"] |= {"bytes": 10_000_000}
    bank = {"capacity_tokens": 256, "rows": 3, "slots": 4, "bytes": 30_000_000}
    body["memory"] |= {
        "kv_row_bytes": 40_000_000,
        "kv_limit_bytes": 60_000_000,
        "preemptions": 5,
        "preempted_sequences": 2,
        "banks": [bank | {"max_tokens": 512}, bank | {"max_tokens": None}],
    }
    lines = text(page("http://here", body, {})).splitlines()
    assert any("3 waiting, 2 of them preempted" in line for line in lines)
    [kv] = [line for line in lines if "kv " in line]
    assert kv.count("━") == 30 and "40.0 MB of rows, 10.0 MB cached of 60.0 MB, 5 preemptions" in kv
    [short] = [line for line in lines if "banks " in line]
    assert "up to 512 tokens: 3 of 4 slots of 256, 30.0 MB" in short
    assert "of any length: 3 of 4 slots of 256" in lines[lines.index(short) + 1]


LONG_NAME = "Scheduler+RankMirror+ModelStepper"


@pytest.mark.parametrize("width", [80, 100, 200])
async def test_a_graph_ends_now_in_any_width(width: int) -> None:
    """Its oldest part goes, nothing wraps, and an actor's name takes no room from it."""
    body = await health()
    body["actors"][1] |= {"name": LONG_NAME}
    rates, now, count = Rates(), 0.0, 0
    for look in range(KEPT + 20):
        now, count = now + 1.0, count + (1000 if look >= KEPT + 17 else 0)
        rates.observe(
            {"tokens_generated": count, "total_prefill_tokens": 0, "total_cached_tokens": 0}, now
        )
    lines = text(page("http://here", body, {"": rates}), width).splitlines()
    [decoded] = [line for line in lines if "decoded" in line]
    assert decoded.rstrip(" │").endswith("███")
    assert any(LONG_NAME in line for line in lines)
    shown = (
        len(body["actors"])
        + len(rates.seen)
        + len(("rows", "requests", "cache", "", "memory", "kv", "disk"))
    )
    assert len(lines) == len(("url", "top", "bottom")) + shown
    graph = decoded.split("tok/s  ")[1].rstrip("│")
    assert len(graph) >= min(KEPT, width - 35)


@pytest.mark.parametrize("interval", ["nan", "inf", "0"])
def test_an_interval_that_is_none_is_refused(interval: str) -> None:
    outcome = CliRunner().invoke(
        cli.main, ["top", "--once", "--interval-s", interval, "--url", "http://127.0.0.1:9"]
    )
    assert (outcome.exit_code, "--interval-s" in outcome.stderr) == (USAGE_ERROR, True)


async def test_several_models_have_a_panel_each() -> None:
    one = await health()
    body = one | {"models": {"first": {"state": "ready"} | one, "second": {"state": "unloaded"}}}
    assert list(models_of(body)) == ["first", "second"]
    said = text(page("http://here", body, {}))
    assert "first ok" in said and "second unloaded" in said and "not loaded" in said


def test_rates_of_a_server_that_was_started_again() -> None:
    rates = Rates()
    for now, count in ((1.0, 1000), (2.0, 1100), (3.0, 10), (4.0, 30), (4.0, 30)):
        rates.observe(
            {"tokens_generated": count, "total_prefill_tokens": 0, "total_cached_tokens": 0}, now
        )
    assert list(rates.seen["decoded"]) == [100.0, 0.0, 20.0]
    for now in range(5, 200):
        rates.observe(
            {"tokens_generated": 0, "total_prefill_tokens": 0, "total_cached_tokens": 0}, now
        )
    assert len(rates.seen["decoded"]) == KEPT


def test_a_sparkline() -> None:
    from collections import deque

    assert sparkline(deque([0.0, 1.0, 4.0, 8.0])) == " ▁▄█"
    assert sparkline(deque([8.0, 1.0, 4.0, 8.0]), 2) == "▄█", "the newest"
    assert sparkline(deque()) == ""
    assert sparkline(deque([0.0, 0.0])) == "  "


async def test_a_server_that_goes_and_comes_back_is_watched_on() -> None:
    body = await health()
    answers: list[httpx2.Response | Exception] = [
        httpx2.Response(200, json=body),
        httpx2.ConnectError("refused"),
        httpx2.Response(503),
        httpx2.Response(200, json=body),
    ]

    def answer(_: httpx2.Request) -> httpx2.Response:
        one = answers.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    with httpx2.Client(transport=httpx2.MockTransport(answer), base_url="http://x") as client:
        watching = Watching("http://x", client)
        assert "no answer" not in text(watching.frame())
        gone = text(watching.frame())
        assert "no answer for 0 s: refused" in gone
        assert "1 done" in gone, "what was seen last is still shown"
        assert "╭─ ok when it was last heard ─" in gone, "and not as of now"
        assert "503" in text(watching.frame())
        assert "no answer" not in text(watching.frame())


async def test_the_command_prints_what_it_sees() -> None:
    async with serving() as served:
        await ask(served, {"prompt": "hello", "max_tokens": 7})
        arguments = [
            "top",
            "--once",
            "--interval-s",
            "0.1",
            "--url",
            f"http://127.0.0.1:{served.port}",
        ]
        outcome, as_json = [
            await trio.to_thread.run_sync(CliRunner().invoke, cli.main, [*arguments, *more])
            for more in ((), ("--json",))
        ]
    assert outcome.exit_code == 0, outcome.output
    assert "1 done, 0 failed, 1 in all" in outcome.stdout
    body = json.loads(as_json.stdout)
    assert body["cache_stats"]["requests_completed"] == 1
    assert body["tokens_per_s"] == {"decoded": 0, "prefilled": 0, "spared": 0}


@pytest.mark.parametrize("arguments", [("top", "--once"), ("chat", "hm?")])
async def test_a_server_that_is_none(arguments: tuple[str, ...]) -> None:
    """Something else listens there."""
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def answer(stream: trio.SocketStream) -> None:
            async with stream:
                await stream.receive_some()
                await stream.send_all(
                    b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nConnection: close\r\n\r\nwhat?"
                )

        nursery.start_soon(trio.serve_listeners, answer, [listener])
        url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}"
        outcome = await trio.to_thread.run_sync(
            lambda: CliRunner().invoke(cli.main, [*arguments, "--url", url])
        )
        nursery.cancel_scope.cancel()
    assert outcome.exit_code == USAGE_ERROR
    assert "404 Not Found" in outcome.stderr
