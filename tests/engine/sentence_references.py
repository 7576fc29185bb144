"""Cosines and scores of 50 pairs of texts by sentence-transformers.

`PYTHONPATH=. python3 tests/engine/sentence_references.py OUTDIR` needs what `encoder_references.py`
needs and sentence-transformers, and writes OUTDIR/sentence_references.json, whose home is beside
this file. Both sides read the same directories, tokenizer and all.
"""

# ruff: noqa: T201
from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from tests.encoder_tokenizers import WORDS, save_wordpiece
from tests.engine.encoder_references import CONFIGS, VOCABULARY, save_encoder, weights_of

FILE = "sentence_references.json"
EMBEDDER, SCORER = "bert", "bert scores"
QUERY = "what is the capital of france ?"
LONGEST = 20
"""As many as fit a pair into the positions of the tiny encoders."""


def documents() -> list[str]:
    """50 texts of 1 to 20 words. With this seed neighbours in either order are 1e-4 apart."""
    drawn = Random(22)
    words = [word for word in WORDS if word.isalpha()]  # The others are many tokens each.
    return [" ".join(drawn.choices(words, k=1 + at * LONGEST // 50)) for at in range(50)]


def save_embedder(directory: Path) -> Path:
    save_encoder(directory, CONFIGS[EMBEDDER], weights_of(EMBEDDER), "mean")
    return save_wordpiece(directory, VOCABULARY)


def save_scorer(directory: Path) -> Path:
    save_encoder(directory, CONFIGS[SCORER], weights_of(SCORER))
    return save_wordpiece(directory, VOCABULARY)


def smallest_distance(scores: list[float]) -> float:
    """Between neighbours in the order."""
    ordered = sorted(scores)
    return min(after - before for before, after in pairwise(ordered))


def main(out: Path) -> None:
    import sentence_transformers  # type: ignore[import-not-found]

    texts = documents()
    embedder = sentence_transformers.SentenceTransformer(
        str(save_embedder(out / "embedder")), device="cpu"
    )
    query, *vectors = embedder.encode([QUERY, *texts]).tolist()
    cosines = [sum(a * b for a, b in zip(query, each, strict=True)) for each in vectors]
    scorer = sentence_transformers.CrossEncoder(str(save_scorer(out / "scorer")), device="cpu")
    scores = scorer.predict([(QUERY, text) for text in texts]).tolist()
    distances = [f"{smallest_distance(each):.1e}" for each in (cosines, scores)]
    print(f"smallest distance of cosines, of scores: {', '.join(distances)}")
    written: dict[str, Any] = {
        "versions": {"sentence-transformers": sentence_transformers.__version__},
        "vectors": [[round(value, 6) for value in each] for each in (query, *vectors)],
        "cosines": cosines,
        "scores": scores,
    }
    (out / FILE).write_text(json.dumps(written))
    print(f"{out / FILE}: copy it into {Path(__file__).parent}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python3 tests/engine/sentence_references.py OUTDIR")
    main(Path(sys.argv[1]))
