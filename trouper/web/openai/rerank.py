"""POST /v1/rerank and /v1/score.

A cross-encoder's score is the sigmoid of its logit. A generative reranker (Qwen3-Reranker) is asked
whether a document answers a query; the score is the probability of "yes" among "yes" and "no" as
the next token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from struct import unpack
from typing import Annotated, Any, ClassVar, Self

import attrs
from msgspec import Meta
from quart import Response

from trouper.actors.runtime.answer import Answer
from trouper.protocol.model import ModelCard, Tokenizer
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Generate, PairPrompt
from trouper.protocol.sampling import Sampling
from trouper.web.http.body_parsing import called
from trouper.web.http.endpoints import GENERATES, Endpoint
from trouper.web.http.field_types import Model, Priority, Salt, Text
from trouper.web.http.json_response import as_json
from trouper.web.http.request_body import Body, Report, refuse, structure
from trouper.web.http.request_schema import (
    COUNT,
    HARMLESS,
    NULL,
    NUMBER,
    TEXT,
    Json,
    Unsupported,
    array,
    either,
    full,
)
from trouper.web.openai.embeddings import requests_to_embed
from trouper.web.output.dialect import Choice
from trouper.web.serving.service import Served, Service, now
from trouper.web.streaming.response_streams import collect_all

ENDPOINT = partial(Endpoint, method="POST", tag="Rerank", also=GENERATES)
CHARACTER_BYTES = 4
MAX_DOCUMENTS = 2048
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's wording."""
ANSWERS = ("yes", "no")
QUESTIONED = "qwen3-reranker"
"""In the names of models that were trained for the question."""


class Document(Body, frozen=True):
    """A document as an object, as Cohere's and Jina's clients may send it."""

    text: Text


class ScoringParameters(Body, kw_only=True, frozen=True):
    """The parameters of both endpoints."""

    unsupported: ClassVar[Unsupported] = {
        "truncate_prompt_tokens": (),
        "max_tokens_per_doc": (0,),
        "max_chunks_per_doc": (),
        "truncate": (False,),
        "use_activation": (True,),
    }
    essential: ClassVar[frozenset[str]] = frozenset(unsupported) - {"truncate"}
    """text-embeddings-inference's clients always send `truncate`."""
    model: Model | None = None
    instruction: Text | None = None
    user: Annotated[str, HARMLESS] | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None


Documents = Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_DOCUMENTS)]
ONE_LIST: Json = {
    "anyOf": [
        {"properties": {"documents": {"type": "array"}, "texts": NULL}, "required": ["documents"]},
        {"properties": {"documents": NULL, "texts": {"type": "array"}}, "required": ["texts"]},
    ]
}


class RerankRequest(ScoringParameters, kw_only=True, frozen=True):
    rules: ClassVar[tuple[Json, ...]] = (ONE_LIST,)
    query: Text
    documents: Documents | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = True
    texts: Documents | None = None
    raw_scores: bool = False
    return_text: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any], report: Report = refuse) -> Self:
        if (body.get("documents") is None) == (body.get("texts") is None):
            message = "give either documents or texts"
            raise bad_request(message, "documents", "missing_required_parameter")
        return structure(body, cls, report)

    @property
    def offered(self) -> Sequence[str | Document]:
        return self.texts or self.documents or ()


class ScoreRequest(ScoringParameters, kw_only=True, frozen=True):
    aliases: ClassVar[Mapping[str, str]] = {
        "queries": "text_1",
        "data_1": "text_1",
        "documents": "text_2",
        "items": "text_2",
        "data_2": "text_2",
    }
    """vLLM's newer names."""
    text_1: Texts
    text_2: Texts


@attrs.frozen
class Pair:
    query: str
    document: str

    @property
    def length(self) -> int:
        return len(self.query) + len(self.document)


def pairs_to_rerank(request: RerankRequest) -> tuple[Pair, ...]:
    return tuple(Pair(request.query, text_of(document)) for document in request.offered)


def text_of(document: str | Document) -> str:
    return document if isinstance(document, str) else document.text


def pairs_to_score(request: ScoreRequest) -> tuple[Pair, ...]:
    """Texts pair by index, or one with all others. Raises `RequestFailed` (400)."""
    first = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    second = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        message = (
            f"text_1 has {len(first)} texts and text_2 {len(second)}: send as many of each, or one "
            "text_1"
        )
        raise bad_request(message, "text_2", "unequal_texts")
    return tuple(Pair(query, document) for query, document in zip(first, second, strict=True))


