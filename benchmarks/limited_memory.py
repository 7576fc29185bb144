"""`just bench-limited`: mixed requests on a server whose memory for KV is a tenth of what they
would hold, through HTTP.

Three runs of the same requests: without a limit; with it; with it and `kill -9` when half of the
answers have come, after which the next server gets the requests that were not answered. The bytes
of rows and cached blocks are looked at in the server, after each step of the engine. The model has
two layers and the embedded model's vocabulary, unless `--model` names one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio
from rich.console import Console

from benchmarks import load, servers
from benchmarks.long_rows import token_bytes_of, tokens
from trouper.system.ports import free_ports
from trouper_lab.load import Stream

FLAGS = (
    "--first-token-timeout-s",
    "0",
    "--queue-timeout-s",
    "0",
    "--max-queue-size",
    "1000",
    "--speculation",
    "off",
    "--self-check",
    "fast",
    "--completion-batch-size",
    "200",
)
TENTH = 10


@attrs.frozen
class Wish:
    number: int
    prompt: int
    answer: int


@attrs.define
class Run:
    """What came back."""

    answered: dict[int, Stream] = attrs.field(factory=dict)
    failed: dict[int, str] = attrs.field(factory=dict)
    seconds: float = 0.0


def wishes(count: int, longest: int) -> list[Wish]:
    """Lengths of prompts are spread evenly over orders of magnitude."""
    dice = random.Random(5)
    return [
        Wish(number, int(100 * (longest / 100) ** dice.random()), dice.randint(20, 200))
        for number in range(count)
    ]


async def ask(port: int, wish: Wish, run: Run) -> None:
    one = Stream()
    prompt: Any = tokens(wish.prompt, wish.number)
    try:
        await load.stream(port, prompt, wish.answer, one, ignore_eos=True)
    except (OSError, RuntimeError, trio.BrokenResourceError) as error:
        run.failed[wish.number] = repr(error)
        return
    if one.tokens == wish.answer:
        run.answered[wish.number] = one
    else:
        run.failed[wish.number] = f"{one.tokens} of {wish.answer} tokens"


async def ask_all(
    server: servers.Server, wanted: list[Wish], run: Run, *, kill_after: int | None = None
) -> None:
    began = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for wish in wanted:
            nursery.start_soon(ask, server.port, wish, run)
        if kill_after is not None:
            while len(run.answered) < kill_after:  # noqa: ASYNC110 - answers come from many tasks.
                await trio.sleep(0.02)
            server.process.kill()
    run.seconds += time.perf_counter() - began


@contextmanager
def watched(model: Path, report: Path, disk: Path, *flags: str) -> Iterator[servers.Server]:
    """A server that writes the largest bytes of rows and blocks to `report`."""
    [port] = free_ports(1)
    command = [
        sys.executable,
        "-m",
        "benchmarks.watched_server",
        str(report),
        "serve",
        "--model",
        str(model),
        "--port",
        str(port),
        "--ssd-cache-dir",
        str(disk),
        *FLAGS,
        *flags,
    ]
    with servers.serving("trouper", command, port) as server:
        yield server


def preemptions(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return int(
        sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("vllm:num_preemptions_total")
        )
    )


def row_of(run: Run, report: Path, limit: int | None) -> dict[str, Any]:
    seen = json.loads(report.read_text())
    made = sum(one.tokens for one in run.answered.values())
    return {
        "answered": len(run.answered),
        "failed": len(run.failed),
        "seconds": run.seconds,
        "tokens_per_s": made / run.seconds,
        "ttft_median_s": statistics.median(one.ttft_s for one in run.answered.values()),
        "steps": seen["steps"],
        "largest_mb": seen["largest"] / 1e6,
        "limit_mb": None if limit is None else limit / 1e6,
        "of the limit": None if limit is None else seen["largest"] / limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--longest", type=int, default=7000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    console, rows = Console(), list[dict[str, Any]]()
    model = chosen.model or servers.tiny_copy(servers.embedded())
    wanted = wishes(chosen.requests, chosen.longest)

    def note(case: str, row: dict[str, Any]) -> None:
        rows.append({"case": case} | row)
        console.print(
            {
                key: round(value, 3) if isinstance(value, float) else value
                for key, value in rows[-1].items()
            }
        )
        if chosen.json:
            chosen.json.write_text(json.dumps(rows, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        report, disk, run = Path(folder) / "report.json", Path(folder) / "blocks", Run()
        with watched(model, report, disk, "--cache-memory", "0") as server:
            trio.run(ask_all, server, wanted, run)
        note("no limit", row_of(run, report, None))
        limit = (
            sum(wish.prompt + wish.answer for wish in wanted)
            * token_bytes_of(model, small=False)
            // TENTH
        )
        for kill in (False, True):
            shutil.rmtree(disk, ignore_errors=True)
            run, flags = Run(), ("--kv-memory", str(limit))
            with suppress(RuntimeError), watched(model, report, disk, *flags) as server:
                trio.run(
                    partial(
                        ask_all, server, wanted, run, kill_after=len(wanted) // 2 if kill else None
                    )
                )
                if not kill:
                    note(
                        "a tenth",
                        row_of(run, report, limit) | {"preemptions": preemptions(server.port)},
                    )
            if kill:
                lost = len(run.failed)
                run.failed.clear()
                with watched(model, report, disk, *flags) as server:
                    trio.run(
                        ask_all,
                        server,
                        [wish for wish in wanted if wish.number not in run.answered],
                        run,
                    )
                    note(
                        "a tenth, killed at half",
                        row_of(run, report, limit)
                        | {"lost": lost, "preemptions": preemptions(server.port)},
                    )


if __name__ == "__main__":
    main()
