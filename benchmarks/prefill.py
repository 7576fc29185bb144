"""`just bench-prefill [bursts|beside]`: prompts that arrive at once; a long prompt beside streams.

bursts: `ROWSxTOKENS` prompts sent at once, through HTTP; one prompt of as many tokens (several, one
after another, where the context is shorter); and a bare loop over as many tokens, in turns: prompt
tokens a second until the last first token, and the server's processor time for a token of each.
beside: one prompt of `--long` tokens beside `--streams` streams, for each `--stall-ms`: its first
token, the streams' typical and longest gap while it prefills, and their pace, 1 before.
A model is made with random weights (`--shape 4b`), or given (`--model DIR`); default: the embedded
one. Prompts share nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from benchmarks import load, servers
from benchmarks.long_rows import FLAGS, intervals, tokens, until
from trouper_lab.load import Stream

Row = dict[str, Any]
BARE = "from benchmarks.prefill import {0}; {0}()"
CHUNK = 2048
"""Tokens of a bare pass, as of `--prefill-step-size`."""
SETTLED = 40
"""Tokens of each stream before the long prompt comes."""


# -- bare loops, in processes of their own -------------------------------------------------------


def bare_mlx() -> None:
    """Prefill a prompt of as many tokens as each line of standard input says; print seconds."""
    import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

    # isort: split
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from benchmarks.bare import loaded

    model = loaded(sys.argv[1])
    for line in sys.stdin:
        prompt = mx.array([tokens(int(line), time.perf_counter_ns())])
        began, cache = time.perf_counter(), make_prompt_cache(model)
        for start in range(0, prompt.shape[1] - 1, CHUNK):
            model(prompt[:, start : min(start + CHUNK, prompt.shape[1] - 1)], cache=cache)
            mx.eval([layer.state for layer in cache])
        mx.argmax(model(prompt[:, -1:], cache=cache)[:, -1], -1).item()
        print(time.perf_counter() - began, flush=True)


def bare_torch() -> None:
    """As `bare_mlx`, with transformers' Qwen3 and random weights; needs torch and a GPU."""
    import torch  # type: ignore[import-not-found]
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    config = AutoConfig.from_pretrained(sys.argv[1])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        for line in sys.stdin:
            prompt = torch.tensor([tokens(int(line), time.perf_counter_ns())]).cuda()
            torch.cuda.synchronize()
            began, cache = time.perf_counter(), DynamicCache()
            for start in range(0, prompt.shape[1], CHUNK):
                chunk = prompt[:, start : start + CHUNK]
                out = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1)
            out.logits[:, -1].argmax(-1).item()
            print(time.perf_counter() - began, flush=True)


