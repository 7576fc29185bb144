"""POST /tokenize and /detokenize in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from msgspec import Meta

from trouper.actors.runtime.prompt_tokenizing import check_text
from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Prompt, TextPrompt
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import MAX_TOKENS, Model, TokenId
from trouper.web.http.image_source import ImageParts
from trouper.web.http.leniency import Adapt
from trouper.web.http.request_body import Body, Report, refuse, structure
from trouper.web.http.request_schema import Json, Unsupported
from trouper.web.openai import schemas
from trouper.web.openai.chat_completions import about_the_end
from trouper.web.openai.chat_messages import Messages, messages_of
from trouper.web.openai.chat_tools import ChatTools, tools_of
from trouper.web.openai.other_servers import chat_adapted
from trouper.web.openai.parameters import TemplateKwargs, template_kwargs
from trouper.web.openai.schemas import OF_MESSAGES

LONG_TOKENS, LONG_TEXT = 5000, 2**17
"""Larger answers are made in a thread."""
STRING_BYTES = 100
"""Bytes of memory of a token's text."""
TEXT_FACTOR = 6
"""Bytes of memory per byte of text."""


class TokenizeRequest(Body, kw_only=True, frozen=True):
    unsupported: ClassVar[Unsupported] = {"chat_template": ()}
    essential: ClassVar[frozenset[str]] = frozenset(unsupported)
    adapt: ClassVar[Adapt | None] = chat_adapted
    rules: ClassVar[tuple[Json, ...]] = (schemas.PROMPT_OR_MESSAGES,)
    model: Model | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: ChatTools | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = True
    """Of a prompt; a chat template has its own."""
    return_token_strs: bool = False

    @classmethod
    def parse(cls, body: Mapping[str, Any], report: Report = refuse) -> Self:
        if (body.get("prompt") is None) == (body.get("messages") is None):
            message = "give either prompt or messages"
            raise bad_request(message, "prompt", "missing_required_parameter")
        return structure(body, cls, report)


class DetokenizeRequest(Body, kw_only=True, frozen=True):
    model: Model | None = None
    tokens: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]


def prompt_of(request: TokenizeRequest, images: ImageParts | None = None) -> Prompt:
    """`images` reads the images. Raises `RequestFailed` (400)."""
    if request.prompt is not None:
        for name in OF_MESSAGES:
            if getattr(request, name) not in (None, False):
                raise combination(f"{name} needs messages", name)
        check_text(request.prompt, "prompt")
        return TextPrompt(request.prompt, special=request.add_special_tokens)
    messages, tools = request.messages or (), tools_of(request.tools, None, None)
    kwargs = {"tools": tools.described} if tools.described else {}
    kwargs |= about_the_end(request) | template_kwargs(request.chat_template_kwargs)
    images = ImageParts() if images is None else images
    return ChatPrompt(messages_of(messages, tools, images), kwargs, images.unread)


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
