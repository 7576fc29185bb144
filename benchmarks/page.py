"""`just bench-page`: what the live page costs, and how fast it is there.

Speed of 8 streams with the page open in Chromium on this machine, which then paints with the same
cores, against an empty tab in front of it. The streams go on all the time, and the tabs are
exchanged every few seconds: so each window is compared with the one beside it, since what else this
machine does (a shared one is up to half as fast for minutes) is alike in both. Drafts are off: what
they are worth changes from window to window.

A window of a shared machine still differs from the next by 6 %, a step from the next by little
more. So the same run is also asked what the page's frames (one a second) add to the step that each
falls into and to the next, against the steps around these two: that is as sure after minutes as the
windows are after hours, and misses only what an open page would cost between its frames.

`--cpu` asks what a busy machine does not spoil: CPU seconds of the browser and of a server whose
engine computes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Any

import attrs
import psutil
import trio

from benchmarks import load, paired, servers
from tests.actors.bench import generate, running
from tests.browser.driver import Browser, chromium
from tests.fakes import FakeEngine
from trouper.actors.runtime.served_models import OneModel
from trouper.web.live.site import TICK_S, Feed
from trouper.web.serving.running_requests import RunningRequests
from trouper_lab.load import Stream

Row = dict[str, Any]
LOADS = 9
LOADED_S = 3.0
"""A browser compiles and keeps what it has loaded for a while; that is not what an open page
costs."""
WINDOW_S, SETTLED_S, LEAST_STEPS = 5.0, 0.8, 8
"""A tab is in front for so long; the first part goes to painting all of it anew, which is not asked
here; of the rest so many steps of the model must be known."""
APART_S = 0.02
"""Tokens of one step reach their clients within less, those of two do not."""
KEPT = 0.98
"""Of the throughput: what an open page must leave."""
FRAMES = """
const ask = requestAnimationFrame;
window.painted = [];
window.requestAnimationFrame = (show) => ask((at) => { painted.push((performance.timeOrigin + at) / 1000); show(at); });
"""
"""Has the page note when it paints, in seconds since the epoch."""
LOAD_TIMES = """
const [page] = performance.getEntriesByType("navigation"), [shown] = performance.getEntriesByName("shown");
return shown && page.loadEventEnd && {loaded_s: page.loadEventEnd / 1000, shown_s: shown.startTime / 1000}
"""


def loads(browser: Browser, url: str) -> Row:
    """Seconds from asking for the page until it was loaded, and until it showed the server's first
    figures. The browser's cache is emptied before each."""
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
        seen = list[float]()
        feed = Feed(OneModel(runtime), (), RunningRequests())
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


@attrs.frozen
class Window:
    """What was seen while one tab was in front, but for its first moments. Times by one clock, in
    seconds."""

    begun: float
    ended: float
    steps: list[float]
    """When each was heard of."""

    @property
    def speed(self) -> float | None:
        """Steps a second; None if they are too few to tell."""
        if len(self.steps) <= LEAST_STEPS:
            return None
        return (len(self.steps) - 1) / (self.steps[-1] - self.steps[0])

    def added(self, frames: list[float]) -> Iterator[float]:
        """Seconds that each frame of the page added to its step and the next, beyond the two steps
        before and after these."""
        taken = [after - before for before, after in pairwise(self.steps)]
        within = [
            bisect_left(self.steps, frame) - 1
            for frame in frames
            if self.begun <= frame <= self.ended
        ]
        for place in within:
            near = range(place - 2, place + 4)
            alone = not any(other in near for other in within if other != place)
            if alone and near.start >= 0 and near.stop <= len(taken):
                spent = [taken[one] for one in near]
                yield sum(spent[2:4]) - sum(spent[:2] + spent[4:]) / 2


async def toggled(
    server: servers.Server, browser: Browser, options: argparse.Namespace
) -> list[Window]:
    """One after another, of tabs in front: empty, page, page, empty, and so on."""
    page, empty = browser.driver.window_handles
    streams: list[Stream] = []
    looks: list[float] = []
    """When tabs were exchanged."""

    async def keep_asking(place: int) -> None:
        for number in count():
            streams.append(stream := Stream())
            prompt = load.prompt(1000 * number + place, 12)
            await load.stream(server.port, prompt, options.tokens, stream, ignore_eos=True)

    async with trio.open_nursery() as nursery:
        for place in range(options.streams):
            nursery.start_soon(keep_asking, place)
        with trio.move_on_after(60 * options.minutes):
            for tab in cycle((empty, page, page, empty)):
                chosen = {"targetId": tab}
                await trio.to_thread.run_sync(
                    browser.driver.execute_cdp_cmd, "Target.activateTarget", chosen
                )
                looks.append(time.perf_counter())
                await trio.sleep(WINDOW_S)
        nursery.cancel_scope.cancel()
    moments = steps(streams)
    begun = [stream.times[0] for stream in streams if stream.times]
    return [window(moments, begun, look + SETTLED_S, end) for look, end in pairwise(looks)]


def window(moments: list[float], begun: list[float], start: float, stop: float) -> Window:
    """Of no steps if a stream began in it: a prefill is not what is asked."""
    spoilt = any(start <= moment <= stop for moment in begun)
    return Window(
        start, stop, [] if spoilt else [moment for moment in moments if start <= moment <= stop]
    )


