"""POST /tokenize and /detokenize in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from trouper.actors.runtime.prompt_tokenizing import check_text
from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Prompt, TextPrompt
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import MAX_TOKENS, Model, TokenId
from trouper.web.http.request_body import Body, Report, refuse, structure
from trouper.web.http.request_schema import Json, Refused
from trouper.web.openai import schemas
from trouper.web.openai.chat_messages import Messages, ignored_of, messages_of
from trouper.web.openai.template_kwargs import TemplateKwargs, template_kwargs

LONG_TOKENS, LONG_TEXT = 5000, 2**17
"""Larger answers are made in a thread."""
TEXT_FACTOR = 6
"""Bytes of memory per byte of text."""


class TokenizeRequest(Body, kw_only=True, frozen=True):
    refused: ClassVar[Refused] = {
        "add_special_tokens": (True,),
        "return_token_strs": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "tools": ([],),
    }
    essential: ClassVar[frozenset[str]] = frozenset(refused)
    rules: ClassVar[tuple[Json, ...]] = (schemas.PROMPT_OR_MESSAGES,)
    model: Model | None = None
    prompt: str | None = None
    messages: Messages | None = None
    chat_template_kwargs: TemplateKwargs | None = None


class DetokenizeRequest(Body, kw_only=True, frozen=True):
    model: Model | None = None
    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]


def parse_tokenize(body: dict[str, Any], report: Report = refuse) -> TokenizeRequest:
    if (body.get("prompt") is None) == (body.get("messages") is None):
        raise bad_request("give either prompt or messages", "prompt", "missing_required_parameter")
    return structure(body, TokenizeRequest, report)


def parse_detokenize(body: dict[str, Any], report: Report = refuse) -> DetokenizeRequest:
    return structure(body, DetokenizeRequest, report)


def prompt_of(request: TokenizeRequest) -> Prompt:
    """Raises `RequestFailed` (400)."""
    if request.prompt is not None:
        if request.chat_template_kwargs is not None:
            raise combination("chat_template_kwargs needs messages", "chat_template_kwargs")
        check_text(request.prompt, "prompt")
        return TextPrompt(request.prompt)
    messages = request.messages or ()
    return ChatPrompt(
        messages_of(messages), template_kwargs(request.chat_template_kwargs), ignored_of(messages)
    )


def text_bytes_of(request: DetokenizeRequest, tokenizer: Tokenizer, vocabulary: int) -> int:
    """Text length before decoding. Raises `RequestFailed` (400)."""
    for index, token in enumerate(request.tokens):
        if not 0 <= token < vocabulary:
            raise bad_request(
                f"tokens.{index} is not between 0 and {vocabulary - 1}",
                f"tokens.{index}",
                "invalid_token",
            )
    return sum(
        len(tokenizer.token_bytes(token) or tokenizer.token_text(token)) for token in request.tokens
    )
