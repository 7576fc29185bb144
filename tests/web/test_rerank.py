"""POST /v1/rerank and /v1/score, in the shapes of Cohere, Jina, vLLM and
text-embeddings-inference."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs
import cohere
import pytest
import trio

from tests.fakes import FakeEngine, Ranking
from tests.web.serving import Served, ask, eventually, serving
from trouper.actors.runtime.answer import Answer
from trouper.protocol.model import LoadedModel
from trouper.web.openai.rerank import (
    INSTRUCTION,
    SYSTEM,
    Pair,
    ScoringParameters,
    equal_parts,
    pairs_to_generate,
)
from trouper.web.serving.service import Service

ASKED: dict[str, Any] = {
    "query": "barks?",
    "documents": ["a dog", "a spoon", {"text": "a fox"}, "a bark"],
}


def ranking(**more: Any) -> FakeEngine:
    return FakeEngine(tokenizer=Ranking(), **more)


async def scores(served: Served, documents: list[Any]) -> list[float]:
    status, said = await ask(served, {"text_1": "barks?", "text_2": documents}, "/v1/score")
    assert status == 200, said
    assert [one["index"] for one in said["data"]] == list(range(len(documents)))
    return [one["score"] for one in said["data"]]


class TestPrompt:
    def test_in_the_words_of_qwen3_reranker(self) -> None:
        [generate] = pairs_to_generate([Pair("q", "d")], ScoringParameters(), "1", (4, 5))
        assert generate.prompt.messages == (  # type: ignore[union-attr]
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"<Instruct>: {INSTRUCTION}\n<Query>: q\n<Document>: d"},
        )
        assert (generate.max_tokens, generate.logprob_tokens, generate.logprobs) == (1, (4, 5), 0)
        [own] = pairs_to_generate(
            [Pair("q", "d")], ScoringParameters(instruction="Find jokes"), "1", (4, 5)
        )
        assert "<Instruct>: Find jokes" in str(own.prompt)


class TestRerank:
    async def test_the_best_first(self) -> None:
        async with serving(ranking()) as served:
            found = await scores(served, ["a dog", "a spoon", "a fox", "a bark"])
            assert len(set(found)) > 1 and all(0 < score < 1 for score in found)
            status, said = await ask(served, ASKED, "/v1/rerank")
            assert status == 200
            order = [result["index"] for result in said["results"]]
            assert order == sorted(range(4), key=lambda index: -found[index])
            assert [result["relevance_score"] for result in said["results"]] == [
                found[index] for index in order
            ]
            texts = ["a dog", "a spoon", "a fox", "a bark"]
            assert [result["document"]["text"] for result in said["results"]] == [
                texts[index] for index in order
            ]
            assert said["usage"]["total_tokens"] == said["usage"]["prompt_tokens"] > 4 * len(SYSTEM)
            for path in ("/rerank", "/v2/rerank"):
                assert (await ask(served, ASKED, path))[1]["results"] == said["results"]
            _, few = await ask(
                served, {**ASKED, "top_n": 2, "return_documents": False}, "/v1/rerank"
            )
            assert few["results"] == [
                {k: v for k, v in one.items() if k != "document"} for one in said["results"][:2]
            ]

    @pytest.mark.parametrize("name", ["fake", "mxbai-rerank-base-v2", "Qwen3-Reranker-0.6B"])
    async def test_a_model_of_another_kind_is_named(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Named(FakeEngine):
            async def load(self) -> LoadedModel:
                loaded = await super().load()
                return attrs.evolve(loaded, card=attrs.evolve(loaded.card, id=name))

        async with serving(Named(tokenizer=Ranking())) as served:
            for path, body in (
                ("/v1/rerank", ASKED),
                ("/v1/rerank", ASKED),
                ("/v1/score", {"text_1": "a", "text_2": "b"}),
                ("/v1/embeddings", {"input": "x"}),
                ("/v1/embeddings", {"input": "x"}),
            ):
                status, answer = await ask(served, body, path)
                assert status == 200
                if path == "/v1/rerank":
                    assert ("warnings" in answer["meta"]) is (name != "Qwen3-Reranker-0.6B")
        doubts = [line for line in caplog.messages if "is not known as" in line]
        ours = [True] * (name != "Qwen3-Reranker-0.6B")
        assert ["whose question" in line for line in doubts] == [*ours, False]

    async def test_as_text_embeddings_inference_answers(self) -> None:
        body = {"query": "barks?", "texts": ["a dog", "a spoon"], "truncate": True}
        async with serving(ranking()) as served:
            found = await scores(served, ["a dog", "a spoon"])
            _, said = await ask(served, body, "/rerank")
            assert {one["index"]: one["score"] for one in said} == dict(enumerate(found))
            _, raw = await ask(served, {**body, "raw_scores": True, "return_text": True}, "/rerank")
            assert [one["index"] for one in raw] == [one["index"] for one in said]
            assert {one["text"] for one in raw} == {"a dog", "a spoon"} and raw[0]["score"] >= raw[
                1
            ]["score"]

    async def test_more_pairs_than_rows_and_queue(self) -> None:
        documents = [f"number {n}" for n in range(70)]
        async with serving(
            ranking(), settings={"max_queue_size": 10, "completion_batch_size": 4}
        ) as served:
            together = await scores(served, documents)
            assert together[41:43] == [
                *(await scores(served, documents[41:42])),
                *(await scores(served, documents[42:43])),
            ]
            await eventually(lambda: served.busy == 0)

    async def test_pairs_are_computed_while_the_next_are_queued(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submit, wait, events = Service.submit, Answer.wait_next, list[str]()

        async def queue(self: Service, served: Any, generates: Any, priority: Any) -> Any:
            answers = await submit(self, served, generates, priority)
            events.append(f"queued {len(answers)}")
            return answers

        async def compute(self: Answer) -> None:
            await wait(self)
            events.append("computed")

        monkeypatch.setattr(Service, "submit", queue)
        monkeypatch.setattr(Answer, "wait_next", compute)
        async with serving(ranking(), settings={"completion_batch_size": 4}) as served:
            await scores(served, ["a dog"] * 6)
        computed = ["computed"] * 2
        assert events == ["queued 2", "queued 2", *computed, "queued 2", *computed]

    async def test_pairs_of_like_length_are_prefilled_together(self) -> None:
        engine = ranking()
        documents = ["x" * (1 + 13 * place % 70) for place in range(70)]
        async with serving(engine, settings={"completion_batch_size": 32}) as served:
            together = await scores(served, documents)
            assert together[10] == (await scores(served, documents[10:11]))[0]
        rows = {
            admit.row: len(admit.prompt) // 4 for plan in engine.plans_seen for admit in plan.admit
        }
        lengths = [length for _, length in sorted(rows.items())][:70]
        assert lengths == sorted(lengths), (
            "as they came they would be as wide as the longest of all"
        )

    async def test_coheres_clients(self) -> None:
        def ask_client(url: str) -> tuple[Any, Any]:
            asked: Any = {
                "model": "fake",
                "query": "barks?",
                "documents": ["a dog", "a spoon"],
                "top_n": 1,
            }
            connect: Any = {"api_key": "none", "base_url": url}
            with cohere.ClientV2(**connect) as newer, cohere.Client(**connect) as older:
                return newer.rerank(**asked), older.rerank(**asked)

        async with serving(ranking()) as served:
            _, said = await ask(served, {**ASKED, "documents": ["a dog", "a spoon"]}, "/v1/rerank")
            for answer in await trio.to_thread.run_sync(
                partial(ask_client, served.base_url.removesuffix("/v1"))
            ):
                [best] = answer.results
                assert (best.index, best.relevance_score) == tuple(said["results"][0].values())[:2]


class TestScore:
    async def test_each_with_its_own_or_one_with_all(self) -> None:
        async with serving(ranking()) as served:
            dog, spoon = await scores(served, ["a dog", "a spoon"])
            pairs = {"text_1": ["barks?", "barks?"], "text_2": ["a dog", "a spoon"]}
            _, said = await ask(served, pairs, "/v1/score")
            assert [one["score"] for one in said["data"]] == [dog, spoon]
            _, one = await ask(served, {"text_1": "barks?", "text_2": "a dog"}, "/score")
            assert [one["score"] for one in one["data"]] == [dog]

    @pytest.mark.parametrize(
        "names", [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
    )
    async def test_vllms_newer_names(self, names: tuple[str, str]) -> None:
        texts = ("barks?", ["a dog", "a spoon"])
        async with serving(ranking()) as served:
            _, meant = await ask(served, {"text_1": texts[0], "text_2": texts[1]}, "/v1/score")
            status, answer = await ask(served, dict(zip(names, texts, strict=True)), "/score")
            assert (status, answer["data"]) == (200, meant["data"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "texts": ["a"]}, "documents"),
        ("/v1/rerank", {**ASKED, "documents": [{"title": "a"}]}, "documents.0.text"),
        ("/v1/rerank", {**ASKED, "top_n": 0}, "top_n"),
        ("/v1/rerank", {**ASKED, "max_tokens_per_doc": 10}, "max_tokens_per_doc"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "use_activation": False}, "use_activation"),
        ("/v1/rerank", {**ASKED, "documents": ["x" * 9000]}, "documents"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(
    path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(ranking(), settings={"max_kv_size": 4096}) as served:
        status, said = await ask(served, body, path)
        assert (status, said["error"]["param"]) == (400, param), said


async def test_values_of_refused_parameters_that_ask_for_nothing() -> None:
    async with serving(ranking()) as served:
        body = {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0, "use_activation": True}
        status, answer = await ask(served, body, "/v1/rerank")
        assert status == 200, answer


async def test_a_model_without_single_tokens_says_so() -> None:
    async with serving() as served:
        status, said = await ask(served, ASKED, "/v1/rerank")
        assert (status, said["error"]["code"]) == (400, "rerank_not_supported")


def test_parts_are_equal_and_few() -> None:
    assert [[*part] for part in equal_parts(range(10), 4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8, 9]]
    assert [[*part] for part in equal_parts(range(4), 4)] == [[0, 1, 2, 3]]
