"""`just bench`: Trouper against the bare loop and against mlx_lm.server, through HTTP, side by side
in one run."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import trio
from rich.console import Console
from rich.table import Table

from benchmarks import load, servers
from trouper_lab.load import Stream

Row = dict[str, Any]
Open = Callable[[], AbstractContextManager[servers.Server]]


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    return trio.run(partial(function, *arguments))


def rates(server: servers.Server, streams: int, tokens: int, seed: int) -> Row:
    """Throughput, first token, gaps and CPU of so many streams at once."""
    cpu = server.cpu_s()
    done = load.read_afterwards(
        server.port, [load.prompt(seed + k, 12) for k in range(streams)], tokens
    )
    gaps = [gap for one in done for gap in one.gaps_s]
    produced = sum(one.tokens for one in done)
    return {
        "tokens_per_s": load.throughput(done),
        "decode_tokens_per_s": load.decode_rate(done),
        "ttft_s": statistics.median(one.ttft_s for one in done),
        "gap_p50_s": load.quantile(gaps, 0.5),
        "gap_p99_s": load.quantile(gaps, 0.99),
        "gap_max_s": max(gaps),
        "cpu_ms_per_token": (server.cpu_s() - cpu) / produced * 1000,
        "tokens": produced,
        "prompt_tokens": statistics.median(one.prompt_tokens for one in done),
    }


async def long_prompt(port: int, seed: int) -> Row:
    """Four streams decode; a 600-word prompt arrives. The longest pause that one of them sees until
    it has its answer."""
    running = [Stream() for _ in range(4)]
    late = Stream()
    async with trio.open_nursery() as nursery:
        for k, one in enumerate(running):
            nursery.start_soon(load.stream, port, load.prompt(seed + k, 12), 100, one)
        # The streams only note times
        while not all(len(one.times) > 8 or one.tokens for one in running):  # noqa: ASYNC110
            await trio.sleep(0.02)
        await load.stream(
            port, " ".join(load.WORDS[(seed + k * 5) % 16] for k in range(600)), 4, late
        )
    gaps = [
        b - a
        for one in running
        for a, b in zip(one.times, one.times[1:], strict=False)
        if b > late.sent and a < late.times[0]
    ]
    return {"longest_gap_s": max(gaps), "late_ttft_s": late.ttft_s}


def idle(server: servers.Server, seconds: float = 10) -> float:
    """Per cent of a core while nobody asks, once starting is over."""
    time.sleep(10)
    before = server.cpu_s()
    time.sleep(seconds)
    return (server.cpu_s() - before) / seconds * 100


def growth(server: servers.Server, requests: int = 2000) -> Row:
    """Resident memory before and after so many short requests, after a warm-up of 200."""

    async def many(count: int) -> None:
        limiter = trio.CapacityLimiter(16)

        async def one(k: int) -> None:
            async with limiter:
                await load.stream(server.port, load.prompt(k, 3), 3, Stream())

        async with trio.open_nursery() as nursery:
            for k in range(count):
                nursery.start_soon(one, k)

    run(many, 200)
    before = server.resident_bytes()
    run(many, requests)
    return {"requests": requests, "growth_mb": (server.resident_bytes() - before) / 1e6}


def bare(model: Path, rows: int, prompt: int, tokens: int) -> Row:
    command = [
        sys.executable,
        "-m",
        "benchmarks.bare",
        "bare",
        str(model),
        str(rows),
        str(prompt),
        str(tokens),
    ]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(out.strip().splitlines()[-1]))


def compare(model: Path, streams: int, tokens: int, rounds: int, console: Console) -> Row:
    """Each round measures all three one after another, so that what else the machine does hits them
    alike."""
    results: dict[str, list[Row]] = {"bare": [], "trouper": [], "mlx_lm": []}
    for number in range(rounds):
        for name, opened in {
            "trouper": partial(servers.trouper, model),
            "mlx_lm": partial(servers.mlx_lm, model),
        }.items():
            with opened() as server:
                rates(server, streams, 8, seed=1000)
                results[name].append(rates(server, streams, tokens, seed=100 * number + streams))
        results["bare"].append(
            bare(model, streams, int(results["trouper"][-1]["prompt_tokens"]), tokens)
        )
        console.print(f"  {model.name}, {streams} streams, round {number + 1} of {rounds}")
    row: Row = {"model": model.name, "streams": streams}
    for name, runs in results.items():
        for key in runs[0]:
            row[f"{name}.{key}"] = statistics.median(run[key] for run in runs)
    pairs = list(zip(results["trouper"], results["mlx_lm"], results["bare"], strict=True))
    row["vs mlx_lm"] = statistics.median(t["tokens_per_s"] / m["tokens_per_s"] for t, m, _ in pairs)
    row["decode vs bare"] = statistics.median(
        t["decode_tokens_per_s"] / b["tokens_per_s"] for t, _, b in pairs
    )
    row["cpu beyond model ms"] = statistics.median(
        t["cpu_ms_per_token"] - b["cpu_ms_per_token"] for t, _, b in pairs
    )
    return row


def show(rows: list[Row], console: Console) -> None:
    columns = [
        "model",
        "streams",
        "bare.tokens_per_s",
        "trouper.tokens_per_s",
        "mlx_lm.tokens_per_s",
        "vs mlx_lm",
        "trouper.decode_tokens_per_s",
        "decode vs bare",
        "trouper.ttft_s",
        "mlx_lm.ttft_s",
        "trouper.gap_p50_s",
        "trouper.gap_p99_s",
        "trouper.gap_max_s",
        "mlx_lm.gap_max_s",
        "cpu beyond model ms",
    ]
    table = Table(*columns)
    for row in rows:
        table.add_row(
            *(f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns)
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["rates", "tiny", "long", "idle", "growth"], nargs="+")
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    wanted = set(options.only or ["rates", "tiny", "long", "idle", "growth"])
    console = Console(width=220)
    model = servers.float32_copy(servers.embedded())
    report: Row = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "rates": [],
    }
    if "rates" in wanted:
        report["rates"] += [
            compare(model, n, options.tokens, options.rounds, console) for n in options.streams
        ]
    if "tiny" in wanted:
        tiny = servers.tiny_copy(servers.embedded())
        report["rates"] += [
            compare(tiny, n, 4 * options.tokens, options.rounds, console) for n in options.streams
        ]
    if report["rates"]:
        show(report["rates"], console)
    if "long" in wanted:
        for name, opened in {
            "trouper": partial(servers.trouper, model),
            "mlx_lm": partial(servers.mlx_lm, model),
        }.items():
            with opened() as server:
                report[f"long prompt, {name}"] = [
                    run(long_prompt, server.port, 50 * k) for k in range(options.rounds)
                ]
            console.print(
                f"a 600-word prompt among 4 streams, {name}: {report[f'long prompt, {name}']}"
            )
    with servers.trouper(model) as server:
        if "idle" in wanted:
            report["idle_cpu_percent"] = idle(server)
            console.print(f"idle: {report['idle_cpu_percent']:.2f} % of a core")
        if "growth" in wanted:
            report["growth"] = growth(server)
            console.print(
                f"after {report['growth']['requests']} short requests: "
                f"{report['growth']['growth_mb']:+.1f} MB resident"
            )
    options.out.write_text(json.dumps(report, indent=1))
    console.print(f"written to {options.out}")


main()
