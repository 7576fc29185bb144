"""Texts and pairs a second of an encoder through HTTP, in requests of many, beside torch's.

python -m benchmarks.encoders --python /path/to/a/venv/with/transformers/bin/python

Each round sends the texts to `/v1/embeddings`, then the pairs to `/v1/rerank`; the peer gets the
same texts, in passes of `--batch`, in turns. Models have random weights of a shape. The figures
are of wall time and of processor time, of the server's process and of the peer's; a server on a GPU
has the former alone. `TROUPER_WITHOUT=mlx_scalar_functions` is Trouper with MLX's own functions.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import httpx2

from benchmarks.models import ENCODERS, save_random_encoder
from benchmarks.servers import Server, trouper
from tests.encoder_tokenizers import WORDS

PEER = """
import json, sys, time, torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
embedder, reranker, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(embedder)
models = {
    "texts": AutoModel.from_pretrained(embedder).eval().to(device),
    "pairs": AutoModelForSequenceClassification.from_pretrained(reranker).eval().to(device),
}
for line in sys.stdin:
    kind, items = json.loads(line)
    wall, cpu = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        for start in range(0, len(items), batch):
            given = items[start : start + batch]
            columns = [given] if kind == "texts" else [list(each) for each in zip(*given)]
            encoded = tokenizer(*columns, padding=True, truncation=True, return_tensors="pt")
            encoded = encoded.to(device)
            output = models[kind](**encoded)
            if kind == "texts":
                mask = encoded["attention_mask"][..., None]
                (output.last_hidden_state * mask).sum(1).div(mask.sum(1)).cpu()
            else:
                output.logits.cpu()
    print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), flush=True)
"""


def texts(count: int, words: int, dice: random.Random) -> list[str]:
    """Each word is a token; two more come from the tokenizer."""
    return [" ".join(dice.choices(WORDS[:18], k=words - 2)) for _ in range(count)]


class Peer:
    """torch and transformers in a process of another interpreter."""

    def __init__(self, python: str, embedder: Path, reranker: Path, batch: int) -> None:
        self._process = subprocess.Popen(
            [python, "-c", PEER, str(embedder), str(reranker), str(batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, kind: str, items: list[Any]) -> tuple[float, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([kind, items]) + "\n")
        self._process.stdin.flush()
        wall, cpu = json.loads(self._process.stdout.readline())
        return wall, cpu

    def close(self) -> None:
        self._process.communicate()


def post(server: Server, path: str, body: dict[str, Any]) -> tuple[float, float]:
    """Wall and processor seconds of one request."""
    wall, cpu = time.perf_counter(), server.cpu_s()
    answer = httpx2.post(f"http://127.0.0.1:{server.port}{path}", json=body, timeout=1200)
    answer.raise_for_status()
    return time.perf_counter() - wall, server.cpu_s() - cpu


def main(options: argparse.Namespace) -> None:
    dice = random.Random(1)
    rates: dict[str, list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        embedder, reranker = scratch / "embedder", scratch / "reranker"
        save_random_encoder(options.shape, str(embedder))
        save_random_encoder(options.shape, str(reranker), scores=True)
        server = stack.enter_context(trouper(embedder, "--model", str(reranker)))
        peer = None
        if options.python:
            peer = Peer(options.python, embedder, reranker, options.batch)
            stack.callback(peer.close)
        for number in range(options.rounds + 1):
            inputs = texts(options.texts, options.words, dice)
            query, *documents = texts(options.pairs + 1, options.words // 2, dice)
            results = {
                "texts": post(server, "/v1/embeddings", {"model": str(embedder), "input": inputs}),
                "pairs": post(
                    server,
                    "/v1/rerank",
                    {"model": str(reranker), "query": query, "documents": documents},
                ),
            }
            if peer is not None:
                pairs = [[query, each] for each in documents]
                results["texts, torch"] = peer.seconds("texts", inputs)
                results["pairs, torch"] = peer.seconds("pairs", pairs)
            for name, seconds in results.items():
                if number:  # The first round warms up.
                    rates.setdefault(name, []).append(seconds)
    for name, measured in rates.items():
        count = options.texts if name.startswith("texts") else options.pairs
        wall, cpu = (median(column) for column in zip(*measured, strict=True))
        print(f"{name:14} {count / wall:8.1f} a second  {count / cpu:8.1f} a processor second")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--shape", choices=ENCODERS, default="bge-small")
    arguments.add_argument("--texts", type=int, default=512)
    arguments.add_argument("--pairs", type=int, default=100)
    arguments.add_argument("--words", type=int, default=100, help="tokens of a text")
    arguments.add_argument("--batch", type=int, default=16, help="texts of a pass of the peer")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--python", help="an interpreter with torch and transformers")
    main(arguments.parse_args())
