"""The `thinking` parameter, and signatures of thinking blocks."""

from __future__ import annotations

from base64 import b64decode, b64encode
from functools import partial
from hashlib import sha256
from typing import Annotated, ClassVar, Literal, get_args

import attrs
from msgspec import Meta

from trouper.web.http.body_faults import ordered
from trouper.web.http.body_parsing import combination
from trouper.web.http.field_types import HUGE
from trouper.web.http.leniency import Adapt, known_value
from trouper.web.http.request_body import Body

CARRIES = "trouper.thinking:"


@attrs.frozen
class Thinking:
    """Without a request the template disables thinking where possible."""

    enabled: bool = False
    budget: int | None = None
    """Maximum of thinking tokens: 0 if disabled, None if the model decides."""
    omitted: bool = False


Display = Literal["summarized", "omitted"]


class _Shown(Body, frozen=True):
    adapt: ClassVar[Adapt | None] = partial(known_value, "display", get_args(Display))
    display: Annotated[Display, ordered(Display)] | None = None


class EnabledThinking(_Shown, tag="enabled", kw_only=True, frozen=True):
    """Thinking with a budget. The minimum is Anthropic's."""

    budget_tokens: Annotated[int, Meta(ge=1024, le=HUGE)]


class AdaptiveThinking(_Shown, tag="adaptive", frozen=True):
    """Thinking as long as the model decides."""


class DisabledThinking(Body, tag="disabled", frozen=True):
    """No thinking."""


ThinkingParameter = EnabledThinking | AdaptiveThinking | DisabledThinking


def thinking_of(requested: ThinkingParameter | None, max_tokens: int | None) -> Thinking:
    """Raises `RequestFailed` (400)."""
    if requested is None:
        return Thinking()
    if isinstance(requested, DisabledThinking):
        return Thinking(budget=0)
    budget = requested.budget_tokens if isinstance(requested, EnabledThinking) else None
    if budget is not None and max_tokens is not None and budget >= max_tokens:
        message = f"thinking.budget_tokens must be less than max_tokens, which is {max_tokens}"
        raise combination(message, "thinking.budget_tokens")
    return Thinking(enabled=True, budget=budget, omitted=requested.display == "omitted")


def signature_of(text: str, *, omitted: bool) -> str:
    """Return the signature, which clients send back, with the text of omitted thinking."""
    if omitted:
        return CARRIES + b64encode(text.encode()).decode()
    return sha256(text.encode()).hexdigest()


def thought(text: str, signature: str | None) -> str:
    """Signatures of other servers are ignored."""
    if text or signature is None or not signature.startswith(CARRIES):
        return text
    try:
        return b64decode(signature.removeprefix(CARRIES), validate=True).decode()
    except ValueError:
        return ""
