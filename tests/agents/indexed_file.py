"""`just agents-file [--paragraphs N]`: Open WebUI indexes a file by Trouper's embedder.

The embedder has random weights, with which a text is next to itself. A file of several chunks is
uploaded as the page does it; asked with a chunk's text, Open WebUI must name that chunk first.
Printed: its chunks, and the requests for embeddings by status. The exit status is 1 if the file is
not indexed, if a chunk is not first, or if a request is refused.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path
from random import Random
from urllib.request import urlopen

from tests.agents.image_sessions import new_home
from tests.agents.open_webui import OpenWebUI
from tests.encoder_tokenizers import WORDS, save_wordpiece
from tests.engine.encoder_references import BERT, VOCABULARY, draw_bert, save_encoder
from tests.image_session import Server

LENGTH = 900
"""Characters of a paragraph: two of them are longer than a chunk of Open WebUI's."""
QUERIES = 20


def save_embedder(directory: Path) -> Path:
    config = BERT | {"max_position_embeddings": 512}
    save_encoder(directory, config, draw_bert(config), "mean")
    return save_wordpiece(directory, VOCABULARY)


def paragraphs(count: int) -> list[str]:
    drawn = Random(59)
    words = [word for word in WORDS if word.isalpha()]
    return [" ".join(drawn.choices(words, k=LENGTH))[:LENGTH].strip() for _ in range(count)]


def responses(url: str) -> dict[str, int]:
    """Of `/v1/embeddings`, by status."""
    with urlopen(url + "/metrics") as response:
        metrics = response.read().decode()
    line = r'^trouper_http_responses_total\{.*path="/v1/embeddings",status="(\d+)"\} (\S+)$'
    return {status: int(float(count)) for status, count in re.findall(line, metrics, re.MULTILINE)}


def faults_of(page: OpenWebUI, url: str, texts: list[str]) -> list[str]:
    """Index the texts as one file, and look for the first ones."""
    began = time.monotonic()
    try:
        collection = page.index("\n\n".join(texts))
    except ValueError as error:
        return [f"the file is not indexed: {error}; requests by status {responses(url)}"]
    seconds = time.monotonic() - began
    print(f"{len(texts)} chunks: {seconds:.1f} s, requests by status {responses(url)}", flush=True)
    nearest = [page.nearest(collection, text) for text in texts[:QUERIES]]
    is_first = [
        bool(chunks) and chunks[0] == text for text, chunks in zip(texts, nearest, strict=False)
    ]
    print(f"{sum(is_first)} of {len(is_first)} chunks come first, by their own text")
    refused = responses(url).keys() - {"200"}
    faults = [f"requests are refused: {responses(url)}"] if refused else []
    return faults if all(is_first) else [*faults, "a chunk does not come first"]


def main(count: int) -> int:
    with new_home() as home:
        embedder, log = save_embedder(home / "embedder"), home / "server-log"
        with (
            Server.running(home / "cache", log, also=(embedder,)) as server,
            OpenWebUI.running(server.url, home) as page,
        ):
            faults = faults_of(page, server.url, paragraphs(count))
    for fault in faults:
        print(f"fault: {fault}")
    return bool(faults)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="just agents-file")
    parser.add_argument("--paragraphs", type=int, default=1500)
    sys.exit(main(parser.parse_args().paragraphs))
