"""RequestIntake. Waits on requests from the edge; owns validation against the model and tokenizing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import attrs
import trio

from trouper.actors.cause import cause_of
from trouper.actors.submission import Submission
from trouper.protocol.errors import DRAINING, Problem, RequestFailed, bad_request
from trouper.protocol.model import LoadedModel, Tokenizer
from trouper.protocol.plans import ThinkingLimit
from trouper.protocol.requests import ChatPrompt, Generate, Prompt, TextPrompt, TokenPrompt
from trouper.protocol.settings import Settings

log = logging.getLogger("trouper.intake")

LONG_TEXT = 20_000
"""Characters beyond which tokenizing leaves the event loop: about 5 ms of it."""


@attrs.frozen(eq=False)
class Admitted:
    """A request that the model can answer: its tokens, and how many more it may have."""

    submission: Submission
    prompt: tuple[int, ...]
    max_tokens: int
    thinking: ThinkingLimit | None = None


async def take_in_requests(
    requests: trio.MemoryReceiveChannel[Submission],
    admitted: trio.MemorySendChannel[Admitted],
    model: LoadedModel,
    settings: Settings,
) -> None:
    """The actor. Ends when the edge closes `requests`; the request in hand is always answered."""
    async for submission in requests:
        try:
            message = await prepare(submission, model, settings)
        except RequestFailed as refused:
            submission.fail(refused.problem)
        except (trio.Cancelled, KeyboardInterrupt, SystemExit):
            submission.fail(DRAINING)
            raise
        except BaseException as crash:  # noqa: BLE001 - panics of Rust code are no `Exception`.
            _give_up(submission, crash)
        else:
            await _pass_on(message, admitted)


def _give_up(submission: Submission, crash: BaseException) -> None:
    """A crash here concerns one request alone, and nothing of it is left. With 422 clients do not send it again."""
    log.error("request %s could not be prepared: %s", submission.request.request_id, cause_of(crash))
    problem = Problem(422, "the request could not be prepared", "invalid_request_error", None, "intake_failed")
    submission.fail(problem)


async def _pass_on(message: Admitted, admitted: trio.MemorySendChannel[Admitted]) -> None:
    try:
        await admitted.send(message)
    except BaseException:
        message.submission.fail(DRAINING)
        raise


async def prepare(submission: Submission, model: LoadedModel, settings: Settings) -> Admitted:
    """Raises `RequestFailed` (400) naming the parameter."""
    request = submission.request
    check_text(request.cache_salt, "cache_salt")
    prompt = await tokenize(request.prompt, model.tokenizer)
    check_tokens(request, prompt, model.card.vocab_size)
    if request.embed and model.card.embedding is None:
        raise bad_request("this model gives no embeddings", "model", "embeddings_not_supported")
    if request.speculation == "ngram" and model.card.no_drafts:
        raise bad_request(
            f"speculation cannot be ngram: rows of this model draft nothing ({model.card.no_drafts}); leave it out",
            "speculation",
            "speculation_not_supported",
        )
    if request.grammar is not None:
        await trio.to_thread.run_sync(model.tokenizer.check_grammar, request.grammar)
    most = room(request, len(prompt), model.card.context_length, settings)
    return Admitted(submission, prompt, most, thinking_limit(request, prompt, model.tokenizer))


def thinking_limit(request: Generate, prompt: Sequence[int], tokenizer: Tokenizer) -> ThinkingLimit | None:
    """None where nothing bounds it, or the model does not think."""
    if request.thinking_tokens is None or request.grammar is not None or tokenizer.thinking is None:
        return None
    start, end = (tokenizer.marker_tokens(marker) for marker in tokenizer.thinking)
    return ThinkingLimit(request.thinking_tokens, start, end, thinks_already(prompt, tokenizer)) if end else None


def thinks_already(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends inside of thinking: some templates open it."""
    if tokenizer.thinking is None:
        return False
    start, end = tokenizer.thinking
    tail = b"".join(tokenizer.token_bytes(token) for token in prompt[-32:]).decode("utf-8", "replace")
    return tail.rfind(start) > tail.rfind(end)


async def tokenize(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    match prompt:
        case TokenPrompt(tokens=tokens):
            return tokens
        case TextPrompt(text=text):
            if check_text(text, "prompt") > LONG_TEXT:
                return await trio.to_thread.run_sync(tokenizer.encode, text)
            return tokenizer.encode(text)
        case ChatPrompt(messages=messages, template_kwargs=kwargs):
            if not tokenizer.has_chat_template:
                raise bad_request(
                    "this model has no chat template; use /v1/completions", "messages", "no_chat_template"
                )
            if check_text((messages, kwargs), "messages") > LONG_TEXT:
                return await trio.to_thread.run_sync(lambda: tokenizer.encode_chat(messages, **kwargs))
            return tokenizer.encode_chat(messages, **kwargs)


def check_text(value: object, param: str) -> int:
    r"""How many characters are inside: descriptions of tools are long, too. JSON's "\ud800" makes a string that is no text
    and that crashes tokenizers: a user's mistake, not a bug. Raises `RequestFailed` (400)."""
    characters = 0
    inside: list[object] = [value]
    while inside:
        one = inside.pop()
        if one is None or isinstance(one, int | float):
            continue
        if isinstance(one, str):
            characters += len(one)
            if not one.isascii():
                _encode(one, param)
        elif isinstance(one, dict):  # Before Mapping, which is slow to ask for.
            inside += one
            inside += one.values()
        elif isinstance(one, list | tuple):
            inside += one
        elif isinstance(one, Mapping):
            inside += (*one.keys(), *one.values())
    return characters


def _encode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request("half of a surrogate pair is no text", param, "invalid_text") from None


def check_tokens(request: Generate, prompt: tuple[int, ...], vocab_size: int) -> None:
    if not prompt:
        raise bad_request("the prompt is empty; send at least one token", "prompt", "empty_prompt")
    if not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise bad_request(f"token ids must be between 0 and {vocab_size - 1}", "prompt", "invalid_token")
    for token, _ in request.sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise bad_request(f"token {token} is not between 0 and {vocab_size - 1}", "logit_bias", "invalid_token")


def room(request: Generate, prompt_tokens: int, context_length: int, settings: Settings) -> int:
    """How many tokens the answer may have."""
    if prompt_tokens > settings.max_prompt_tokens:
        raise bad_request(
            f"the prompt has {prompt_tokens} tokens, more than --max-prompt-tokens {settings.max_prompt_tokens}",
            "prompt" if not isinstance(request.prompt, ChatPrompt) else "messages",
            "context_length_exceeded",
        )
    context = min(context_length, settings.max_kv_size or context_length)
    left = context - prompt_tokens
    if left < 1 or ((request.max_tokens or 0) > left and not request.as_room_allows):
        raise bad_request(
            f"the context holds {context} tokens; {prompt_tokens} of prompt and {request.max_tokens or 1} of answer are "
            "more: shorten the prompt or lower max_tokens",
            "max_tokens" if left >= 1 else ("messages" if isinstance(request.prompt, ChatPrompt) else "prompt"),
            "context_length_exceeded",
        )
    return min(request.max_tokens or settings.default_max_tokens, left)
