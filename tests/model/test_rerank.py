"""Rerank with the embedded model: the scores are those of the model's own pass over each pair's
prompt, alone and together."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import httpx2
import mlx.core as mx
import pytest
import trio
from mlx_lm.models.cache import make_prompt_cache

from tests.model.test_smollm import smollm
from trouper import ChatPrompt, Runtime, ServerSettings, Settings, run_runtime
from trouper.web.openai.rerank import Pair, ScoringParameters, answer_tokens, pairs_to_generate
from trouper.web.server import serve_http

QUERY = "What is the capital of France?"
DOCUMENTS = [
    "Paris is the capital of France.",
    "A dog barks.",
    "Rome",
    "The capital of France is Paris, on the Seine. " * 4,
    "",
]
CLOSE = 2e-3


def direct(document: str) -> float:
    yes, no = answer_tokens(smollm().tokenizer)
    [generate] = pairs_to_generate([Pair(QUERY, document)], ScoringParameters(), "", (yes, no))
    assert isinstance(generate.prompt, ChatPrompt)
    prompt = smollm().tokenizer.encode_chat(
        generate.prompt.messages, **generate.prompt.template_kwargs
    )
    logits = (
        smollm()
        .model(mx.array([prompt]), cache=make_prompt_cache(smollm().model))[0, -1]
        .astype(mx.float32)
    )
    return 1 / (1 + math.exp(float(logits[no] - logits[yes])))


def post(url: str, documents: list[str]) -> Any:
    body = {"query": QUERY, "documents": documents}
    return httpx2.post(f"{url}/v1/rerank", json=body, timeout=300).raise_for_status().json()


def by_index(said: Any) -> list[float]:
    return [
        score
        for _, score in sorted((one["index"], one["relevance_score"]) for one in said["results"])
    ]


@pytest.mark.long
async def test_scores_are_those_of_a_direct_pass() -> None:
    wanted = [direct(document) for document in DOCUMENTS]
    assert max(wanted) - min(wanted) > 10 * CLOSE
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        runtime: Runtime = await nursery.start(run_runtime, Settings(no_ssd=True))
        start = partial(serve_http, runtime, ServerSettings(port=0), shutdown=shutdown)
        [url] = await nursery.start(start)
        together = await trio.to_thread.run_sync(post, url, DOCUMENTS)
        assert by_index(together) == pytest.approx(wanted, abs=CLOSE)
        alone = [
            by_index(await trio.to_thread.run_sync(post, url, [document]))[0]
            for document in DOCUMENTS
        ]
        assert alone == pytest.approx(wanted, abs=CLOSE)
        assert together["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, (
            "they share the query"
        )
        shutdown.set()
        await runtime.drain(5)
