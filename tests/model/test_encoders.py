"""Tiny encoders beside a model that generates, over HTTP: vectors and scores are those of
transformers and torch."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import mlx.core as mx
import numpy as np
import pytest
import trio

from tests.arithmetic import TF32
from tests.encoder_tokenizers import save_unigram, save_wordpiece
from tests.engine import sentence_references
from tests.engine.encoder_references import (
    CONFIGS,
    FILE,
    PROMPTS,
    VOCABULARY,
    save_encoder,
    weights_of,
)
from tests.families import save
from trouper import ServerSettings, Settings, run_models
from trouper.engine.loading.model_loading import EvaluatedModel, load
from trouper.engine.platform import device
from trouper.web.server import serve_http

REFERENCES = json.loads((Path(__file__).parents[1] / "engine" / FILE).read_text("utf-8"))["models"]
TOLERANCE = 2e-2 if TF32 else 1e-4
QUERY = "What barks?"
DOCUMENTS = ["A dog.", "A spoon is it.", "The capital of France is Paris, on the Seine river.", ""]
MAX_TOKENS = 40
Json = dict[str, Any]


def save_embedder(directory: Path) -> Path:
    save_wordpiece(save_encoder(directory, CONFIGS["bert"], weights_of("bert"), "cls"), VOCABULARY)
    limits = {"max_seq_length": MAX_TOKENS, "do_lower_case": True}
    (directory / "sentence_bert_config.json").write_text(json.dumps(limits))
    prompts = {"prompts": {"query": "query: ", "plain": ""}, "default_prompt_name": None}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return directory


class Client:
    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str) -> Any:
        answer = await trio.to_thread.run_sync(partial(httpx2.get, self._url + path, timeout=60))
        return answer.raise_for_status().json()

    async def post(self, path: str, body: Json) -> tuple[int, Any]:
        send = partial(httpx2.post, self._url + path, json=body, timeout=60)
        answer = await trio.to_thread.run_sync(send)
        return answer.status_code, answer.json()

    async def vectors(self, **body: Any) -> list[Any]:
        status, result = await self.post("/v1/embeddings", {"model": "embedder", **body})
        assert status == 200, result
        return [each["embedding"] for each in result["data"]]

    async def refusal(self, path: str, **body: Any) -> Json:
        status, result = await self.post(path, body)
        assert status == 400, result
        error: Json = result["error"]
        return error


@asynccontextmanager
async def serving(**models: Path) -> AsyncIterator[Client]:
    settings = [Settings(model=str(path), no_ssd=True) for path in models.values()]
    names = tuple(f"{name}={path}" for name, path in models.items())
    server, shutdown = ServerSettings(port=0, served_model_name=names), trio.Event()
    async with trio.open_nursery() as nursery:
        manager = await nursery.start(run_models, settings, server)
        start = partial(serve_http, manager, server, shutdown=shutdown)
        [url] = await nursery.start(start)
        yield Client(url)
        shutdown.set()
        await manager.drain(10)


async def test_an_embedder_and_a_generator(tmp_path: Path) -> None:
    embedder, generator = save_embedder(tmp_path / "embedder"), save("llama", tmp_path / "llama")
    expected = REFERENCES["bert"]["results"]["cls"]
    async with serving(generator=generator, embedder=embedder) as client:
        vectors = await client.vectors(input=PROMPTS)
        np.testing.assert_allclose(vectors, expected, atol=TOLERANCE)
        packed = await client.vectors(input=PROMPTS, encoding_format="base64")
        unpacked = [np.frombuffer(base64.b64decode(each), "<f4") for each in packed]
        np.testing.assert_array_equal(unpacked, np.array(vectors, "<f4"))
        short = np.array(await client.vectors(input=PROMPTS, dimensions=8))
        cut = np.array(vectors)[:, :8]
        np.testing.assert_allclose(short, cut / np.linalg.norm(cut, axis=1)[:, None], atol=1e-6)
        completion = {"model": "generator", "prompt": [5, 6], "max_tokens": 3}
        assert (await client.post("/v1/completions", completion))[0] == 200
        listed = (await client.get("/v1/models"))["data"]
        assert [each["kind"] for each in listed] == ["generator", "embedder"]
        assert listed[1]["architecture"]["output_modalities"] == ["embeddings"]
        assert listed[1]["max_model_len"] == MAX_TOKENS


@pytest.mark.parametrize("prepares", [False, True])
async def test_texts_of_an_embedder(
    prepares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A device that prepares shapes has nothing to prepare: on a GPU no encoder started.
    monkeypatch.setattr(device, "prepares_shapes", lambda: prepares)
    async with serving(embedder=save_embedder(tmp_path)) as client:
        [named] = await client.vectors(input="a dog", prompt_name="query")
        assert [named] == await client.vectors(input="QUERY: A Dog")
        assert [named] != await client.vectors(input="a dog")
        assert await client.vectors(input="a dog", prompt_name="plain") == (
            await client.vectors(input="a dog")
        )
        other = await client.refusal("/v1/embeddings", input="a", prompt_name="passage")
        assert other["param"] == "prompt_name" and "'query', 'plain'" in other["message"]
        tokens = await client.refusal("/v1/embeddings", input=[5], prompt_name="query")
        assert tokens["param"] == "prompt_name"
        await client.vectors(input=" ".join(["dog"] * (MAX_TOKENS - 2)))
        long = await client.refusal("/v1/embeddings", input=" ".join(["dog"] * (MAX_TOKENS - 1)))
        assert long["code"] == "context_length_exceeded" and long["param"] == "input"
        assert f"maximum context length is {MAX_TOKENS} tokens" in long["message"]
        rerank = await client.refusal("/v1/rerank", query="a", documents=["b"])
        assert rerank["code"] == "rerank_not_supported" and "cross-encoder" in rerank["message"]
        chat = await client.refusal("/v1/completions", prompt="a")
        assert chat["code"] == "generation_not_supported"


def own_scores(loaded: EvaluatedModel) -> list[float]:
    """By the model alone, pair by pair."""
    scores = []
    for document in DOCUMENTS:
        tokens, second_at = loaded.tokenizer.encode_pair(QUERY, document)
        types = [int(second_at > 0 and at >= second_at) for at in range(len(tokens))]
        hidden = loaded.model(mx.array([tokens]), mx.array([types]), None)
        logit = float(loaded.model.score(hidden[0])[0])
        scores.append(1 / (1 + math.exp(-logit)))
    return scores


@pytest.mark.parametrize("name", ["bert scores", "xlm-roberta scores", "modernbert scores by mean"])
async def test_a_cross_encoder(name: str, tmp_path: Path) -> None:
    save_encoder(tmp_path, CONFIGS[name], weights_of(name))
    (save_unigram if name.startswith("xlm") else save_wordpiece)(tmp_path, VOCABULARY)
    expected = own_scores(load(Settings(model=str(tmp_path)), lambda _: None))
    assert max(expected) - min(expected) > 1e-2
    async with serving(reranker=tmp_path) as client:
        status, result = await client.post("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS})
        assert status == 200, result
        scores = [each["score"] for each in result["data"]]
        np.testing.assert_allclose(scores, expected, atol=TOLERANCE)
        body = {"query": QUERY, "documents": DOCUMENTS, "top_n": 3}
        status, result = await client.post("/v1/rerank", body)
        best = sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])
        assert [each["index"] for each in result["results"]] == best[:3]
        texts = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}
        _, raw = await client.post("/rerank", texts)
        logits = {each["index"]: each["score"] for each in raw}
        shares = [1 / (1 + math.exp(-logits[index])) for index in range(len(DOCUMENTS))]
        np.testing.assert_allclose(shares, expected, atol=TOLERANCE)
        embedding = await client.refusal("/v1/embeddings", input="a")
        assert embedding["code"] == "embeddings_not_supported"
        assert "cross-encoder" in embedding["message"]
        refused = await client.refusal("/v1/score", text_1="a", text_2="b", instruction="c")
        assert refused["param"] == "instruction"
        [listed] = (await client.get("/v1/models"))["data"]
        assert listed["kind"] == "reranker"
        assert listed["architecture"]["output_modalities"] == ["rerank"]


def order_of(scores: Any) -> list[int]:
    return [int(at) for at in np.argsort(scores)]


@pytest.mark.skipif(TF32, reason="neighbours lie closer than products in TF32 are exact")
async def test_fifty_pairs_are_ordered_as_by_sentence_transformers(tmp_path: Path) -> None:
    file = Path(sentence_references.__file__).with_name(sentence_references.FILE)
    expected, query = json.loads(file.read_text("utf-8")), sentence_references.QUERY
    texts = sentence_references.documents()
    async with serving(
        embedder=sentence_references.save_embedder(tmp_path / "embedder"),
        scorer=sentence_references.save_scorer(tmp_path / "scorer"),
    ) as client:
        vectors = np.array(await client.vectors(input=[query, *texts]))
        np.testing.assert_allclose(vectors, expected["vectors"], atol=TOLERANCE)
        assert order_of(vectors[1:] @ vectors[0]) == order_of(expected["cosines"])
        body = {"model": "scorer", "query": query, "documents": texts}
        status, result = await client.post("/v1/rerank", body)
    assert status == 200, result
    best_first = [each["index"] for each in result["results"]]
    assert best_first == order_of(expected["scores"])[::-1]
    scores = [each["relevance_score"] for each in result["results"]]
    np.testing.assert_allclose(scores, np.array(expected["scores"])[best_first], atol=TOLERANCE)