class Loop:
    """A bare loop's process, which waits for numbers of tokens."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds(self, count: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(count, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


@contextmanager
def loop(name: str, model: Path, gpu: str | None = None) -> Iterator[Loop]:
    command = [sys.executable, "-c", BARE.format(name), str(model)]
    own = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | own
    ) as process:
        yield Loop(process)
        assert process.stdin is not None
        process.stdin.close()


# -- bursts --------------------------------------------------------------------------------------


async def _ask(port: int, ids: Any, stream: Stream, answer: int = 1) -> None:
    """Notes an end, too: random weights also write tokens without text."""
    await load.stream(port, ids, answer, stream, ignore_eos=True)
    stream.times.append(time.perf_counter())


async def burst(port: int, rows: int, count: int, seed: int) -> list[float]:
    """Seconds from the first request to each first token."""
    prompts = [tokens(count, seed * 1000 + row) for row in range(rows)]
    streams = [Stream() for _ in range(rows)]
    async with trio.open_nursery() as nursery:
        for ids, stream in zip(prompts, streams, strict=True):
            nursery.start_soon(_ask, port, ids, stream)
    began = min(stream.sent for stream in streams)
    return sorted(stream.times[0] - began for stream in streams)


def play_bursts(flags: argparse.Namespace, model: Path) -> list[Row]:
    made = []
    with servers.trouper(model, *FLAGS) as server, loop("bare_mlx", model, flags.bare_gpu) as mlx:
        server.settle()
        for rows, count in flags.bursts:
            row = measure_burst(
                server, mlx, rows, count, rounds=flags.rounds, context=context_of(model)
            )
            print(json.dumps(row), flush=True)
            made.append(row)
        if flags.torch:
            with loop("bare_torch", model) as torch_loop:
                for row in made:
                    total = row["rows"] * row["tokens"]
                    times = [torch_loop.seconds(total) for _ in range(flags.rounds + 1)][1:]
                    row["torch"] = round(total / statistics.median(times))
                    print(json.dumps(row), flush=True)
    return made


def context_of(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["max_position_embeddings"])


def measure_burst(
    server: servers.Server, mlx: Loop, rows: int, count: int, *, rounds: int, context: int
) -> Row:
    port, total, bursts, alone, bare = server.port, rows * count, [], [], []
    prompts = -(-total // (context - 2))
    used = {"burst": 0.0, "alone": 0.0}
    for round_ in range(rounds + 1):
        began = server.cpu_s()
        bursts.append(trio.run(burst, port, rows, count, 100 * round_ + 1))
        burst_ended = server.cpu_s()
        seeds = range(100 * round_ + 2, 100 * round_ + 2 + prompts)
        alone.append(sum(trio.run(burst, port, 1, total // prompts, seed)[0] for seed in seeds))
        if round_:
            used["burst"] += burst_ended - began
            used["alone"] += server.cpu_s() - burst_ended
        bare.append(sum(mlx.seconds(total // prompts) for _ in range(prompts)))
    # The first turn warms all up.
    last = statistics.median(times[-1] for times in bursts[1:])
    first = statistics.median(times[0] for times in bursts[1:])
    one, loop_s = statistics.median(alone[1:]), statistics.median(bare[1:])
    return {
        "rows": rows,
        "tokens": count,
        "burst": round(total / last),
        "alone": round(total / one),
        "bare": round(total / loop_s),
        "burst_of_alone": round(one / last, 2),
        "alone_of_bare": round(loop_s / one, 2),
        "prompts_alone": prompts,
        **{f"{name}_cpu_ms": round(1e3 * s / rounds / total, 3) for name, s in used.items()},
        "first_s": round(first, 3),
        "last_s": round(last, 3),
    }


# -- a long prompt beside streams ----------------------------------------------------------------


async def beside(port: int, streams: int, long: int, seed: int) -> Row:
    async with trio.open_nursery() as nursery:
        others = [Stream() for _ in range(streams)]
        for index, stream in enumerate(others):
            ids = tokens(100, seed * 1000 + index)
            nursery.start_soon(_ask, port, ids, stream, 60_000)
        await until(others, SETTLED)
        start = time.perf_counter()
        await until(others, 3 * SETTLED)
        before = intervals(others, start, time.perf_counter())
        asked = Stream()
        await _ask(port, tokens(long, seed * 1000 + 999), asked)
        stop = asked.times[0]
        meanwhile = intervals(others, asked.sent, stop)
        nursery.cancel_scope.cancel()
    share = (len(meanwhile) / (stop - asked.sent)) / (streams / statistics.mean(before))
    return {
        "first_token_s": round(stop - asked.sent, 3),
        "typical_gap_s": round(statistics.median(meanwhile or [stop - asked.sent]), 3),
        "longest_gap_s": round(max(meanwhile, default=stop - asked.sent), 3),
        "pace": round(share, 2),
    }


def play_beside(flags: argparse.Namespace, model: Path) -> list[Row]:
    made = []
    for stall_ms in flags.stall_ms:
        with servers.trouper(model, *FLAGS, "--decode-stall-ms", str(stall_ms)) as server:
            server.settle()
            runs = [
                trio.run(beside, server.port, flags.streams, flags.long, seed)
                for seed in range(flags.rounds + 1)
            ]
        row: Row = {"stall_ms": stall_ms, "streams": flags.streams, "long": flags.long}
        for name in runs[0]:
            row[name] = statistics.median(run[name] for run in runs[1:] or runs)
        row["load"] = round(os.getloadavg()[1], 1)
        print(json.dumps(row), flush=True)
        made.append(row)
    return made


def _burst(text: str) -> tuple[int, int]:
    rows, count = text.split("x")
    return int(rows), int(count)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="just bench-prefill", description=__doc__)
    parser.add_argument("part", choices=("bursts", "beside"), nargs="?", default="bursts")
    parser.add_argument("--model")
    parser.add_argument("--shape", help="random weights of this shape of models.py")
    parser.add_argument("--tokenizer", help="a directory, for --shape")
    parser.add_argument("--bits", type=int, default=16)
    parser.add_argument(
        "--bursts", type=_burst, nargs="+", default=[(31, 330), (128, 100), (8, 2000)]
    )
    parser.add_argument(
        "--bare-gpu", help="index of the bare loop's own GPU, for prompts that need the memory"
    )
    parser.add_argument("--torch", action="store_true", help="transformers on a GPU, too")
    parser.add_argument("--streams", type=int, default=15)
    parser.add_argument("--long", type=int, default=6000)
    parser.add_argument("--stall-ms", type=float, nargs="+", default=[50, 250, 1000])
    parser.add_argument("--rounds", type=int, default=3, help="beside the first, which warms up")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args(arguments)
    if flags.shape:
        model = servers.random_model(flags.shape, flags.bits, flags.tokenizer)
    else:
        model = Path(flags.model) if flags.model else servers.embedded()
    play = play_bursts if flags.part == "bursts" else play_beside
    made = play(flags, model)
    if flags.json:
        flags.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