def fours(windows: list[Window]) -> list[float]:
    """Ratios of speeds, page to empty tab, each of four windows beside each other. They are alike
    in what else the machine does, and a step that takes longer and longer as its rows grow
    cancels."""
    speeds = [one.speed for one in windows]
    together = zip(*(speeds[first::4] for first in range(4)), strict=False)
    return [((b * c) / (a * d)) ** 0.5 for a, b, c, d in together if a and b and c and d]


def steps(streams: list[Stream]) -> list[float]:
    """When each step was heard of, by whichever stream had text of it: not every token is text."""
    moments: list[float] = []
    for moment in sorted(moment for stream in streams for moment in stream.times):
        if not moments or moment - moments[-1] > APART_S:
            moments.append(moment)
    return moments


def say(streams: int, ratios: list[float], added: list[float], frames_a_second: float) -> Row:
    by_windows = paired.interval(ratios)
    a_frame = paired.mean(added)
    by_frames = paired.Interval(
        *(1 - frames_a_second * one for one in (a_frame.high, a_frame.mean, a_frame.low))
    )
    print(
        f"{streams} streams, speed with the page in front / an empty tab in front, 95 % intervals:"
    )
    for found, how in (
        (by_windows, f"{len(ratios)} times four windows"),
        (
            by_frames,
            f"{len(added)} frames, which add {1e3 * a_frame.mean:.1f} ms each, {frames_a_second:.2f} a second",
        ),
    ):
        holds = (
            "holds" if found.low > KEPT else "does not hold" if found.high < KEPT else "undecided"
        )
        print(f"  {found} by {how}; less than {100 * (1 - KEPT):.0f} % lost: {holds}")
    return {
        "by_windows": attrs.asdict(by_windows),
        "by_frames": attrs.asdict(by_frames),
        "ratios": ratios,
        "added_s": added,
    }


def cpu_report(options: argparse.Namespace) -> Row:
    """CPU seconds a minute of browser and server, with the page and with an empty tab, in turns."""
    command = [sys.executable, "-m", "benchmarks.paced", str(options.streams)]
    seen: list[tuple[str, float, float]] = []
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        chromium(told=False) as browser,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip().removesuffix("v1")
            served, driver = (
                psutil.Process(process.pid),
                psutil.Process(browser.driver.service.process.pid),
            )
            for name in ("closed", "page") * 2:
                browser.open(url if name == "page" else "about:blank")
                time.sleep(2 * LOADED_S)
                before, began = (cpu_s(driver), cpu_s(served)), time.monotonic()
                time.sleep(options.seconds)
                minutes = (time.monotonic() - began) / 60
                seen.append(
                    (
                        name,
                        (cpu_s(driver) - before[0]) / minutes,
                        (cpu_s(served) - before[1]) / minutes,
                    )
                )
                print(
                    f"  {name}: browser {seen[-1][1]:.2f} s, server {seen[-1][2]:.2f} s of CPU a minute",
                    flush=True,
                )
        finally:
            process.kill()
    mean = {
        (name, place): statistics.fmean(
            (browser_s, server_s)[place] for tab, browser_s, server_s in seen if tab == name
        )
        for name in ("closed", "page")
        for place in (0, 1)
    }
    more = {
        who: mean["page", place] - mean["closed", place]
        for who, place in (("browser", 0), ("server", 1))
    }
    print(
        f"{options.streams} rows, page beyond an empty tab: browser {more['browser']:.2f} s, server {more['server']:.2f} s a minute"
    )
    return more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1500, help="of each answer")
    parser.add_argument("--minutes", type=float, default=10, help="of streams")
    parser.add_argument(
        "--cpu", action="store_true", help="CPU seconds only, which a busy machine does not spoil"
    )
    parser.add_argument(
        "--seconds", type=float, default=60, help="of each of the four turns of --cpu"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model of two layers: there the runtime is what is measured",
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
    print(
        f"one snapshot of {options.streams} rows: {1e6 * took:.0f} us, {100 * took / TICK_S:.2f} % of a core"
    )
    flags = ("--cache-memory", "0", "--speculation", "off")
    with servers.trouper(model, *flags) as server, chromium(told=False) as browser:
        browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": FRAMES})
        report: Row = loads(browser, f"http://127.0.0.1:{server.port}/#server")
        print(
            f"cold loads, medians of {LOADS}: loaded after {report['loaded_s']:.2f} s, the first figures after "
            f"{report['shown_s']:.2f} s (slowest {report['slowest_shown_s']:.2f} s)"
        )
        time.sleep(LOADED_S)
        browser.driver.switch_to.new_window("tab")
        windows = trio.run(toggled, server, browser, options)
        browser.driver.switch_to.window(browser.driver.window_handles[0])
        ahead_s = time.time() - time.perf_counter()
        frames = [one - ahead_s for one in browser.run("return painted")]
    report |= {"frames": frames, "windows": [attrs.asdict(one) for one in windows]}
    shown = [one for place, one in enumerate(windows) if place % 4 in (1, 2)]
    painted = sum(one.begun <= frame <= one.ended for one in shown for frame in frames)
    added = [one for each in shown for one in each.added(frames)]
    return report | say(
        options.streams,
        fours(windows),
        added,
        painted / sum(one.ended - one.begun for one in shown),
    )


if __name__ == "__main__":
    main()
