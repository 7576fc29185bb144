"""The RequestIntake actor. Waits on requests from the edge; owns validation against the model,
tokenizing and the compiling of grammars."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import takewhile

import attrs
import trio

from trouper.actors.runtime.image_prompts import check_images, insert_images
from trouper.actors.runtime.prompt_tokenizing import (
    check_text,
    is_short,
    lane_of_text,
    max_prompt_tokens_of,
    pair_tokens_of,
    tokens_of,
)
from trouper.actors.runtime.submission import Submission
from trouper.actors.runtime.worker_threads import FairLane, Lane, Lanes
from trouper.actors.scheduling.crash_attribution import cause_of
from trouper.protocol.grammar import MAX_SOURCE, Grammar
from trouper.protocol.model import LoadedModel, Tokenizer
from trouper.protocol.plans import ThinkingLimit
from trouper.protocol.problems import (
    DRAINING,
    NOT_PREPARED,
    SYSTEM_SHORTAGE,
    ContextExcess,
    RequestFailed,
    bad_request,
    context_full,
    is_shortage,
)
from trouper.protocol.requests import ChatPrompt, Generate, InfillPrompt, PairPrompt
from trouper.protocol.settings import Settings
from trouper.protocol.waits import WaitReason

log = logging.getLogger("trouper.request_intake")
LONG_GRAMMAR = 8192
Spread = Callable[[Grammar], Awaitable[None]]

# Short requests are prepared at once, in the order of arrival. Longer ones (a long text, any
# grammar, DRY's breakers) are prepared on worker threads, in lanes, and may be overtaken.


async def take_in_requests(
    requests: trio.MemoryReceiveChannel[Submission],
    admitted: trio.MemorySendChannel[Submission],
    model: LoadedModel,
    settings: Settings,
    spread: Spread | None = None,
) -> None:
    """Run the actor, which ends when `requests` is closed and none is left. `spread` sends a
    grammar to the other ranks."""
    intake = Intake(admitted, model, settings, spread)
    async with trio.open_nursery() as nursery:
        async for submission in requests:
            await intake.take_in(submission, nursery)


class Intake:
    def __init__(
        self,
        admitted: trio.MemorySendChannel[Submission],
        model: LoadedModel,
        settings: Settings,
        spread: Spread | None = None,
    ) -> None:
        self._admitted = admitted
        self._model = model
        self._settings = settings
        self._spread = spread
        self._lanes = Lanes(settings.max_queue_size)

    async def take_in(self, submission: Submission, nursery: trio.Nursery) -> None:
        try:
            lane = lane_of(submission.request)
        except Exception as crash:  # noqa: BLE001
            # A prompt of an embedding program may be anything.
            _give_up(submission, crash)
            return
        if lane is None and submission.request.grammar is None:
            await self._prepare(submission, None)
        else:
            nursery.start_soon(self._prepare, submission, lane)

    async def _prepare(self, submission: Submission, lane: Lane | None) -> None:
        try:
            message = await self._prepared(submission, lane)
            # What `admit` holds for a client that has left would never be given back.
            if message is not None:
                message = None if message.aborted else message.admitted()
        except RequestFailed as refused:
            submission.fail(refused.problem)
        except (trio.Cancelled, KeyboardInterrupt, SystemExit):
            submission.fail(DRAINING)
            raise
        except BaseException as crash:  # noqa: BLE001 - panics of Rust code are no `Exception`.
            _give_up(submission, crash)
        else:
            await self._pass_on(submission, message)

    async def _prepared(self, submission: Submission, lane: Lane | None) -> Submission | None:
        """Tokenize the prompt, then compile the grammar. None if the request was aborted in the
        wait. Raises `RequestFailed`."""
        if lane is None:
            message = prepare(submission, self._model, self._settings)
        else:
            async with self._turn(submission, lane, "tokenizing"):
                if submission.aborted:
                    return None
                message = await self._lanes.run(prepare, submission, self._model, self._settings)
        if submission.request.grammar is not None:
            return await self._with_grammar(message, submission.request.grammar)
        submission.note("preparing", "step")
        return message

    async def _with_grammar(self, message: Submission, grammar: Grammar) -> Submission | None:
        compiled = self._model.tokenizer.known_grammar(grammar)
        if compiled is None:
            lane: Lane = "grammar" if len(grammar.source) <= LONG_GRAMMAR else "long grammar"
            async with self._turn(message, lane, "grammar"):
                if message.aborted:
                    return None
                compile_grammar = self._model.tokenizer.compile_grammar
                compiled = await self._lanes.run(
                    compile_grammar, grammar, self._settings.grammar_timeout_s
                )
        if self._spread is not None:
            message.note("preparing", "grammar", " by all ranks")
            await self._spread(compiled.grammar)
        message.note("preparing", "step")
        request = attrs.evolve(message.request, grammar=compiled.grammar)
        return attrs.evolve(message, request=request, compiled_grammar=compiled)

    @asynccontextmanager
    async def _turn(
        self, submission: Submission, name: Lane, reason: WaitReason
    ) -> AsyncIterator[None]:
        client, lane = submission.request.tenant, self._lanes[name]
        submission.note("preparing", reason, _behind(lane, client))
        async with lane.turn(client):
            submission.note("preparing", reason)
            yield

    async def _pass_on(self, submission: Submission, message: Submission | None) -> None:
        if message is None:
            submission.close()
            return
        try:
            # Mostly there is room. The next request is waited for anyway.
            with suppress(trio.WouldBlock):
                self._admitted.send_nowait(message)
                return
            await self._admitted.send(message)
        except BaseException:
            submission.fail(DRAINING)
            raise


def _behind(lane: FairLane, client: str) -> str:
    if own := lane.ahead_of(client):
        return f", behind {own} of the same client"
    return ", behind those of other clients" if lane.is_busy else ""


def _give_up(submission: Submission, crash: BaseException) -> None:
    log.error(
        "request %s could not be prepared: %s", submission.request.request_id, cause_of(crash)
    )
    submission.fail(SYSTEM_SHORTAGE if is_shortage(crash) else NOT_PREPARED)


def lane_of(request: Generate) -> Lane | None:
    """Lane that tokenizes the prompt; None: at once, on the event loop."""
    if is_short(request.prompt) and not request.sampling.dry:
        return None
    return lane_of_text(request.prompt)


def prepare(submission: Submission, model: LoadedModel, settings: Settings) -> Submission:
    """Check a request and tokenize its prompt. Safe on any thread. Raises `RequestFailed` (400)
    naming the parameter."""
    request, tokenizer = submission.request, model.tokenizer
    check_text(request.cache_salt, "cache_salt")
    check_model(request, model)
    check_images(request.prompt, model.card, _text_only_output(request))
    longest, second_at = max_prompt_tokens_of(model.card, settings), 0
    if submission.prompt:
        prompt, second_at = submission.prompt, submission.second_at
    elif isinstance(request.prompt, PairPrompt):
        prompt, second_at = pair_tokens_of(request.prompt, tokenizer, longest)
    else:
        prompt = tokens_of(request.prompt, tokenizer, longest)
    prompt, images = insert_images(prompt, request.prompt, model.card, tokenizer, settings)
    if request.grammar is not None and isinstance(request.prompt, ChatPrompt):
        prompt = without_open_reasoning(prompt, tokenizer)
    max_tokens = room(request, len(prompt), model.card.context_length, settings)
    check_tokens(request, prompt, model.card.vocab_size)
    check_grammar(request.grammar)
    limit = thinking_limit(request, prompt, tokenizer, model.card.vocab_size)
    breakers = (
        tokenizer.breakers(request.sampling.dry_sequence_breakers) if request.sampling.dry else None
    )
    if (
        isinstance(request.prompt, InfillPrompt)
        and tokenizer.infill is not None
        and not request.ignore_eos
    ):
        request = attrs.evolve(
            request, stop_token_ids=(*request.stop_token_ids, *tokenizer.infill.ends)
        )
    return attrs.evolve(
        submission,
        request=request,
        prompt=prompt,
        second_at=second_at,
        images=images,
        max_tokens=max_tokens,
        thinking=limit,
        breakers=breakers,
    )


def _text_only_output(request: Generate) -> str:
    if request.embed:
        return "embeddings"
    return "" if request.prompt_logprobs is None else "scores as a prompt"


def check_model(request: Generate, model: LoadedModel) -> None:
    """Refuse what this model cannot do: embeddings or generation, logits processors that nobody
    gave, a source of drafts that is not there. Raises `RequestFailed` (400)."""
    is_pair = isinstance(request.prompt, PairPrompt)
    if is_pair and not (request.embed and model.card.scores):
        raise bad_request("this model scores no pairs", "model", "rerank_not_supported")
    if request.embed and not is_pair and model.card.embedding is None:
        raise bad_request("this model gives no embeddings", "model", "embeddings_not_supported")
    if model.card.no_generation and not request.embed:
        gives = "scores of pairs" if model.card.scores else "embeddings"
        raise bad_request(
            f"this model gives {gives} alone: {model.card.no_generation}",
            "model",
            "generation_not_supported",
        )
    if unknown := sorted(set(request.logits_processors) - set(model.card.logits_processors)):
        raise bad_request(
            f"logits processor {unknown[0]!r} is unknown: give it to run_runtime",
            "logits_processors",
            "unknown_logits_processor",
        )
    if request.speculation in ("ngram", "draft_model", "mtp") and model.card.no_drafts:
        raise bad_request(
            f"speculation cannot be {request.speculation}: rows of this model draft nothing "
            f"({model.card.no_drafts}); leave it out",
            "speculation",
            "speculation_not_supported",
        )
    if request.speculation == "draft_model" and model.card.draft_model is None:
        raise bad_request(
            "speculation cannot be draft_model: this model was started without --draft-model; "
            "leave it out, or say ngram",
            "speculation",
            "speculation_not_supported",
        )
    if request.speculation == "mtp" and model.card.no_mtp:
        raise bad_request(
            f"speculation cannot be mtp: this model has no MTP head ({model.card.no_mtp}); leave "
            "it out, or say ngram",
            "speculation",
            "speculation_not_supported",
        )


def check_grammar(grammar: Grammar | None) -> None:
    if grammar is not None and len(grammar.source) > MAX_SOURCE:
        size = len(grammar.source)
        message = (
            f"{grammar.param} has {size} characters as a grammar, more than {MAX_SOURCE}: make it "
            "smaller"
        )
        raise bad_request(message, grammar.param, "invalid_grammar")


def thinking_limit(
    request: Generate, prompt: Sequence[int], tokenizer: Tokenizer, vocab_size: int
) -> ThinkingLimit | None:
    """Limit on the reasoning of a request; None without a bound, without reasoning, or without a
    logit for the token that ends reasoning."""
    # Tokenizers may have more tokens than their model.
    if (
        request.thinking_token_budget is None
        or request.grammar is not None
        or tokenizer.thinking is None
    ):
        return None
    start, end = (tokenizer.marker_tokens(marker) for marker in tokenizer.thinking)
    if not end or max(end) >= vocab_size:
        return None
    return ThinkingLimit(
        request.thinking_token_budget, start, end, thinks_already(prompt, tokenizer)
    )


def thinks_already(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends inside a reasoning section, which some templates open."""
    # A marker before a special token belongs to an earlier turn.
    if tokenizer.thinking is None:
        return False
    start, end = tokenizer.thinking
    pieces = takewhile(bool, map(tokenizer.token_bytes, prompt[:-33:-1]))
    tail = b"".join([*pieces][::-1]).decode("utf-8", "replace")
    return tail.rfind(start) > tail.rfind(end)


