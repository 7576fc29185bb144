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


def requests_by_status(url: str) -> dict[str, int]:
    """Of `/v1/embeddings`, and as "texts" what they asked to embed."""
    with urlopen(url + "/metrics") as response:
        metrics = response.read().decode()
    print("\n".join(l for l in metrics.splitlines() if "http_resp" in l or "requests_total" in l))
    return {}


def main(count: int) -> int:
    texts = paragraphs(count)
    with (
        new_home() as home,
        Server.running(
            home / "cache", home / "server-log", also=(save_embedder(home / "embedder"),)
        ) as server,
        OpenWebUI.running(server.url, home) as page,
    ):
        print(requests_by_status(server.url))
        try:
            collection = page.index("\n\n".join(texts))
        finally:
            print(requests_by_status(server.url))
            print((home / "log").read_text()[-3000:])
        for text in texts[:QUERIES]:
            found = page.nearest(collection, text)
            print(found[0] == text, len(found))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="just agents-file")
    parser.add_argument("--paragraphs", type=int, default=8)
    sys.exit(main(parser.parse_args().paragraphs))
