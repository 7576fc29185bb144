"""`just bench-edge`: what the event loop costs a token: the CPU time of its thread over the tokens
of so many streams, through HTTP.

The model has two layers, so that the device is no limit. The clients run in processes of their own
(`--clients`), and report the rate; the figure of the loop is the server's own thread time, so that
a busy machine changes it little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from benchmarks import load, servers
from trouper_lab.load import Stream

Row = dict[str, Any]


def thread_cpu_s(pid: int) -> dict[int, float]:
    """CPU seconds of each thread of a process, from /proc."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            ran_ns = int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError):
            continue
        found[int(task.name)] = ran_ns / 1e9
    return found


def _together(port: int, first: int, count: int, tokens: int, model: str | None) -> list[Stream]:
    texts = [load.prompt(first + k, 12) for k in range(count)]
    return load.read_afterwards(
        port, texts, tokens, ignore_eos=True, **{"model": model} if model else {}
    )


def client() -> None:
    """One process of clients: for each line `PORT FIRST COUNT TOKENS MODEL`, in JSON, it prints
    tokens and the seconds that they took."""
    for line in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        done = _together(*json.loads(line))
        seconds = time.perf_counter() - began
        times = [(one.times, one.tokens) for one in done]
        report = {
            "seconds": seconds,
            "cpu_share": (time.process_time() - used) / seconds,
            "times": times,
        }
        print(json.dumps(report), flush=True)


class Clients:
    """Processes of clients, which wait for work: to start one takes seconds on some machines,
    longer than what is measured."""

    def __init__(self, processes: int) -> None:
        command = [sys.executable, "-m", "benchmarks.edge", "--client"]
        self._running = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(processes)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.communicate()

    def together(self, server: servers.Server, streams: int, tokens: int, seed: int) -> list[Row]:
        """What each process reports that had a part of the streams."""
        count = len(self._running)
        parts = [
            (process, streams // count + (k < streams % count))
            for k, process in enumerate(self._running)
        ]
        working = [(process, part) for process, part in parts if part]
        for k, (process, part) in enumerate(working):
            assert process.stdin
            process.stdin.write(
                json.dumps((server.port, seed + 1000 * k, part, tokens, server.model)) + "\n"
            )
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process, _ in working if process.stdout]


def measure(server: servers.Server, streams: int, tokens: int, clients: Clients, seed: int) -> Row:
    before, began = thread_cpu_s(server.process.pid), time.perf_counter()
    reports = clients.together(server, streams, tokens, seed)
    seconds = time.perf_counter() - began
    after = thread_cpu_s(server.process.pid)
    used = {thread: after[thread] - before.get(thread, 0.0) for thread in after}
    made = [
        Stream(times=times, tokens=count) for report in reports for times, count in report["times"]
    ]
    produced = sum(one.tokens for one in made)
    loop = used.pop(server.process.pid)
    return {
        "streams": streams,
        "loop_us_per_token": loop / produced * 1e6,
        "loop_share": loop / seconds,
        "other_us_per_token": sum(used.values()) / produced * 1e6,
        "decode_tokens_per_s": load.decode_rate(made),
        "fewest_tokens": min(one.tokens for one in made),
        "client_share": max(report["cpu_share"] for report in reports),
    }


def main() -> None:
    if sys.argv[1:] == ["--client"]:
        client()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=1, help="processes of clients")
    parser.add_argument("--model", help="default: two layers with the embedded model's vocabulary")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    model, console, made = (
        Path(chosen.model) if chosen.model else servers.tiny_copy(servers.embedded()),
        Console(),
        list[Row](),
    )
    flags = ("--completion-batch-size", "128", "--max-queue-size", "1024")
    with Clients(chosen.clients) as clients, servers.trouper(model, *flags) as server:
        measure(server, max(chosen.streams), 16, clients, 1)
        for streams in chosen.streams:
            rounds = [
                measure(server, streams, chosen.tokens, clients, 7 * n + streams)
                for n in range(chosen.rounds)
            ]
            row = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
            made.append(row)
            console.print(
                {
                    key: round(value, 3) if isinstance(value, float) else value
                    for key, value in row.items()
                }
            )
    if chosen.json:
        chosen.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
