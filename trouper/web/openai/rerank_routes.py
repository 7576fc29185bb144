"""Endpoints that score pairs of texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from quart import Response

from trouper.web.http.body_parsing import called
from trouper.web.http.endpoints import GENERATES, Endpoint
from trouper.web.http.json_response import as_json
from trouper.web.http.request_schema import either
from trouper.web.openai import rerank
from trouper.web.openai.rerank import Pair, ScoringParameters
from trouper.web.output.dialect import Choice
from trouper.web.serving.service import Served, Service, now
from trouper.web.streaming.response_streams import collect_all


class Reranking:
    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> tuple[Endpoint, ...]:
        return (
            Endpoint(
                tag="Rerank",
                method="POST",
                path="/v1/rerank",
                handler=self.rerank,
                operation="createRerank",
                summary="Order documents by how well they answer a query",
                description="Also at /rerank and /v2/rerank. With `texts` in place of `documents` "
                "the answer is a list, as "
                "text-embeddings-inference gives it.",
                request=rerank.RerankRequest,
                answer=either(rerank.RERANKED, rerank.RANKED_TEXTS),
                also=GENERATES,
                examples={
                    "Two documents": {"query": "What barks?", "documents": ["A dog.", "A spoon."]}
                },
            ),
            Endpoint(
                tag="Rerank",
                method="POST",
                path="/v1/score",
                handler=self.score,
                operation="createScore",
                summary="How well texts answer others",
                description="Also at /score.",
                request=rerank.ScoreRequest,
                answer=rerank.SCORED,
                also=GENERATES,
                examples={
                    "One against two": {"text_1": "What barks?", "text_2": ["A dog.", "A spoon."]}
                },
            ),
        )

    async def rerank(self) -> Response:
        parsed = await self._service.read(rerank.RerankRequest.parse)
        served = await self._service.served(parsed.model)
        choices = await self._choices(served, rerank.pairs_to_rerank(parsed), parsed, "documents")
        if parsed.texts is not None:
            return as_json(rerank.ranked_texts(parsed, choices))
        return as_json(rerank.rerank_body(parsed, self._service.request_id, served.name, choices))

    async def score(self) -> Response:
        parsed = await self._service.read(rerank.ScoreRequest.parse)
        served = await self._service.served(parsed.model)
        choices = await self._choices(served, rerank.pairs_to_score(parsed), parsed, "text_2")
        return as_json(rerank.score_body(self._service.request_id, served.name, now(), choices))

    async def _choices(
        self, served: Served, pairs: Sequence[Pair], request: ScoringParameters, param: str
    ) -> list[Choice]:
        """As many pairs at a time as decode together: clients share the queue. Pairs of like length
        are prefilled together."""
        tokens = rerank.answer_tokens(served.runtime.tokenizer)
        request_id = self._service.request_id
        # Each pair has the whole query, and the instruction.
        words = len(request.instruction or "")
        self._service.hold(rerank.CHARACTER_BYTES * sum(words + pair.length for pair in pairs))
        generates = await self._service.run_off_loop(
            rerank.pairs_to_generate, pairs, request, request_id, tokens
        )
        order = sorted(range(len(pairs)), key=lambda index: pairs[index].length)
        choices: dict[int, Choice] = {}
        for part in equal_parts(order, served.runtime.settings.rows):
            with called({"messages": param}):
                some = [generates[index] for index in part]
                answers = await self._service.submit(served, some, request.priority)
            choices |= zip(
                part, await collect_all(answers, self._service.holding.grow), strict=True
            )
        return [choices[index] for index in range(len(pairs))]


def equal_parts(items: Sequence[int], at_most: int) -> Iterator[Sequence[int]]:
    """Cut into the fewest parts, with lengths that differ by at most one."""
    count = -(-len(items) // at_most)
    ends = [len(items) * part // count for part in range(count + 1)]
    return (items[start:end] for start, end in pairwise(ends))