def without_open_reasoning(prompt: tuple[int, ...], tokenizer: Tokenizer) -> tuple[int, ...]:
    # A grammar holds from the first token on, which leaves no room for reasoning, and parsers would
    # take the answer for reasoning.
    if tokenizer.thinking is None or not thinks_already(prompt, tokenizer):
        return prompt
    end = len(prompt)
    while (data := tokenizer.token_bytes(prompt[end - 1])) and not data.strip():
        end -= 1
    return (*prompt[:end], *tokenizer.encode(f"\n\n{tokenizer.thinking[1]}\n\n", special=False))


def check_tokens(request: Generate, prompt: tuple[int, ...], vocab_size: int) -> None:
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise bad_request(
            f"out of vocabulary: token ids must be between 0 and {vocab_size - 1}",
            "prompt",
            "invalid_token",
        )
    for param, tokens in (
        ("logit_bias", tuple(token for token, _ in request.sampling.logit_bias)),
        ("logprob_tokens", request.logprob_tokens),
    ):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise bad_request(
                    f"token {token} is not between 0 and {vocab_size - 1}", param, "invalid_token"
                )


def room(request: Generate, prompt_tokens: int, context_length: int, settings: Settings) -> int:
    """Maximum number of tokens of the answer. Raises `RequestFailed` (400) if the context has no
    room."""
    if not prompt_tokens:
        raise bad_request("the prompt is empty; send at least one token", "prompt", "empty_prompt")
    prompt_name = "messages" if isinstance(request.prompt, ChatPrompt) else "prompt"
    limit = settings.max_prompt_tokens
    if limit is not None and prompt_tokens > limit:
        excess = ContextExcess(prompt_tokens, 0, limit)
        raise context_full(excess, prompt_name, flags="--max-prompt-tokens")
    context = min(context_length, settings.max_kv_size or context_length)
    # A vector takes no token behind the prompt.
    answer = 0 if request.embed else request.max_tokens or 1
    remaining = context - prompt_tokens + int(request.embed)
    asks_for_more = (request.max_tokens or 0) > remaining and not request.as_room_allows
    if remaining < 1 or asks_for_more:
        excess = ContextExcess(prompt_tokens, answer, context)
        raise context_full(excess, "max_tokens" if remaining >= 1 else prompt_name)
    return min(request.max_tokens or settings.default_max_tokens, remaining)
