"""The `thinking` parameter of a request, and the signature of a thinking block."""

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
    """The thinking that a request asks for. A request that does not ask gets none where the template can prevent it,
    since such clients expect the answer in the first block. A request that disables it gets none."""

    enabled: bool = False
    budget: int | None = None
    """Maximum number of thinking tokens: none at all if thinking is disabled, unlimited if the model decides."""
    omitted: bool = False
    """Whether the text of the thinking is left out of the answer."""


@attrs.frozen(kw_only=True)
class Adaptive:
    display: str | None = attrs.field(default=None, metadata=limits(enum=["summarized", "omitted"]))


@attrs.frozen(kw_only=True)
class Enabled(Adaptive):
    budget_tokens: int = attrs.field(metadata=limits(1024, 2**63))
    """The minimum is the API's."""


@attrs.frozen(kw_only=True)
class Disabled:
    pass


KINDS: dict[str, type[Adaptive | Disabled]] = {"enabled": Enabled, "adaptive": Adaptive, "disabled": Disabled}


def _kind(name: str) -> Json:
    fields = schema_of(KINDS[name], {})
    return closed({"type": {"const": name}, **fields["properties"]}, "type", *fields.get("required", ()))


THINKING = either(*map(_kind, KINDS))


def thinking_of(value: Any, max_tokens: int | None) -> Thinking:
    """Parse the parameter. Raises `RequestFailed` (400) naming the parameter."""
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
    """Return the signature of a thinking block, which clients expect and send back. For thinking that was left out, it
    is all that the next turn has."""
    if omitted:
        return CARRIES + b64encode(text.encode()).decode()
    return sha256(text.encode()).hexdigest()


def thought(block: Json) -> str:
    """Return the text of a thinking block of the history. The signature of another server carries no information."""
    text: str = block["thinking"]
    signature: str = block.get("signature") or ""
    if text or not signature.startswith(CARRIES):
        return text
    try:
        return b64decode(signature.removeprefix(CARRIES), validate=True).decode()
    except ValueError:
        return ""
