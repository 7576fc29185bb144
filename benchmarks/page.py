"""`just bench-page`: what the live page costs, and how fast it is there.

Throughput of 8 streams while nobody looks, while somebody reads the stream of snapshots (as a browser on another machine does), and
with the page open in Chromium on this machine, which then has to paint with the same cores. Rounds of all three one after
another in one server, in changing order, so that what else the machine does hits them alike; medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import trio

from benchmarks import load, servers
from tests.actors.bench import generate, running
from tests.browser.driver import Browser, chromium
from tests.fakes import FakeEngine
from trouper.actors.fleet import OneModel
from trouper.web.live.feed import TICK_S, Feed

Row = dict[str, Any]
LOADS = 9
SETTLED_S = 3.0
"""A browser compiles and keeps what it has loaded for a while; that is not what an open page costs."""
LOAD_TIMES = """
const [page] = performance.getEntriesByType("navigation"), [shown] = performance.getEntriesByName("shown");
return shown && page.loadEventEnd && {loaded_s: page.loadEventEnd / 1000, shown_s: shown.startTime / 1000}
"""


def loads(browser: Browser, url: str) -> Row:
    """Seconds from asking for the page until it was loaded, and until it showed the server's first figures. The browser's
    cache is emptied before each."""
    seen: list[Row] = []
    for _ in range(LOADS):
        browser.open("about:blank")
        browser.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
        browser.open(url)
        while not (times := browser.run(LOAD_TIMES)):
            pass
        seen.append(times)
    return {name: statistics.median(one[name] for one in seen) for name in seen[0]} | {
        "slowest_shown_s": max(one["shown_s"] for one in seen)
    }


async def snapshot_s(rows: int) -> float:
    """CPU seconds of one snapshot, rows and bytes included, of so many rows that decode."""

    async def step(_: object) -> None:
        await trio.sleep(0.01)

    async with running(FakeEngine(before_step=step)) as runtime, trio.open_nursery() as nursery:

        async def read(number: int) -> None:
            with await runtime.submit(generate(str(number), max_tokens=4000)) as answer:
                async for _ in answer:
                    pass

        for number in range(rows):
            nursery.start_soon(read, number)
        seen = []
        feed = Feed(OneModel(runtime), ())
        while len(seen) < 20:
            await trio.sleep(TICK_S)
            began = time.thread_time()
            _, data = feed.snapshot()
            seen.append(time.thread_time() - began)
        assert data.count(b"request_id") == rows
        nursery.cancel_scope.cancel()
    return statistics.median(seen)


async def closed() -> AsyncIterator[None]:
    yield


async def stream(port: int) -> AsyncIterator[None]:
    """Somebody reads the snapshots."""

    async def read(connection: trio.SocketStream) -> None:
        while await connection.receive_some():
            pass

    async with await trio.open_tcp_stream("127.0.0.1", port) as connection, trio.open_nursery() as nursery:
        await connection.send_all(b"GET /v1/live HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\n\r\n")
        nursery.start_soon(read, connection)
        yield
        nursery.cancel_scope.cancel()


async def page(browser: Browser, url: str) -> AsyncIterator[None]:
    """It is open, and shows something."""
    await trio.to_thread.run_sync(browser.open, url)
    while not await trio.to_thread.run_sync(browser.run, LOAD_TIMES):
        pass
    await trio.sleep(SETTLED_S)
    try:
        yield
    finally:
        await trio.to_thread.run_sync(browser.open, "about:blank")


def cpu_s(process: psutil.Process) -> float:
    """Of a process and of all below it."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        try:
            times = one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


async def measure(server: servers.Server, browser: Browser, options: argparse.Namespace) -> list[dict[str, Row]]:
    url = f"http://127.0.0.1:{server.port}/"
    driver = psutil.Process(browser.driver.service.process.pid)
    modes = {"closed": closed, "stream": partial(stream, server.port), "page": partial(page, browser, url)}
    await rates(server, options, 1000)
    rounds = []
    for number in range(options.rounds):
        names = list(modes)[number % 3 :] + list(modes)[: number % 3]
        row = {}
        for name in names:
            async with asynccontextmanager(modes[name])():
                browsed, served, began = cpu_s(driver), server.cpu_s(), trio.current_time()
                speed = await rates(server, options, 10 * number)
                row[name] = {
                    "tokens_per_s": speed,
                    "server_cpu_s": server.cpu_s() - served,
                    "browser_cpu": (cpu_s(driver) - browsed) / (trio.current_time() - began),
                }
        rounds.append(row)
        print(f"  round {number + 1}: " + ", ".join(f"{name} {row[name]['tokens_per_s']:.1f}" for name in modes))
    return rounds


async def rates(server: servers.Server, options: argparse.Namespace, seed: int) -> float:
    prompts = [load.prompt(seed + k, 12) for k in range(options.streams)]
    return load.throughput(await load.together(server.port, prompts, options.tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--tiny", action="store_true", help="a model of two layers: there the runtime is what is measured"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = servers.embedded()
    model = servers.tiny_copy(model) if options.tiny else model
    took = trio.run(snapshot_s, options.streams)
    print(f"one snapshot of {options.streams} rows: {1e6 * took:.0f} us, {100 * took / TICK_S:.2f} % of a core")
    with servers.trouper(model) as server, chromium() as browser:
        report: Row = loads(browser, f"http://127.0.0.1:{server.port}/")
        print(
            f"cold loads, medians of {LOADS}: loaded after {report['loaded_s']:.2f} s, the first figures after "
            f"{report['shown_s']:.2f} s (slowest {report['slowest_shown_s']:.2f} s)"
        )
        report["rounds"] = rounds = trio.run(measure, server, browser, options)
    for name in ("stream", "page"):
        ratios = [row[name]["tokens_per_s"] / row["closed"]["tokens_per_s"] for row in rounds]
        work = statistics.median(row[name]["server_cpu_s"] / row["closed"]["server_cpu_s"] for row in rounds)
        report |= {f"{name} / closed": statistics.median(ratios), f"{name} / closed, CPU of the server": work}
        cpu = statistics.median(row[name]["browser_cpu"] for row in rounds)
        print(
            f"{options.streams} streams, {name} / closed: {statistics.median(ratios):.3f} tok/s "
            f"(rounds {min(ratios):.3f} to {max(ratios):.3f}), {work:.3f} of the server's CPU time; "
            f"the browser takes {100 * cpu:.0f} % of a core"
        )
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
