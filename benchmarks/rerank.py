"""Rerank: pairs in one request beside the same pairs in requests one by one, and beside the model's
own pass over each prompt.

python -m benchmarks.rerank --pairs 100 --words 40

Each round has a query of its own, so that nothing but the instruction is cached from an earlier
one. One by one, the later requests of a round find the query's part of the prompt in the cache, as
those of a batch do, unless `--no-cache` says otherwise.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Sequence
from functools import partial
from statistics import median

import benchmarks.prepared  # noqa: F401 - OpenBLAS before MLX

# isort: split
import httpx2
import mlx.core as mx
import trio
from mlx_lm.models.cache import make_prompt_cache

from trouper import Runtime, ServerSettings, Settings, run_runtime
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.protocol.requests import ChatPrompt
from trouper.protocol.setting_fields import ByteSize
from trouper.web.openai.rerank import Pair, ScoringParameters, answer_tokens, pairs_to_generate
from trouper.web.server import serve_http

WORDS = [
    "river",
    "stone",
    "market",
    "engine",
    "garden",
    "window",
    "letter",
    "winter",
    "copper",
    "signal",
    "harbor",
    "bridge",
    "forest",
    "candle",
    "paper",
    "mirror",
]


def texts(count: int, words: int, dice: random.Random) -> list[str]:
    """Texts of half as many to one and a half times as many words."""
    return [
        " ".join(dice.choices(WORDS, k=dice.randint(words // 2, words * 3 // 2)))
        for _ in range(count)
    ]


def direct(
    loaded: EvaluatedModel, query: str, documents: Sequence[str]
) -> tuple[float, list[float]]:
    """Seconds and scores of the model alone: one pass over each prompt."""
    tokenizer = loaded.tokenizer
    yes, no = answer_tokens(tokenizer)
    began, scores = time.perf_counter(), []
    for generate in pairs_to_generate(
        [Pair(query, one) for one in documents], ScoringParameters(), "", (yes, no)
    ):
        assert isinstance(generate.prompt, ChatPrompt)
        prompt = tokenizer.encode_chat(generate.prompt.messages, **generate.prompt.template_kwargs)
        body = loaded.model(mx.array([prompt]), cache=make_prompt_cache(loaded.model))[
            0, -1
        ].astype(mx.float32)
        margin = (body[yes] - body[no]).item()
        scores.append(1 / (1 + math.exp(-margin)))
    return time.perf_counter() - began, scores


def over_http(
    url: str, query: str, documents: Sequence[str], at_once: int
) -> tuple[float, list[float], int, int]:
    """Seconds, scores, prompt tokens and those of them that were cached, with so many documents in
    each request."""
    scores, tokens, cached = [0.0] * len(documents), 0, 0
    with httpx2.Client(timeout=600) as client:
        began = time.perf_counter()
        for start in range(0, len(documents), at_once):
            body = {"query": query, "documents": documents[start : start + at_once]}
            said = client.post(f"{url}/v1/rerank", json=body).raise_for_status().json()
            for result in said["results"]:
                scores[start + result["index"]] = result["relevance_score"]
            tokens += said["usage"]["prompt_tokens"]
            cached += said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return time.perf_counter() - began, scores, tokens, cached


async def main(options: argparse.Namespace) -> None:
    loaded = load(Settings(model=options.model), lambda _: None)
    settings = Settings(
        model=options.model, no_ssd=True, cache_memory=ByteSize(0) if options.no_cache else None
    )
    shutdown, dice = trio.Event(), random.Random(options.seed)
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(run_runtime, settings)
        [url] = await nursery.start(
            partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        )
        await trio.to_thread.run_sync(over_http, url, "warm up", texts(8, options.words, dice), 8)
        rates: dict[str, list[float]] = {}
        for number in range(options.rounds):
            query = f"{number}: " + " ".join(dice.choices(WORDS, k=options.query_words))
            documents = texts(options.pairs, options.words, dice)
            together = await trio.to_thread.run_sync(
                over_http, url, f"a {query}", documents, options.pairs
            )
            apart = await trio.to_thread.run_sync(over_http, url, f"b {query}", documents, 1)
            alone_s, alone = await trio.to_thread.run_sync(direct, loaded, f"a {query}", documents)
            off = max(abs(one - other) for one, other in zip(together[1], alone, strict=True))
            for name, seconds in (
                ("in one request", together[0]),
                ("one by one", apart[0]),
                ("the model alone", alone_s),
            ):
                rates.setdefault(name, []).append(options.pairs / seconds)
            print(
                f"round {number}: {together[2]} prompt tokens, cached {together[3]} in one request "
                f"and {apart[3]} one by one; "
                f"scores within {off:.1e} of the model alone",
                flush=True,
            )
        base = median(rates["in one request"])
        for name, found in rates.items():
            print(f"{name:16} {median(found):7.1f} pairs/s   {base / median(found):5.2f}")
        shutdown.set()
        await runtime.drain(5)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--model", help="nothing: the embedded model")
    arguments.add_argument("--pairs", type=int, default=100)
    arguments.add_argument("--words", type=int, default=40, help="of a document, on average")
    arguments.add_argument("--query-words", type=int, default=8)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--no-cache", action="store_true", help="without cached prefixes")
    trio.run(main, arguments.parse_args())
