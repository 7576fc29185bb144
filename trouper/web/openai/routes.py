"""OpenAI's endpoints, and those that vLLM's clients expect."""

from __future__ import annotations

from functools import partial

from quart import Response

from trouper.actors.runtime.prompt_tokenizing import characters_of
from trouper.protocol.requests import InfillPrompt, TextPrompt
from trouper.web.http.body_parsing import called
from trouper.web.http.endpoints import COUNTS, GENERATES, Endpoint
from trouper.web.http.json_response import as_json, formatted
from trouper.web.http.request_schema import Json, either, ref, titled
from trouper.web.openai import answer_schemas, embeddings, infill
from trouper.web.openai.chat_completions import ChatRequest, chat_to_generate
from trouper.web.openai.chat_dialect import ChatDialect
from trouper.web.openai.completion_dialect import CompletionDialect
from trouper.web.openai.completions import CompletionRequest, completion_to_generate, picked
from trouper.web.openai.model_listing import listed_body, listing_body
from trouper.web.openai.openai_dialect import Envelope, Extras, token_text_of
from trouper.web.openai.parameters import Parameters, stream_options
from trouper.web.openai.tokenize import (
    LONG_TEXT,
    LONG_TOKENS,
    STRING_BYTES,
    TEXT_FACTOR,
    DetokenizeRequest,
    TokenizeRequest,
    prompt_of,
    text_bytes_of,
)
from trouper.web.output.call_or_answer import with_calls
from trouper.web.serving.model_names import split_adapter
from trouper.web.serving.service import Served, Service, now
from trouper.web.serving.tool_support import without_tools

OPENAI = partial(Endpoint, method="POST", tag="OpenAI")


