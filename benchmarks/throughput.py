"""`just bench-device`: how near the server comes to what the device can do, unattended, in one run.

For each shape (random weights) and number of streams, in tokens a second while all streams decode:
`bare`, the model and argmax; `batch`, mlx-lm's BatchGenerator; `engine`, Trouper in process;
`http`, Trouper; `mlx_lm`, its server, on a CPU with Trouper's products of vectors;
`vlm`, if named, mlx-vlm's own model and argmax, of a shape whose text is a module of mlx-vlm;
`mlx_lm_openblas` and `mlx_lm_installed`, if named, with OpenBLAS alone, and with the BLAS of MLX's
wheel, which is what a user has who installs it. With `http` come the CPU time of the event loop a
token, and the busiest process of the clients, which shows that the load generator is not the limit.
With `--busy` all servers are measured once more in each round, beside a process that takes one
core. On CUDA the loops of others run with MLX's own size of CUDA graphs.

`vllm_mlx` and `rapid_mlx`, if named, are servers of other packages, each by its BLAS as mlx_lm is
(`vllm_mlx_openblas`, `vllm_mlx_installed`). `--vllm-mlx PYTHON` and `--rapid-mlx PYTHON` are the
interpreters of their environments (Python 3.11 or later), which are no part of Trouper's:

    python3 -m venv /tmp/vllm-mlx && /tmp/vllm-mlx/bin/pip install vllm-mlx 'mlx[cpu]'
    scipy-openblas32 python3 -m venv /tmp/rapid-mlx && /tmp/rapid-mlx/bin/pip install rapid-mlx
    'mlx[cpu]' scipy-openblas32

Their older mlx-lm does not load the embedded model, whose layers have different bits: `--float32`
measures a copy in float32. vllm-mlx runs with `--continuous-batching`, unless one stream is all
that is measured: its help calls that flag slower for one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import isfinite
from pathlib import Path
from typing import IO, Any

import attrs
from rich.console import Console

from benchmarks import paired, peers, servers
from benchmarks.edge import Clients, measure

Row = dict[str, Any]
OTHERS = {"MLX_MAX_OPS_PER_BUFFER": "100", "MLX_MAX_MB_PER_BUFFER": "1000"}
"""MLX's own defaults on an H200, where Trouper sets others
(trouper/process.py)."""
SPARE = ("--buffer-cache", "8GB")
"""MLX keeps nearly all of a GPU's memory as buffers, so that another process on it finds none: the
bare loop of a 4B shape, 128 rows."""
LOOPS = ("bare", "vlm", "batch", "engine")
MLX_LM = {f"mlx_lm{suffix}": blas for suffix, blas in peers.SUFFIXES.items()}
"""mlx_lm.server by its BLAS."""
OTHER_SERVERS = (*MLX_LM, *peers.SUBJECTS)


class Loop:
    """A process of a loop, which loads the model once. That of the engine ends after each
    measurement: it keeps buffers and threads."""

    def __init__(self, name: str, model: Path, log: IO[str]) -> None:
        """`log`: gets what the process says on stderr. A pipe that nobody reads would be full some
        day."""
        self.name, self._log = name, log
        self._command = [sys.executable, "-m", "benchmarks.bare", name, str(model)]
        self._environment = os.environ if name == "engine" else OTHERS | os.environ
        self._process: subprocess.Popen[str] | None = None

    def measure(self, streams: int, prompt: int, tokens: int) -> Row:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=self._environment,
            )
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(f"{streams} {prompt} {tokens}\n")
        process.stdin.flush()
        if line := process.stdout.readline():
            if self.name == "engine":
                self.close()
            return dict(json.loads(line))
        self.close()
        self._log.seek(0)
        return {"error": self._log.read().strip().splitlines()[-1]}

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()
            self._process = None


@attrs.frozen
class Subjects:
    loops: dict[str, Loop]
    opened: dict[str, servers.Server]
    clients: Clients


def round_of(subjects: Subjects, chosen: argparse.Namespace, streams: int, seed: int) -> Row:
    row: Row = {}
    for name in chosen.subjects:
        if streams not in streams_of(name, chosen):
            continue
        if name in LOOPS:
            found = subjects.loops[name].measure(streams, chosen.prompt, chosen.tokens)
            row[name] = found.get("tokens_per_s", found.get("error"))
            continue
        found = measure(subjects.opened[name], streams, chosen.tokens, subjects.clients, seed)
        row[name] = rate(found, chosen.tokens)
        if name == "http":
            row |= {key: found[key] for key in ("loop_us_per_token", "client_share")}
    if chosen.busy:
        with busy_core():
            for name, server in subjects.opened.items():
                found = measure(server, streams, chosen.tokens, subjects.clients, seed)
                row[f"{name}, one core busy"] = rate(found, chosen.tokens)
    return row


def streams_of(name: str, chosen: argparse.Namespace) -> list[int]:
    """The numbers of streams with which a subject is measured."""
    return list((name in OTHER_SERVERS and chosen.others_at) or chosen.streams)


def rate(found: Row, tokens: int) -> float | str:
    """Of no round in which an answer ended early: the streams that are left are fewer, and the
    others' time is short."""
    fewest = found["fewest_tokens"]
    return (
        found["decode_tokens_per_s"]
        if fewest == tokens
        else f"an answer ended after {fewest} of {tokens} tokens"
    )


@contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def typical(found: Sequence[Any]) -> Any:
    """The median of the rounds that were measured; if there is none, the first round's error."""
    numbers = [one for one in found if isinstance(one, float) and isfinite(one)]
    return statistics.median(numbers) if numbers else found[0]


def ratios(rounds: Sequence[Row], name: str) -> list[float]:
    """Of the rounds in which both were measured."""
    pairs = [(row["http"], row[name]) for row in rounds]
    return [
        one / other for one, other in pairs if isinstance(other, float) and isfinite(one / other)
    ]


def summary(rounds: Sequence[Row]) -> Row:
    made = {key: typical([one[key] for one in rounds]) for key in rounds[0]}
    for name in ("bare", "vlm", *OTHER_SERVERS, "engine"):
        if isinstance(made.get(name), float) and isinstance(made.get("http"), float):
            made[f"http / {name}"] = made["http"] / made[name]
            if len(pairs := ratios(rounds, name)) > 2:
                made[f"http / {name}, by rounds"] = str(paired.interval(pairs))
    return made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["0.6b", "4b", "4b:4", "30b-a3b:4"],
        help="SHAPE or SHAPE:BITS",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument(
        "--subjects",
        nargs="+",
        choices=(*LOOPS, "http", *OTHER_SERVERS),
        default=("bare", "batch", "engine", "http", "mlx_lm"),
    )
    parser.add_argument("--prompt", type=int, default=50, help="tokens")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rounds-alone",
        type=int,
        help="rounds of one stream, which are short and differ; default: as --rounds",
    )
    parser.add_argument("--clients", type=int, default=6, help="processes of clients")
    parser.add_argument(
        "--tokenizer", help="directory of a tokenizer; default: the embedded model's"
    )
    parser.add_argument("--model", help="a checkpoint instead of shapes")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="a float32 copy of the embedded model instead of shapes",
    )
    for peer in peers.PEERS:
        parser.add_argument(
            peers.flag(peer),
            metavar="PYTHON",
            help="interpreter of an environment that has it (see above)",
        )
    parser.add_argument(
        "--others-at",
        type=int,
        nargs="+",
        metavar="STREAMS",
        help="measure other servers with these numbers of streams alone",
    )
    parser.add_argument(
        "--busy", action="store_true", help="measure beside a process that takes one core, too"
    )
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    for name in chosen.subjects:
        if name in peers.SUBJECTS and not getattr(chosen, peers.SUBJECTS[name][0]):
            parser.error(
                f"{name} needs {peers.flag(peers.SUBJECTS[name][0])} PYTHON, of an environment "
                "made as --help says"
            )
    if chosen.float32 and chosen.model:
        parser.error("--float32 is a copy of the embedded model: not with --model")
    return chosen


def open_servers(
    stack: ExitStack, chosen: argparse.Namespace, model: Path
) -> dict[str, servers.Server]:
    opened: dict[str, servers.Server] = {}
    flags: tuple[str, ...]
    if "http" in chosen.subjects:
        flags = (
            "--completion-batch-size",
            "128",
            "--max-queue-size",
            "1024",
            "--speculation",
            "off",
            *SPARE,
        )
        opened["http"] = stack.enter_context(servers.trouper(model, *flags))
    others = [name for name in chosen.subjects if name in OTHER_SERVERS]
    endless = stack.enter_context(peers.endless_copy(model)) if others else model
    flags = ("--decode-concurrency", "128", "--prompt-concurrency", "8")
    for name in others:
        if name in MLX_LM:
            other = servers.mlx_lm(endless, *flags, environment=OTHERS, blas=MLX_LM[name])
        else:
            python = getattr(chosen, peers.SUBJECTS[name][0])
            other = peers.serving(name, python, endless, max(chosen.streams))
        opened[name] = stack.enter_context(other)
    return opened


def main() -> None:
    chosen = arguments()
    if chosen.float32:
        chosen.model = servers.float32_copy(servers.embedded())
    console, made = Console(width=200), list[Row]()
    for shape in ["given"] if chosen.model else chosen.shapes:
        name, _, bits = shape.partition(":")
        model = (
            Path(chosen.model)
            if chosen.model
            else servers.random_model(name, int(bits or 16), chosen.tokenizer)
        )
        with ExitStack() as stack:
            loops = {
                name: Loop(name, model, stack.enter_context(tempfile.TemporaryFile("w+")))
                for name in chosen.subjects
                if name in LOOPS
            }
            for running in loops.values():
                stack.callback(running.close)
            opened = open_servers(stack, chosen, model)
            subjects = Subjects(loops, opened, stack.enter_context(Clients(chosen.clients)))
            for name, server in opened.items():
                measure(server, max(streams_of(name, chosen)), 16, subjects.clients, 1)
            for streams in chosen.streams:
                count = chosen.rounds_alone or chosen.rounds if streams == 1 else chosen.rounds
                rounds = [
                    round_of(subjects, chosen, streams, 100 * n + streams) for n in range(count)
                ]
                made.append({"shape": shape, "streams": streams, **summary(rounds)})
                console.print(
                    {k: round(v, 3) if isinstance(v, float) else v for k, v in made[-1].items()}
                )
                made[-1]["rounds"] = rounds
                if chosen.json:
                    chosen.json.write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
