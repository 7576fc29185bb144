"""`just bench-page`: what the live page costs, and how fast it is there.

Speed of 8 streams with the page open in Chromium on this machine, which then paints with the same cores, against an empty tab in
front of it. The streams go on all the time, and the tabs are exchanged every few seconds: so each window is compared with the one
beside it, since what else this machine does (a shared one is up to half as fast for minutes) is alike in both. Drafts are off:
what they are worth changes from window to window.

`--cpu` asks what a busy machine does not spoil: CPU seconds of the browser and of a server whose engine computes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from itertools import count, cycle, pairwise
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
LOADED_S = 3.0
"""A browser compiles and keeps what it has loaded for a while; that is not what an open page costs."""
WINDOW_S, SETTLED_S, LEAST_STEPS = 3.0, 0.8, 8
"""A tab is in front for so long; the first part goes to painting all of it anew, which is not asked here; of the rest so many
steps of the model must be known."""
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


async def toggled(server: servers.Server, browser: Browser, options: argparse.Namespace) -> list[float]:
    """Ratios of speeds, page to empty tab, each of four windows beside each other: empty, page, page, empty. They are alike
    in what else the machine does, and a step that takes longer and longer as its rows grow (three per cent a window) cancels."""
    page, empty = browser.driver.window_handles
    end = trio.current_time() + 60 * options.minutes
    watched: list[load.Stream] = []
    looks: list[float] = []
    """When windows began."""

    async def keep_asking(place: int) -> None:
        for number in count():
            if trio.current_time() > end:
                return
            stream = load.Stream()
            if place == 0:
                watched.append(stream)
            prompt = load.prompt(1000 * number + place, 12)
            await load.stream(server.port, prompt, options.tokens, stream, ignore_eos=True)

    async def look() -> None:
        for tab in cycle((empty, page, page, empty)):
            if trio.current_time() > end:
                return
            chosen = {"targetId": tab}
            await trio.to_thread.run_sync(browser.driver.execute_cdp_cmd, "Target.activateTarget", chosen)
            looks.append(time.perf_counter())
            await trio.sleep(WINDOW_S)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        for place in range(options.streams):
            nursery.start_soon(keep_asking, place)
    speeds = [speed(watched, start + SETTLED_S, stop) for start, stop in pairwise(looks)]
    fours = zip(*(speeds[first::4] for first in range(4)), strict=False)
    return [((b * c) / (a * d)) ** 0.5 for a, b, c, d in fours if a and b and c and d]


def speed(streams: list[load.Stream], start: float, stop: float) -> float | None:
    """Steps a second, of those that lie within; None if they are too few to tell."""
    gaps = [b - a for stream in streams for a, b in pairwise(stream.times) if a >= start and b <= stop]
    return len(gaps) / sum(gaps) if len(gaps) >= LEAST_STEPS else None


def say(ratios: list[float], streams: int) -> Row:
    found = paired.interval(ratios)
    holds = True if found.low > KEPT else False if found.high < KEPT else None
    words = {True: "holds", False: "does not hold", None: "undecided: give it more --minutes, or a quieter machine"}
    print(
        f"{streams} streams, page in front / empty tab in front: {found} of the speed, 95 % interval of {len(ratios)} times "
        f"four windows, median {statistics.median(ratios):.4f}; less than {100 * (1 - KEPT):.0f} % lost: {words[holds]}"
    )
    return {"low": found.low, "mean": found.mean, "high": found.high, "holds": holds}


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
                time.sleep(2 * LOADED_S)
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
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--minutes", type=float, default=10, help="of streams")
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
    flags = ("--cache-memory", "0", "--speculation", "off")
    with servers.trouper(model, *flags) as server, chromium(told=False) as browser:
        report: Row = loads(browser, f"http://127.0.0.1:{server.port}/")
        print(
            f"cold loads, medians of {LOADS}: loaded after {report['loaded_s']:.2f} s, the first figures after "
            f"{report['shown_s']:.2f} s (slowest {report['slowest_shown_s']:.2f} s)"
        )
        time.sleep(LOADED_S)
        browser.driver.switch_to.new_window("tab")
        report["ratios"] = trio.run(toggled, server, browser, options)
    return report | say(report["ratios"], options.streams)


if __name__ == "__main__":
    main()