class OpenAi:
    def __init__(self, service: Service) -> None:
        self._service = service

    def _envelope(self, prefix: str, served: Served, parsed: Parameters) -> Envelope:
        response_id = prefix + self._service.request_id
        self._service.note_response_id(response_id)
        return Envelope(
            id=response_id,
            created=now(),
            model=served.name,
            fingerprint=served.fingerprint,
            tokenizer=served.runtime.tokenizer,
            tokens_as_ids=parsed.return_tokens_as_token_ids,
        )

    @OPENAI(
        path="/v1/chat/completions",
        operation="createChatCompletion",
        summary="Answer a conversation",
        last_event="[DONE]",
        also=GENERATES,
        request=ChatRequest,
        answer=ref("ChatCompletion"),
        events=either(ref("ChatCompletionChunk"), ref("Error")),
        examples={
            "A question": {
                "messages": [{"role": "user", "content": "Who was Molière?"}],
                "max_tokens": 9,
            }
        },
    )
    async def chat(self) -> Response:
        parsed = await self._service.read(ChatRequest.parse)
        served = await self._service.served(parsed.model, parsed.adapters)
        if self._service.omits_tools(parsed.parsed_tools, served):
            parsed = without_tools(parsed)
        images = self._service.image_parts(served)
        generates = await self._service.run_off_loop(
            chat_to_generate, parsed, self._service.request_id, served.sampling_defaults, images
        )
        generates = await self._service.with_images(generates, images)
        extras = Extras(stream_options(parsed), parsed.return_token_ids, parsed.n)
        tools, tokenizer = parsed.parsed_tools, served.runtime.tokenizer
        generates = with_calls(generates, tools, tokenizer, self._service.report)
        answers = await self._service.submit(served, generates, parsed.priority)
        parsers = (
            self._service.parsers(served, tools, answers[0])
            if tools.offered or tokenizer.thinking
            else None
        )
        dialect = ChatDialect(self._envelope("chatcmpl-", served, parsed), extras, parsers)
        return await self._service.respond(dialect, answers, stream=parsed.stream)

    @OPENAI(
        path="/v1/completions",
        operation="createCompletion",
        summary="Continue a text",
        last_event="[DONE]",
        also=GENERATES,
        request=CompletionRequest,
        answer=ref("Completion"),
        events=either(ref("CompletionChunk"), ref("Error")),
        examples={"A beginning": {"prompt": "Once upon a time", "max_tokens": 9}},
    )
    async def completions(self) -> Response:
        parsed = await self._service.read(CompletionRequest.parse)
        served = await self._service.served(parsed.model, parsed.adapters)
        generates = await self._service.run_off_loop(
            completion_to_generate, parsed, self._service.request_id, served.sampling_defaults
        )
        extras = Extras(stream_options(parsed), parsed.return_token_ids, parsed.candidates)
        if parsed.echo:
            self._service.hold(
                TEXT_FACTOR * sum(characters_of(generate.prompt) for generate in generates)
            )
        answers = await self._service.submit(served, generates, parsed.priority)

        def echo(index: int) -> str:
            first = index // parsed.n * parsed.candidates
            prompt = generates[first].prompt
            tokenizer = served.runtime.tokenizer
            if isinstance(prompt, InfillPrompt):
                return (
                    prompt.prefix
                    if isinstance(prompt.prefix, str)
                    else token_text_of(prompt.prefix, tokenizer)
                )
            if isinstance(prompt, TextPrompt):
                return prompt.text
            return token_text_of(answers[first].accepted.prompt_tokens, tokenizer)

        dialect = CompletionDialect(
            self._envelope("cmpl-", served, parsed),
            extras,
            echo=echo if parsed.echo else None,
            scores=parsed.echo and parsed.logprobs is not None,
            silent=parsed.max_tokens == 0,
            pick=partial(picked, parsed),
        )
        return await self._service.respond(dialect, answers, stream=parsed.stream)

    @Endpoint(
        method="POST",
        path="/infill",
        operation="createInfill",
        tag="llama.cpp",
        summary="Fill a gap in a text",
        description="For models that were trained to fill in the middle, which their vocabulary "
        "says.",
        request=infill.InfillRequest,
        answer=infill.FILLED,
        events=titled("InfillEvent", either(infill.FILLED_PART, infill.FILLED, ref("Error"))),
        also=GENERATES,
        examples={
            "A function": {
                "input_prefix": "def add(a, b):\n",
                "input_suffix": "\n\nprint(add(1, 2))",
            }
        },
    )
    async def infill(self) -> Response:
        parsed = await self._service.read(infill.InfillRequest.parse)
        served = await self._service.served(parsed.model, parsed.adapters)
        generate = infill.infill_to_generate(
            parsed, self._service.request_id, served.sampling_defaults
        )
        with called({"suffix": "input_suffix", "prompt": "input_prefix"}):
            answers = await self._service.submit(served, [generate], parsed.priority)
        return await self._service.respond(
            infill.InfillDialect(served.name, silent=parsed.max_tokens == 0),
            answers,
            stream=parsed.stream,
        )

    @OPENAI(
        path="/v1/embeddings",
        operation="createEmbedding",
        summary="Texts as vectors",
        description="Hidden states, pooled as the model's own files say or else their mean; of "
        "length one.",
        request=embeddings.EmbeddingRequest,
        answer=embeddings.EMBEDDINGS,
        also=GENERATES,
        examples={"Two texts": {"input": ["a cat", "a dog"]}},
    )
    async def embeddings(self) -> Response:
        parsed = await self._service.read(embeddings.EmbeddingRequest.parse)
        served = await self._service.served(parsed.model)
        card = served.runtime.model
        generates = await self._service.run_off_loop(
            embeddings.embedding_to_generate, parsed, self._service.request_id, card
        )
        if card.kind == "generator" and "embed" not in card.id.lower():
            self._service.warn_once(
                f"{served.name} is not known as an embedder: its vectors may say little"
            )
        if card.embedding is not None:
            self._service.hold(len(generates) * card.embedding.dimensions * embeddings.NUMBER_BYTES)
        at_a_time = embeddings.AT_A_TIME
        starts = range(0, len(generates), at_a_time)
        groups = [generates[start : start + at_a_time] for start in starts]
        with called({"prompt": "input"}):
            answers = await self._service.submit_groups(served, groups, parsed.priority)
        for answer in answers:
            await answer.next()
        prompt_tokens = sum(len(answer.accepted.prompt_tokens) for answer in answers)
        vectors = [answer.embedding for answer in answers]
        body = partial(embeddings.embeddings_body, parsed, served.name, vectors, prompt_tokens)
        return await formatted(body, is_long=sum(map(len, vectors)) > embeddings.LONG_VECTORS)

    @Endpoint(
        method="POST",
        path="/tokenize",
        operation="tokenize",
        tag="Tokens",
        summary="The tokens of a text or a conversation",
        also=COUNTS,
        request=TokenizeRequest,
        answer=answer_schemas.TOKENIZED,
        examples={"A text": {"prompt": "Once upon a time"}},
    )
    async def tokenize(self) -> Response:
        parsed = await self._service.read(TokenizeRequest.parse)
        served = await self._service.served(parsed.model)
        self._service.account(served.name)
        images = self._service.image_parts(served)
        prompt = await self._service.run_off_loop(prompt_of, parsed, images)
        prompt = await self._service.prompt_with_images(prompt, images)
        tokens = await self._service.tokens(served, prompt)
        text, size = served.runtime.tokenizer.token_text, served.runtime.context_length
        if parsed.return_token_strs:
            self._service.hold(STRING_BYTES * len(tokens))

        def body() -> Json:
            strings = [*map(text, tokens)] if parsed.return_token_strs else None
            return {
                "count": len(tokens),
                "max_model_len": size,
                "tokens": tokens,
                "token_strs": strings,
            }

        return await formatted(body, is_long=len(tokens) > LONG_TOKENS)

    @Endpoint(
        method="POST",
        path="/detokenize",
        operation="detokenize",
        tag="Tokens",
        summary="The text of tokens",
        also=COUNTS,
        request=DetokenizeRequest,
        answer=answer_schemas.DETOKENIZED,
        examples={"Two tokens": {"tokens": [72, 105]}},
    )
    async def detokenize(self) -> Response:
        parsed = await self._service.read(DetokenizeRequest.parse)
        served = await self._service.served(parsed.model)
        self._service.account(served.name)
        tokenizer, vocabulary = served.runtime.tokenizer, served.runtime.model.vocab_size
        if len(parsed.tokens) > LONG_TOKENS:
            self._service.takes_long()
        size = await self._service.run_off_loop(text_bytes_of, parsed, tokenizer, vocabulary)
        self._service.hold(TEXT_FACTOR * size)
        text = await self._service.run_off_loop(token_text_of, parsed.tokens, tokenizer)
        return await formatted(lambda: {"prompt": text}, is_long=size > LONG_TEXT)

    @Endpoint(
        method="GET",
        path="/v1/models",
        operation="listModels",
        tag="OpenAI",
        summary="The models that are served",
        answer=answer_schemas.MODELS,
    )
    async def models(self) -> Response:
        return as_json(listing_body(self._service.entries()))

    @Endpoint(
        method="GET",
        path="/v1/models/<path:model>",
        operation="retrieveModel",
        tag="OpenAI",
        summary="One of them",
        answer=ref("ModelBody"),
    )
    async def model(self, model: str) -> Response:
        entries = self._service.entries()
        # A path loses its second slash on the way, and some models are named by their directory.
        absolute = any(f"/{model}" in entry.names for entry in entries)
        base, adapter = split_adapter(f"/{model}" if absolute else model, entries)
        return as_json(listed_body(self._service.listed(base or model), adapter))
