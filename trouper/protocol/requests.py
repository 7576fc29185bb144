"""Requests of clients: one prompt and one answer each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from trouper.protocol.grammar import Grammar
from trouper.protocol.sampling import Sampling

Speculation = Literal["auto", "ngram", "draft_model", "mtp", "off"]
"""What drafts a row's next tokens: its own n-grams, the draft model, whichever of them pays, or
nothing."""
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
"""Bounds of `Generate.priority` that clients may send: 32 bits, which every client's integers
hold."""
BATCH_PRIORITY = MAX_PRIORITY + 1
"""Priority of requests of batches, behind all that clients may send. Such a request waits without a
limit, yields rows to others, and takes no room in the queue from them."""


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
    ignored: tuple[str, ...] = ()
    """Types of those parts of the messages that the model cannot read, such as images; a
    placeholder stands for each."""


@attrs.frozen
class InfillPrompt:
    """A gap to fill between a prefix (text, or token ids) and a suffix, for models that were
    trained to."""

    prefix: str | tuple[int, ...]
    suffix: str
    extra: tuple[tuple[str, str], ...] = ()
    """Other files: name and text of each."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt | InfillPrompt


@attrs.frozen(kw_only=True)
class Timeouts:
    """Time limits in seconds; None or 0: no limit. Each has its own error, so that a client can
    tell which one was exceeded.

    `first_token_s` limits the time without progress of a prefill: each computed chunk begins it
    anew."""

    queue_s: float | None = None
    first_token_s: float | None = None
    between_tokens_s: float | None = None
    request_s: float | None = None


@attrs.frozen(kw_only=True)
class CacheScope:
    """What the server itself keeps cached blocks apart by, beside the client's `cache_salt`. No
    client can choose a value of it."""

    group: str = ""
    """Group of API keys whose requests share cached prompts."""
    adapter: str = ""
    """Adapter that the row's keys and values were computed with."""


UNBOUNDED = 2**63 - 1
"""Maximum of any number that a request may hold. As the length of an answer it says: as long as
there is room."""


@attrs.frozen(kw_only=True)
class Generate:
    """A request to answer one prompt. Several choices or prompts are several requests.

    `max_tokens` None means: the remaining context. `seed` None in the request becomes a
    drawn seed in `sampling` before this is made. `logprobs` None: none requested; k: the sampled
    token's and the k most likely tokens' log-probabilities at each position.
    """

    request_id: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    as_room_allows: bool = False
    """Whether a `max_tokens` beyond the context is reduced to the remaining context instead of
    refused."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Minimum number of tokens before the answer may end, be it by a token (which is not sampled,
    unless a grammar allows nothing else) or by a stop string."""
    grammar: Grammar | None = None
    embed: bool = False
    """Whether to return the prompt as a vector, `Answer.embedding`, instead of an answer.
    `max_tokens` is 1 then."""
    logprobs: int | None = None
    logprob_tokens: tuple[int, ...] = ()
    """Token ids whose log-probabilities come at each position, in place of those of the most
    likely; with `logprobs`."""
    prompt_logprobs: int | None = None
    """Log-probabilities, as with `logprobs`, for each token of the prompt but the first. The whole
    prompt is then computed, whatever is cached."""
    thinking_tokens: int | None = None
    """Maximum number of reasoning tokens. No effect with a grammar, which leaves no room for
    reasoning."""
    speculation: Speculation | None = None
    """Speculation for this request; None: as in the settings. It changes the duration of an answer,
    never its tokens."""
    logits_processors: tuple[str, ...] = ()
    """Names of the embedding program's logits processors that change the row's logits, in order."""
    adapter: str = ""
    """Name of the LoRA adapter that answers; "": the model itself."""
    cache_salt: str = ""
    """Salt of the prefix cache. Prompts share cached blocks only with prompts of the same salt."""
    cache_scope: CacheScope = CacheScope()
    """Prompts share cached blocks only with prompts of the same scope and the same salt."""
    priority: int = 0
    """Lower is scheduled first, as in vLLM."""
    tenant: str = ""
    """Name of the client, the same for all its requests. Tenants take turns where requests are
    prepared, and share rows, the queue and prefill. HTTP clients cannot choose the name: it follows
    from the API key, or from the address where there are no keys."""
    timeouts: Timeouts | None = None
    """Time limits of this request; None: the runtime's defaults."""

    @property
    def names_length(self) -> bool:
        """Whether it says how long the answer may be."""
        return self.max_tokens is not None and self.max_tokens < UNBOUNDED


def ignored_parts(requests: Iterable[Generate]) -> tuple[str, ...]:
    """Return the types of parts that the model cannot read, of all these requests, once each: what
    a response has to name."""
    chats = [request.prompt for request in requests if isinstance(request.prompt, ChatPrompt)]
    return tuple(sorted({name for prompt in chats for name in prompt.ignored}))
