"""`just bench-long-context`: a conversation over a prompt of 100,000 tokens, through HTTP, with a
tiny random model whose context is 131,072.

- `turns`: seconds to the first token of the cold prompt, of five further turns (from memory), and
  of the next turn after a restart (from SSD, with the system's page cache dropped).
- `scheduler`: microseconds that the scheduler's core takes for a decode step, at 1,000 and at
  100,000 tokens of context.
- `restore`: GB/s of a restore from disk, stage by stage, against the disk's own rate for the same
  files and against one memory copy.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from benchmarks import load, servers
from benchmarks.cache import health, report, until_written
from trouper_lab.load import Stream

Row = dict[str, Any]
CONTEXT = 131_072
CONFIG = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
"""2 KB of KV a token in float32: small enough that 100,000 tokens prefill in minutes on two
cores."""
LARGE = {
    **CONFIG,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
"""147 KB of KV a token, as a 4B model in bfloat16 has."""
LARGE_TOKENS = 2500
FLAGS = ("--max-prompt-tokens", str(CONTEXT), "--first-token-timeout-s", "0", "--self-check", "off")
PIECE_BYTES = 2**22
KEYS = "ttft_s", "cpu_s"


def text(tokens: int, seed: int) -> str:
    """Letters and blanks of about this many tokens: the tokenizer has single letters, and pairs
    that begin with a blank, e, t, a, o."""
    dice = random.Random(seed)
    words = (
        "".join(dice.choices("bcdfghklmnpqrs", k=dice.randint(2, 9)))
        for _ in range(tokens * 2 // 11)
    )
    return " ".join(words)


# -- the conversation ----------------------------------------------------------------------------


def turn(server: servers.Server, prompt: str, tokens: int = 32) -> Row:
    """One answer: seconds to its first token, CPU seconds of the whole turn (which other processes
    slow down less), tokens of its prompt."""
    stream, cpu_began = Stream(), server.cpu_s()
    trio.run(partial(load.stream, server.port, prompt, tokens, stream, ignore_eos=True))
    return {
        "ttft_s": stream.ttft_s,
        "cpu_s": server.cpu_s() - cpu_began,
        "prompt_tokens": stream.prompt_tokens,
    }


def turns(config: dict[str, Any], tokens: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        model, disk = Path(folder) / "model", Path(folder) / "blocks"
        servers.run_code(
            f"from benchmarks.models import save_config; save_config({config!r}, {str(model)!r})"
        )
        prompt = text(tokens, 1)
        row = from_memory(model, disk, prompt) | from_disk(model, disk, prompt)
    cold, warm, ssd = row["cold"], median_of(row["further"]), median_of(row["ssd"])
    ratios = {
        f"{name} / cold, {key}": one[key] / cold[key]
        for name, one in (("warm", warm), ("ssd", ssd))
        for key in KEYS
    }
    restored = row["ssd_bytes"] / 1e9
    return (
        row
        | ratios
        | {f"restored GB/s, {key}": restored / max(ssd[key] - warm[key], 1e-9) for key in KEYS}
    )


def median_of(rows: list[Row]) -> Row:
    return {key: statistics.median(row[key] for row in rows) for key in KEYS}


def from_memory(model: Path, disk: Path, prompt: str) -> Row:
    with servers.trouper(model, *FLAGS, disk=disk) as server:
        # Speeds are measured: a server that has just started is careful.
        turn(server, text(500, 2))
        cold = turn(server, prompt)
        further = [turn(server, longer(prompt, number)) for number in range(1, 6)]
        until_written(server.port)
    return {"cold": cold, "further": further}


def longer(prompt: str, further_turns: int) -> str:
    return " ".join([prompt, *(text(60, 10 + number) for number in range(further_turns))])


def from_disk(model: Path, disk: Path, prompt: str, rounds: int = 3) -> Row:
    """The turn after a restart. Each round begins with an empty page cache."""
    rows, nbytes = [], 0
    for number in range(rounds):
        forget(files_of(disk))
        with servers.trouper(model, *FLAGS, disk=disk) as server:
            turn(server, text(500, 3))
            rows.append(turn(server, longer(prompt, 5) + f" and {number}"))
            nbytes = health(server.port)["directory"]["read_bytes"]
    return {"ssd": rows, "ssd_bytes": nbytes}


# -- the scheduler -------------------------------------------------------------------------------


def scheduler(tokens: int) -> Row:
    """Microseconds of a step of the core, without the engine: the median and the mean over an
    answer."""
    from tests.core.driving import DrivenCore

    rows: Row = {}
    for length in (1000, tokens):
        core = DrivenCore()
        core.arrive(length, max_tokens=2000)
        core.until_decoding()
        times = [core.timed_step() for _ in range(1500)]
        rows[f"{length} tokens"] = {
            "median_us": statistics.median(times) * 1e6,
            "mean_us": statistics.fmean(times) * 1e6,
            "longest_us": max(times) * 1e6,
        }
    return rows


# -- restoring -----------------------------------------------------------------------------------


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.safetensors"))


def forget(files: Iterable[Path]) -> None:
    """Drop files from the system's page cache, where it can be told to."""
    if not hasattr(os, "posix_fadvise"):
        return
    os.sync()
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def rate(
    nbytes: int, work: Callable[[], object], before: Callable[[], object] = lambda: None
) -> Row:
    """GB a second, and GB a second of CPU time, which other processes slow down less: the medians
    of three runs."""
    seconds, cpu_seconds = [], []
    for _ in range(3):
        before()
        began, cpu_began = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    gigabytes = nbytes / 1e9
    return {
        "wall": gigabytes / statistics.median(seconds),
        "cpu": gigabytes / statistics.median(cpu_seconds),
    }


