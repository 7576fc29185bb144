"""Prompts: text, token ids, or arrays of either."""

from __future__ import annotations

from typing import Any

from msgspec import Meta

from trouper.protocol.problems import bad_request
from trouper.protocol.requests import Prompt, TextPrompt, TokenPrompt
from trouper.web.http.body_parsing import at_most, is_integer
from trouper.web.http.field_types import MAX_TOKENS, TokenId
from trouper.web.http.request_schema import TEXT, TOKEN, array, either

Prompts = str | list[TokenId | str | list[TokenId]]
"""msgspec has no union of two array types; `prompts_of` refuses mixed ones."""


def prompts_meta(limit: int) -> Meta:
    ids = array(TOKEN, minItems=1, maxItems=MAX_TOKENS)
    schema = either(TEXT, ids, array(either(TEXT, ids), minItems=1, maxItems=limit))
    return Meta(
        extra={"schema": schema, "explains": lambda value, path: prompts_of(value, path, limit)}
    )


def prompts_of(value: Any, name: str, limit: int) -> tuple[Prompt, ...]:
    """Return at most `limit` prompts. Raises `RequestFailed` (400)."""
    if isinstance(value, str):
        return (_text(value, name),)
    if not isinstance(value, list) or not value:
        message = f"{name} must be a string, an array of strings or token ids; not empty"
        raise bad_request(message, name, "invalid_type")
    at_most(name, value, MAX_TOKENS)
    if all(map(is_integer, value)):
        return (_tokens(value, name),)
    if len(value) > limit:
        raise bad_request(
            f"{name} may hold {limit} of them, not {len(value)}", name, "invalid_value"
        )
    return tuple(_prompt(item, f"{name}.{index}") for index, item in enumerate(value))


def _prompt(item: Any, path: str) -> Prompt:
    if isinstance(item, str):
        return _text(item, path)
    if isinstance(item, list):
        at_most(path, item, MAX_TOKENS)
    if isinstance(item, list) and all(map(is_integer, item)):
        return _tokens(item, path)
    raise bad_request(f"{path} must be a string or an array of token ids", path, "invalid_type")


def _text(text: str, path: str) -> TextPrompt:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise bad_request(f"{path} holds a lone surrogate", path, "invalid_text") from None
    return TextPrompt(text)


def _tokens(tokens: list[float], path: str) -> TokenPrompt:
    if any(not 0 <= token < 2**31 for token in tokens):
        raise bad_request("token ids must be between 0 and 2^31 - 1", path, "invalid_token")
    return TokenPrompt(tuple(map(int, tokens)))
