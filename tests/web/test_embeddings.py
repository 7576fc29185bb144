"""POST /v1/embeddings, with the official client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from threading import get_ident
from typing import Any

import attrs
import openai
import pytest
import trio

from tests.fakes import DIMENSIONS, ByteTokenizer, FakeEngine, card
from tests.web.serving import Served, ask, eventually, serving
from trouper.actors.runtime import runtime
from trouper.protocol.model import LoadedModel
from trouper.protocol.requests import PairTokens
from trouper.web.openai import embeddings


def create(url: str, **body: Any) -> Any:
    """Strictly, but for base64, which the client asks for unless told otherwise and which its own
    type does not know."""
    strict = partial(
        openai.OpenAI, _strict_response_validation=body.get("encoding_format") == "float"
    )
    with strict(base_url=url, api_key="none", max_retries=0, timeout=20) as client:
        return client.embeddings.create(model="fake", **body)


async def embed(served: Served, **body: Any) -> Any:
    return await trio.to_thread.run_sync(partial(create, served.base_url, **body))


def length(vector: list[float]) -> float:
    return math.sqrt(sum(number * number for number in vector))


async def test_the_client_gets_vectors() -> None:
    """It asks for base64 and decodes it; told otherwise, it gets numbers: the same ones."""
    async with serving() as served:
        packed = await embed(served, input=["né", "b"])
        assert [one.index for one in packed.data] == [0, 1]
        assert packed.usage.prompt_tokens == packed.usage.total_tokens == 4
        plain = await embed(served, input=["né", "b"], encoding_format="float")
        for one, other in zip(packed.data, plain.data, strict=True):
            assert len(one.embedding) == DIMENSIONS and abs(length(one.embedding) - 1) < 1e-6
            assert one.embedding == other.embedding
        tokens = await embed(served, input=[[110, 195, 169], [98]])
        assert [one.embedding for one in tokens.data] == [one.embedding for one in packed.data]
        assert (await embed(served, input=[98])).data[0].embedding == packed.data[1].embedding
        short = (await embed(served, input="b", dimensions=2)).data[0].embedding
        assert len(short) == 2 and abs(length(short) - 1) < 1e-6


async def test_more_inputs_than_the_queue_takes() -> None:
    async with serving(settings={"max_queue_size": 20, "completion_batch_size": 4}) as served:
        texts = [chr(97 + n % 26) * (1 + n) for n in range(60)]
        together = await embed(served, input=texts)
        assert len(together.data) == 60
        assert (
            together.data[41].embedding == (await embed(served, input=texts[41])).data[0].embedding
        )
        await eventually(lambda: served.busy == 0)


async def test_texts_are_tokenized_together_on_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches, threads = list[int](), set[int]()

    class Noting(ByteTokenizer):
        def encode_batch(self, texts: Sequence[str | tuple[str, str]]) -> list[PairTokens]:
            batches.append(len(texts))
            threads.add(get_ident())
            return super().encode_batch(texts)

    monkeypatch.setattr(runtime, "LONG_LANE", 500)
    async with serving(FakeEngine(tokenizer=Noting())) as served:
        texts = [f"text {n}" for n in range(2 * embeddings.AT_A_TIME + 2)]
        await embed(served, input=texts)
        await embed(served, input="one")
        await embed(served, input=["x" * 51] * 10)
    assert batches == [embeddings.AT_A_TIME, embeddings.AT_A_TIME, 2], "not one, nor long ones"
    assert get_ident() not in threads


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [1, "a"]}, "input.0"),
        ({"input": ""}, "input"),
        ({"input": [999]}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", "a" * 5000]}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "priority": "3"}, "priority"),
        ({"input": ["a"] * 2049}, "input"),
    ],
)
async def test_what_cannot_be_embedded(body: dict[str, Any], param: str) -> None:
    async with serving() as served:
        status, said = await ask(served, body, "/v1/embeddings")
    assert (status, said["error"]["param"]) == (400, param)


async def test_the_form_that_vectors_have_may_be_named() -> None:
    plain = {"input": "abc", "encoding_format": "base64"}
    form = {"embed_dtype": "float32", "endianness": "little", "use_activation": True}
    async with serving() as served:
        _, first = await ask(served, plain, "/v1/embeddings")
        _, second = await ask(served, plain | form, "/v1/embeddings")
    assert second["data"] == first["data"]


async def test_a_model_without_embeddings_says_so() -> None:
    class Engine(FakeEngine):
        async def load(self) -> LoadedModel:
            return LoadedModel(attrs.evolve(card(), embedding=None), self.tokenizer)

    async with serving(Engine()) as served:
        status, said = await ask(served, {"input": "a"}, "/v1/embeddings")
    assert (status, said["error"]["code"]) == (400, "embeddings_not_supported")