def read_plainly(files: Iterable[Path]) -> None:
    """As `dd bs=4M` does."""
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.read(PIECE_BYTES):
                pass


def restore(config: dict[str, Any], nbytes: int) -> Row:
    from benchmarks.restoring import Restoring

    with tempfile.TemporaryDirectory() as folder:
        restoring = Restoring(config, Path(folder), nbytes)
        nbytes, files = restoring.nbytes, files_of(Path(folder))
        drop = partial(forget, files)
        source = np.ones(nbytes, np.uint8)
        target = np.zeros_like(source)

        def evicted() -> None:
            restoring.evict()
            drop()

        rates = {
            "disk, plain reads": rate(nbytes, partial(read_plainly, files), drop),
            "disk to verified blocks": rate(nbytes, restoring.read, drop),
            "disk to the engine, run by run": rate(nbytes, restoring.stream, evicted),
            "blocks to the engine": rate(nbytes, restoring.load, restoring.evict),
            "blocks to a row": rate(nbytes, restoring.restore, restoring.drop),
            "memory copy": rate(nbytes, partial(np.copyto, target, source)),
            "memory copy into new memory": rate(nbytes, source.copy),
        }
    return {
        "GB": nbytes / 1e9,
        "files": len(files),
        "MB a block": restoring.block_bytes / 1e6,
        "GB/s": rates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--restored-bytes", type=int, default=10**9)
    parser.add_argument(
        "--only", nargs="+", help="turns, large turns, scheduler, restore, large restore"
    )
    parser.add_argument("--out", type=Path, default=Path("bench-long-context.json"))
    options = parser.parse_args()
    work: dict[str, Callable[[], Row]] = {
        "scheduler": partial(scheduler, options.tokens),
        "turns": partial(turns, CONFIG, options.tokens),
        "large turns": partial(turns, LARGE, LARGE_TOKENS),
        "restore": partial(restore, CONFIG, options.restored_bytes),
        "large restore": partial(restore, LARGE, options.restored_bytes),
    }
    report(work, options.only, options.out, tokens=options.tokens)


if __name__ == "__main__":
    main()