def answer_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """Raises `RequestFailed` (400) if "yes" or "no" is no single token."""
    found = [tokenizer.encode(answer, special=False) for answer in ANSWERS]
    if any(len(tokens) != 1 for tokens in found):
        message = 'this model cannot rerank: "yes" and "no" are no single tokens of its vocabulary'
        raise bad_request(message, "model", "rerank_not_supported")
    return found[0][0], found[1][0]


def pairs_to_generate(
    pairs: Sequence[Pair], request: ScoringParameters, request_id: str, answers: tuple[int, int]
) -> tuple[Generate, ...]:
    instruction = INSTRUCTION if request.instruction is None else request.instruction
    return tuple(
        Generate(
            request_id=f"{request_id}-{index}" if index else request_id,
            prompt=ChatPrompt(
                (
                    {"role": "system", "content": SYSTEM},
                    {"role": "user", "content": _question(instruction, pair)},
                ),
                {"enable_thinking": False},
            ),
            sampling=Sampling(temperature=0),
            max_tokens=1,
            ignore_eos=True,
            logprobs=0,
            logprob_tokens=answers,
            speculation="off",
            cache_salt=request.cache_salt or "",
        )
        for index, pair in enumerate(pairs)
    )


def _question(instruction: str, pair: Pair) -> str:
    return f"<Instruct>: {instruction}\n<Query>: {pair.query}\n<Document>: {pair.document}"


@attrs.frozen
class PairScore:
    margin: float
    """The logit of a cross-encoder, or the logit of "yes" minus that of "no"."""
    prompt_tokens: int
    cached_tokens: int = 0

    @classmethod
    def of_choice(cls, choice: Choice) -> Self:
        (_, yes), (_, no) = choice.logprobs[0].top
        return cls(yes - no, choice.usage.prompt_tokens, choice.usage.cached_tokens)

    @property
    def share(self) -> float:
        """Between 0 and 1."""
        return 1 / (1 + math.exp(min(-self.margin, 700)))


def usage_body(scores: Sequence[PairScore]) -> Json:
    prompt_tokens = sum(score.prompt_tokens for score in scores)
    cached = sum(score.cached_tokens for score in scores)
    details = {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens,
        "prompt_tokens_details": details,
    }


def rerank_body(
    request: RerankRequest, request_id: str, model: str, scores: Sequence[PairScore], doubt: str
) -> Json:
    """Format at most `top_n`, the best first."""
    results: list[dict[str, Any]] = []
    for index in ranked(scores)[: request.top_n]:
        document = (
            {"document": {"text": text_of(request.offered[index])}}
            if request.return_documents
            else {}
        )
        results.append({"index": index, "relevance_score": scores[index].share} | document)
    return {
        "id": f"rerank-{request_id}",
        "model": model,
        "results": results,
        "usage": usage_body(scores),
        "meta": {**META, "warnings": [doubt]} if doubt else META,
    }


def doubt_of(card: ModelCard, name: str) -> str:
    """Why scores may say little, or "". Other generative rerankers answer other questions, and
    nothing but their names tells them apart."""
    if card.scores or QUESTIONED in card.id.lower():
        return ""
    return (
        f"{name} is not known as a Qwen3-Reranker, whose question it is asked: its scores may say "
        "little"
    )


def ranked(scores: Sequence[PairScore]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index].margin)


def ranked_texts(request: RerankRequest, scores: Sequence[PairScore]) -> list[Json]:
    numbers = [score.margin if request.raw_scores else score.share for score in scores]
    return [
        {"index": index, "score": numbers[index]}
        | ({"text": text_of(request.offered[index])} if request.return_text else {})
        for index in ranked(scores)[: request.top_n]
    ]


META: Mapping[str, Any] = {"api_version": {"version": "2"}, "billed_units": {"search_units": 0}}


def score_body(request_id: str, model: str, created: int, scores: Sequence[PairScore]) -> Json:
    data = [
        {"index": index, "object": "score", "score": score.share}
        for index, score in enumerate(scores)
    ]
    return {
        "id": f"score-{request_id}",
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": usage_body(scores),
    }


SHARE: Json = {"type": "number", "minimum": 0, "maximum": 1}
USAGE = full(
    {
        "prompt_tokens": COUNT,
        "total_tokens": COUNT,
        "prompt_tokens_details": full({"cached_tokens": COUNT}),
    }
)
RESULT = full(
    {"index": COUNT, "relevance_score": SHARE, "document": full({"text": TEXT})},
    optional=("document",),
)
RERANKED = full(
    {
        "id": TEXT,
        "model": TEXT,
        "results": array(RESULT),
        "usage": USAGE,
        "meta": {"type": "object"},
    }
)
RANKED_TEXTS = array(full({"index": COUNT, "score": NUMBER, "text": TEXT}, optional=("text",)))
SCORED = full(
    {
        "id": TEXT,
        "object": {"const": "list"},
        "created": COUNT,
        "model": TEXT,
        "data": array(full({"index": COUNT, "object": {"const": "score"}, "score": SHARE})),
        "usage": USAGE,
    }
)


