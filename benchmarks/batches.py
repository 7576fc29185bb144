"""What a running batch costs an online stream: its first token and the time between its tokens,
with and without a batch, in turns.

python -m benchmarks.batches --rounds 7 --batch-rows 8

The server is one process with --model, or the embedded model; the client is this one. Each round
measures one stream alone and one while requests of a batch run. Medians, and the ratio of each with
a batch to without.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import httpx2

RUN = "from trouper.cli import main; main()"
TOKENS = 32


def stream(client: httpx2.Client, number: int) -> tuple[float, float]:
    """Seconds until the first token, and median milliseconds between tokens."""
    body = {
        "prompt": f"Number {number}: once upon a time",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    began = time.perf_counter()
    with client.stream("POST", "/v1/completions", json=body) as response:
        times = [
            time.perf_counter() for line in response.iter_lines() if line.startswith("data: {")
        ]
    gaps = [after - before for before, after in pairwise(times)]
    return times[0] - began, 1000 * median(gaps)


def begin_batch(client: httpx2.Client, requests: int, tokens: int) -> str:
    lines = [
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Of batch {number}", "max_tokens": tokens, "ignore_eos": True},
        }
        for number in range(requests)
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
    file = client.post("/v1/files", **form).raise_for_status().json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(client.post("/v1/batches", json=body).raise_for_status().json()["id"])


def wait_for_rows(client: httpx2.Client, rows: int) -> None:
    while client.get("/health").json()["cache_stats"]["active_sequences"] != rows:
        time.sleep(0.05)


def measure(
    client: httpx2.Client, options: argparse.Namespace
) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {"alone": [], "with a batch": []}
    stream(client, 0)
    for number in range(1, options.rounds + 1):
        found["alone"].append(stream(client, number))
        batch = begin_batch(client, 4 * options.batch_rows, options.batch_tokens)
        wait_for_rows(client, options.batch_rows)
        found["with a batch"].append(stream(client, -number))
        client.post(f"/v1/batches/{batch}/cancel").raise_for_status()
        wait_for_rows(client, 0)
        print(
            number,
            *(f"{name}: {one[-1][0]:.3f} s, {one[-1][1]:.1f} ms" for name, one in found.items()),
            flush=True,
        )
    return found


def main(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as directory:
        flags = ["--port", "0", "--no-ssd", "--batch-dir", str(Path(directory) / "batches")]
        flags += [
            "--batch-rows",
            str(options.batch_rows),
            *(["--model", options.model] if options.model else []),
        ]
        command = [sys.executable, "-c", RUN, "serve", *flags]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as server:
            try:
                assert server.stdout is not None
                url = "http" + server.stdout.readline().partition("http")[2].split()[0].rstrip("/")
                with httpx2.Client(base_url=url.removesuffix("/v1"), timeout=600) as client:
                    found = measure(client, options)
            finally:
                server.kill()
    alone, beside = (
        [median(column) for column in zip(*found[name], strict=True)] for name in found
    )
    for name, one, other in zip(
        ("first token, s", "between tokens, ms"), alone, beside, strict=True
    ):
        print(
            f"{name:20} alone {one:8.3f}   with {options.batch_rows} rows of a batch {other:8.3f}  "
            f" {other / one:.2f}"
        )


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--model", help="nothing: the embedded model")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--batch-rows", type=int, default=8)
    arguments.add_argument(
        "--batch-tokens", type=int, default=1000, help="tokens of each answer of the batch"
    )
    main(arguments.parse_args())
