"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any

import attrs

from trouper.actors.runtime.prompt_tokenizing import check_text
from trouper.protocol.model import Tokenizer
from trouper.protocol.problems import bad_request
from trouper.protocol.requests import ChatPrompt, Prompt, TextPrompt
from trouper.web.http.body_parsing import combination, structure
from trouper.web.http.request_schema import NULL, TEXT, TOKEN, Json, Refused, limits, schema
from trouper.web.openai import schemas
from trouper.web.openai.chat_completions import TEMPLATE_KWARGS, messages_of, template_kwargs
from trouper.web.openai.chat_dialect import token_text_of
from trouper.web.openai.schemas import MAX_TOKENS

NOT_SUPPORTED: Refused = {
    "add_special_tokens": (True,),
    "return_token_strs": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "tools": ([],),
}


PROMPT_OR_MESSAGES: Json = {
    "anyOf": [
        {
            "properties": {"prompt": TEXT, "messages": NULL, "chat_template_kwargs": NULL},
            "required": ["prompt"],
        },
        {"properties": {"prompt": NULL, "messages": {"type": "array"}}, "required": ["messages"]},
    ]
}


@attrs.frozen(kw_only=True)
class TokenizeRequest:
    model: str | None = None
    prompt: str | None = None
    messages: Any = attrs.field(default=None, metadata=schema(schemas.MESSAGES))
    chat_template_kwargs: Any = attrs.field(default=None, metadata=schema(TEMPLATE_KWARGS))


@attrs.frozen(kw_only=True)
class DetokenizeRequest:
    model: str | None = None
    tokens: tuple[int, ...] = attrs.field(metadata=limits(maxItems=MAX_TOKENS, items=TOKEN))


def parse_tokenize(body: dict[str, Any]) -> TokenizeRequest:
    return structure(body, TokenizeRequest, NOT_SUPPORTED)


def parse_detokenize(body: dict[str, Any]) -> DetokenizeRequest:
    return structure(body, DetokenizeRequest, {})


def prompt_of(request: TokenizeRequest) -> Prompt:
    """Return the prompt to tokenize. Raises `RequestFailed` (400)."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give either prompt or messages", "prompt", "missing_required_parameter")
    if request.prompt is not None:
        if request.chat_template_kwargs is not None:
            raise combination("chat_template_kwargs needs messages", "chat_template_kwargs")
        check_text(request.prompt, "prompt")
        return TextPrompt(request.prompt)
    return ChatPrompt(messages_of(request.messages), template_kwargs(request.chat_template_kwargs))


def text_of(request: DetokenizeRequest, tokenizer: Tokenizer, vocabulary: int) -> str:
    """Return the text of tokens as `token_text_of` does. Raises `RequestFailed` (400)."""
    for index, token in enumerate(request.tokens):
        if not 0 <= token < vocabulary:
            raise bad_request(
                f"tokens.{index} is not between 0 and {vocabulary - 1}", f"tokens.{index}", "invalid_token"
            )
    return token_text_of(request.tokens, tokenizer)