class Reranking:
    def __init__(self, service: Service) -> None:
        self._service = service

    @ENDPOINT(
        path="/v1/rerank",
        operation="createRerank",
        summary="Order documents by how well they answer a query",
        description="Also at /rerank and /v2/rerank. With `texts` in place of `documents` "
        "the answer is a list, as "
        "text-embeddings-inference gives it.",
        request=RerankRequest,
        answer=either(RERANKED, RANKED_TEXTS),
        examples={"Two documents": {"query": "What barks?", "documents": ["A dog.", "A spoon."]}},
    )
    async def rerank(self) -> Response:
        parsed = await self._service.read(RerankRequest.parse)
        served = await self._service.served(parsed.model)
        scores = await self._scores(served, pairs_to_rerank(parsed), parsed, "documents")
        if parsed.texts is not None:
            return as_json(ranked_texts(parsed, scores))
        doubt = doubt_of(served.runtime.model, served.name)
        return as_json(rerank_body(parsed, self._service.request_id, served.name, scores, doubt))

    @ENDPOINT(
        path="/v1/score",
        operation="createScore",
        summary="How well texts answer others",
        description="Also at /score.",
        request=ScoreRequest,
        answer=SCORED,
        examples={"One against two": {"text_1": "What barks?", "text_2": ["A dog.", "A spoon."]}},
    )
    async def score(self) -> Response:
        parsed = await self._service.read(ScoreRequest.parse)
        served = await self._service.served(parsed.model)
        scores = await self._scores(served, pairs_to_score(parsed), parsed, "text_2")
        return as_json(score_body(self._service.request_id, served.name, now(), scores))

    async def _scores(
        self, served: Served, pairs: Sequence[Pair], request: ScoringParameters, param: str
    ) -> list[PairScore]:
        # Pairs of like length prefill together.
        card, request_id = served.runtime.model, self._service.request_id
        check_reranker(card, request)
        if doubt := doubt_of(card, served.name):
            self._service.warn_once(doubt)
        tokens = None if card.scores else answer_tokens(served.runtime.tokenizer)
        # Each pair has the whole query, and the instruction.
        words = len(request.instruction or "")
        self._service.hold(CHARACTER_BYTES * sum(words + pair.length for pair in pairs))
        if tokens is None:
            prompts = [PairPrompt(pair.query, pair.document) for pair in pairs]
            generates = requests_to_embed(prompts, request_id)
        else:
            generates = await self._service.run_off_loop(
                pairs_to_generate, pairs, request, request_id, tokens
            )
        order = sorted(range(len(pairs)), key=lambda index: pairs[index].length)
        at_a_time = max(served.runtime.settings.rows // 2, 1)
        groups = [[generates[index] for index in part] for part in equal_parts(order, at_a_time)]
        with called({"messages": param, "prompt": param}):
            answers = await self._service.submit_groups(served, groups, request.priority)
        scores = await self._collect(answers, card)
        in_order = dict(zip(order, scores, strict=True))
        return [in_order[index] for index in range(len(pairs))]

    async def _collect(self, answers: Sequence[Answer], card: ModelCard) -> list[PairScore]:
        if not card.scores:
            choices = await collect_all(answers, self._service.holding.grow)
            return [PairScore.of_choice(choice) for choice in choices]
        scores = list[PairScore]()
        for answer in answers:
            await answer.next()
            [margin] = unpack("<f", answer.embedding)
            scores.append(PairScore(margin, len(answer.accepted.prompt_tokens)))
        return scores


def check_reranker(card: ModelCard, request: ScoringParameters) -> None:
    """Raises `RequestFailed` (400) for a model that cannot rerank, or not by an instruction."""
    if card.no_generation and not card.scores:
        message = (
            f"{card.id} gives embeddings alone: reranking takes a cross-encoder, or a model that "
            "generates"
        )
        raise bad_request(message, "model", "rerank_not_supported")
    if card.scores and request.instruction is not None:
        message = "instruction is for models that generate, and this one is a cross-encoder"
        raise bad_request(message, "instruction", "instruction_not_supported")


def equal_parts(items: Sequence[int], at_most: int) -> Iterator[Sequence[int]]:
    """Cut into the fewest parts, with lengths that differ by at most one."""
    count = -(-len(items) // at_most)
    ends = [len(items) * part // count for part in range(count + 1)]
    return (items[start:end] for start, end in pairwise(ends))
