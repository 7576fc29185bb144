"""`just bench-page`: what the live page costs, and how fast it is there.

Throughput of 8 streams with the page open in Chromium on this machine, which then paints with the same cores, against an empty tab.
In each round one server answers the same requests twice with the page and twice without, in the order a b b a or b a a b, so that
what else the machine does, and what it does more and more, hits both alike. Rounds go on until it is decided whether less than two
percent are lost, or the time is up: on a machine that has other work nothing may come of it.

`--cpu` asks what a busy machine does not spoil: CPU seconds of the browser and of a server whose engine computes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import trio

from benchmarks import load, paired, servers
from tests.actors.bench import generate, running
from tests.browser.driver import Browser, chromium
from tests.fakes import FakeEngine
from trouper.actors.fleet import OneModel
from trouper.web.live.feed import TICK_S, Feed

Row = dict[str, Any]
LOADS = 9
SETTLED_S = 3.0
"""A browser compiles and keeps what it has loaded for a while; that is not what an open page costs."""
KEPT = 0.98
"""Of the throughput: what an open page must leave."""
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
        while len(seen) < 8:
            await trio.sleep(TICK_S)
            began = time.thread_time()
            _, data = feed.snapshot()
            seen.append(time.thread_time() - began)
        assert data.count(b"request_id") == rows
        nursery.cancel_scope.cancel()
    return statistics.median(seen)


async def closed(browser: Browser) -> AsyncIterator[None]:
    await trio.to_thread.run_sync(browser.open, "about:blank")
    yield


async def page(browser: Browser, url: str) -> AsyncIterator[None]:
    """It is open, and shows something."""
    await trio.to_thread.run_sync(browser.open, url)
    while not await trio.to_thread.run_sync(browser.run, LOAD_TIMES):
        pass
    await trio.sleep(SETTLED_S)
    yield


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


async def compare(server: servers.Server, browser: Browser, options: argparse.Namespace) -> list[Row]:
    """Rounds, each with tokens a second of either way and their ratio."""
    url, until = f"http://127.0.0.1:{server.port}/", trio.current_time() + 60 * options.minutes
    prompts = [load.prompt(stream, 12) for stream in range(options.streams)]
    await load.together(server.port, prompts, options.tokens)
    rounds: list[Row] = []
    longest = 0.0
    while len(rounds) < 2 or trio.current_time() + longest < until:
        began = trio.current_time()
        a, b = ("closed", "page") if len(rounds) % 2 else ("page", "closed")
        seen: dict[str, list[float]] = {"closed": [], "page": []}
        for name, times in ((a, 1), (b, 2), (a, 1)):
            async with (
                asynccontextmanager(page)(browser, url) if name == "page" else asynccontextmanager(closed)(browser)
            ):
                for _ in range(times):
                    answered = await load.together(server.port, prompts, options.tokens)
                    seen[name].append(load.throughput(answered))
        # The same tokens each time: the ratio of the times that they took.
        ratio = sum(1 / one for one in seen["closed"]) / sum(1 / one for one in seen["page"])
        rounds.append(seen | {"ratio": ratio})
        ratios = [one["ratio"] for one in rounds]
        shown = {name: ", ".join(f"{one:.1f}" for one in speeds) for name, speeds in seen.items()}
        print(
            f"  round {len(rounds)}: closed {shown['closed']}; page {shown['page']} tok/s; ratio {ratio:.4f}",
            flush=True,
        )
        if paired.verdict(ratios, KEPT) is not None:
            break
        longest = max(longest, trio.current_time() - began)
    return rounds


def say(rounds: list[Row], streams: int) -> Row:
    ratios = [one["ratio"] for one in rounds]
    found, above = paired.interval(ratios), paired.verdict(ratios, KEPT)
    words = {True: "holds", False: "does not hold", None: "undecided: rounds differ too much"}[above]
    print(
        f"{streams} streams, page / closed: {found} of the throughput, 95 % interval of {len(ratios)} rounds, median "
        f"{statistics.median(ratios):.4f}; less than {100 * (1 - KEPT):.0f} % lost: {words}"
    )
    return {"low": found.low, "mean": found.mean, "high": found.high, "holds": above}


def cpu_report(options: argparse.Namespace) -> Row:
    """CPU seconds a minute of browser and server, with the page and with an empty tab, in turns."""
    command = [sys.executable, "-m", "benchmarks.paced", str(options.streams)]
    seen: list[tuple[str, float, float]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, chromium(told=False) as browser:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().removesuffix("v1")
            served, driver = psutil.Process(process.pid), psutil.Process(browser.driver.service.process.pid)
            for name in ("closed", "page") * 2:
                browser.open(url if name == "page" else "about:blank")
                time.sleep(2 * SETTLED_S)
                before, began = (cpu_s(driver), cpu_s(served)), time.monotonic()
                time.sleep(options.seconds)
                minutes = (time.monotonic() - began) / 60
                seen.append((name, (cpu_s(driver) - before[0]) / minutes, (cpu_s(served) - before[1]) / minutes))
                print(f"  {name}: browser {seen[-1][1]:.2f} s, server {seen[-1][2]:.2f} s of CPU a minute", flush=True)
        finally:
            process.kill()
    mean = {
        (name, who): statistics.fmean(one[who] for one in seen if one[0] == name)
        for name in ("closed", "page")
        for who in (1, 2)
    }
    more = {who: mean["page", place] - mean["closed", place] for who, place in (("browser", 1), ("server", 2))}
    print(
        f"{options.streams} rows, page beyond an empty tab: browser {more['browser']:.2f} s, server {more['server']:.2f} s a minute"
    )
    return more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=8.5, help="of rounds, at most")
    parser.add_argument("--cpu", action="store_true", help="CPU seconds only, which a busy machine does not spoil")
    parser.add_argument("--seconds", type=float, default=60, help="of each of the four turns of --cpu")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of two layers: there the runtime is what is measured"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report = {"cpu": cpu_report(options)} if options.cpu else whole(options)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))


def whole(options: argparse.Namespace) -> Row:
    model = servers.embedded()
    model = servers.tiny_copy(model) if options.tiny else model
    took = trio.run(snapshot_s, options.streams)
    print(f"one snapshot of {options.streams} rows: {1e6 * took:.0f} us, {100 * took / TICK_S:.2f} % of a core")
    # Nothing is cached, or the second time would be another one.
    with servers.trouper(model, "--cache-memory", "0") as server, chromium(told=False) as browser:
        report: Row = loads(browser, f"http://127.0.0.1:{server.port}/")
        print(
            f"cold loads, medians of {LOADS}: loaded after {report['loaded_s']:.2f} s, the first figures after "
            f"{report['shown_s']:.2f} s (slowest {report['slowest_shown_s']:.2f} s)"
        )
        report["rounds"] = trio.run(compare, server, browser, options)
    return report | say(report["rounds"], options.streams)


if __name__ == "__main__":
    main()
