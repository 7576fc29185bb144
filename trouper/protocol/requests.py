"""What a client asks for: one prompt, one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from trouper.protocol.grammar import Grammar
from trouper.protocol.sampling import Sampling

Speculation = Literal["ngram", "off"]
"""How a row guesses its next tokens."""


@attrs.frozen
class TextPrompt:
    """Plain text, tokenized as the tokenizer does by default (special tokens included)."""

    text: str


@attrs.frozen
class TokenPrompt:
    """Token ids, used as they are."""

    tokens: tuple[int, ...]


@attrs.frozen
class ChatPrompt:
    """Messages for the model's chat template, whose own tokens are used once (F1)."""

    messages: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@attrs.frozen(kw_only=True)
class Timeouts:
    """Seconds; None is no limit. Each has its own error, so a client knows which one it met."""

    queue_s: float | None = None
    first_token_s: float | None = None
    between_tokens_s: float | None = None
    request_s: float | None = None


@attrs.frozen(kw_only=True)
class Generate:
    """One prompt to answer. Several choices or prompts are several of these.

    `max_tokens` None means: what is left of the context. `seed` None in the request becomes a
    drawn seed in `sampling` before this is made. `logprobs` None: none wanted; k: the sampled
    token's and the k most likely tokens' log-probabilities at each position.
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    as_room_allows: bool = False
    """More `max_tokens` than the context has room for mean all the room there is, instead of a refusal."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Before so many tokens nothing ends the answer: neither tokens (they are not sampled, unless a grammar leaves nothing
    else) nor stop strings."""
    grammar: Grammar | None = None
    embed: bool = False
    """No answer, but the prompt as a vector: `Answer.embedding`. `max_tokens` is 1 then."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The prompt is then computed whole, whatever is cached."""
    thinking_tokens: int | None = None
    """A model that thinks does so for at most so many tokens. Not with a grammar, which leaves no room for thinking."""
    speculation: Speculation | None = None
    """Whether it may draft. None: as the settings say. It changes the time that an answer takes, never its tokens."""
    cache_salt: str = ""
    """Prompts share what is cached only with those of the same salt."""
    timeouts: Timeouts | None = None
    """None: the runtime's own defaults."""
