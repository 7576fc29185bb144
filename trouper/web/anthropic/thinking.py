"""What a request says of thinking, and the signature of what was thought."""

from __future__ import annotations

from base64 import b64decode, b64encode
from hashlib import sha256
from typing import Any

import attrs

from trouper.protocol.problems import bad_request
from trouper.web.http.body_parsing import combination, json_type, structure
from trouper.web.http.request_schema import Json, closed, either, limits, schema_of

CARRIES = "trouper.thinking:"


@attrs.frozen
class Thinking:
    """Who does not ask for it gets none where the template can prevent it: such clients look for the answer in the first
    block. Who disables it gets none."""

    enabled: bool = False
    budget: int | None = None
    """Tokens that it may take: none if it is disabled, any number if that is left to the model."""
    omitted: bool = False
    """Its text is not shown."""


@attrs.frozen(kw_only=True)
class Adaptive:
    display: str | None = attrs.field(default=None, metadata=limits(enum=["summarized", "omitted"]))


@attrs.frozen(kw_only=True)
class Enabled(Adaptive):
    budget_tokens: int = attrs.field(metadata=limits(1024, 2**63))
    """The least is the API's own."""


@attrs.frozen(kw_only=True)
class Disabled:
    pass


KINDS: dict[str, type[Adaptive | Disabled]] = {"enabled": Enabled, "adaptive": Adaptive, "disabled": Disabled}


def _kind(name: str) -> Json:
    fields = schema_of(KINDS[name], {})
    return closed({"type": {"const": name}, **fields["properties"]}, "type", *fields.get("required", ()))


THINKING = either(*map(_kind, KINDS))


def thinking_of(value: Any, max_tokens: int | None) -> Thinking:
    """Raises `RequestFailed` (400) naming the parameter."""
    if value is None:
        return Thinking()
    if not isinstance(value, dict):
        raise bad_request(f"thinking must be an object, not {json_type(value)}", "thinking", "invalid_type")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in KINDS:
        message = f"thinking.type must be one of {', '.join(KINDS)}, not {kind!r}"
        raise bad_request(message, "thinking.type", "invalid_value")
    options = {name: option for name, option in value.items() if name != "type"}
    asked = structure(options, KINDS[kind], {}, within="thinking.")
    if not isinstance(asked, Adaptive):
        return Thinking(budget=0)
    budget = asked.budget_tokens if isinstance(asked, Enabled) else None
    if budget is not None and max_tokens is not None and budget >= max_tokens:
        message = f"thinking.budget_tokens must be less than max_tokens, which is {max_tokens}"
        raise combination(message, "thinking.budget_tokens")
    return Thinking(enabled=True, budget=budget, omitted=asked.display == "omitted")


def signature_of(text: str, *, omitted: bool) -> str:
    """Clients expect one and send it back. Of thinking that is not shown it is all that the next turn has."""
    if omitted:
        return CARRIES + b64encode(text.encode()).decode()
    return sha256(text.encode()).hexdigest()


def thought(block: Json) -> str:
    """The text of a thinking block of the history. Somebody else's signature says nothing to us."""
    text: str = block["thinking"]
    signature: str = block.get("signature") or ""
    if text or not signature.startswith(CARRIES):
        return text
    try:
        return b64decode(signature.removeprefix(CARRIES), validate=True).decode()
    except ValueError:
        return ""
