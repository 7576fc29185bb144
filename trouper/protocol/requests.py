"""Requests of clients: one prompt and one answer each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from trouper.protocol.grammar import Grammar
from trouper.protocol.media import ImageSource
from trouper.protocol.sampling import Sampling

Speculation = Literal["auto", "ngram", "draft_model", "mtp", "off"]
"""Source of drafts: n-grams, the draft model, the MTP head, whichever pays, or none."""
# Bounds of `Generate.priority` from clients: 32 bits, which every client's integers hold.
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
# Priority of batches, behind all clients. Such requests wait without limit, yield rows, and take no
# room in the queue.
BATCH_PRIORITY = MAX_PRIORITY + 1


@attrs.frozen
class TextPrompt:
    """Plain text. `special`: with the tokenizer's default special tokens."""

    text: str
    special: bool = True


@attrs.frozen
class TokenPrompt:
    """Token ids, unchanged."""

    tokens: tuple[int, ...]


@attrs.frozen
class ChatPrompt:
    """Messages for the model's chat template, which writes all special tokens."""

    messages: tuple[Mapping[str, Any], ...]
    template_kwargs: Mapping[str, Any] = attrs.field(factory=dict)
    ignored: tuple[str, ...] = ()
    """Types of unreadable parts, such as images; a placeholder stands for each."""
    images: tuple[ImageSource, ...] = ()
    """Files of the parts {"type": "image"} in `messages`, in order."""


@attrs.frozen
class InfillPrompt:
    """A gap between a prefix (text or token ids) and a suffix."""

    prefix: str | tuple[int, ...]
    suffix: str
    extra: tuple[tuple[str, str], ...] = ()
    """Name and text of other files."""


@attrs.frozen
class PairPrompt:
    """A query and a document, which a cross-encoder scores together; with `Generate.embed`."""

    query: str
    document: str


PairTokens = tuple[tuple[int, ...], int]
"""As `Tokenizer.encode_pair` returns them; of a single text with 0."""
Prompt = TextPrompt | TokenPrompt | ChatPrompt | InfillPrompt | PairPrompt


@attrs.frozen(kw_only=True)
class Timeouts:
    """Time limits in seconds; None or 0: no limit. Each has its own error. `first_token_s` limits a
    prefill's time without a computed chunk."""

    queue_s: float | None = None
    first_token_s: float | None = None
    between_tokens_s: float | None = None
    request_s: float | None = None


@attrs.frozen(kw_only=True)
class CacheScope:
    """Separates cached blocks beside the client's `cache_salt`; no client can choose a scope."""

    group: str = ""
    adapter: str = ""


# Maximum of any number in a request. As `max_tokens`: as long as there is room.
UNBOUNDED = 2**63 - 1


@attrs.frozen(kw_only=True)
class Generate:
    """A request to answer one prompt. Several choices or prompts are several requests.

    `max_tokens` None: the remaining context. `logprobs` None: not requested; k: log-probabilities
    of the sampled token and the k most likely at each position."""

    request_id: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    as_room_allows: bool = False
    """Whether a `max_tokens` beyond the context is reduced instead of refused."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Before an end token (unless a grammar allows nothing else) or a stop string ends the
    answer."""
    grammar: Grammar | None = None
    embed: bool = False
    """Whether to return `Answer.embedding` instead of an answer, or the score of a `PairPrompt`;
    `max_tokens` is 1."""
    logprobs: int | None = None
    logprob_tokens: tuple[int, ...] = ()
    """Instead of the most likely; with `logprobs`."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for the prompt from the second token on. The whole prompt is computed."""
    thinking_token_budget: int | None = None
    """Maximum of reasoning tokens. No effect with a grammar."""
    speculation: Speculation | None = None
    """Speculation for this request; None: as in the settings. Changes durations, never tokens."""
    logits_processors: tuple[str, ...] = ()
    """The embedding program's, in order."""
    adapter: str = ""
    cache_salt: str = ""
    """Salt of the prefix cache. Prompts share cached blocks only within one salt."""
    cache_scope: CacheScope = CacheScope()
    """As `cache_salt`: equal scopes share."""
    priority: int = 0
    """Lower is first, as in vLLM."""
    tenant: str = ""
    """Name of the client. Tenants share preparation, rows, the queue and prefill in turns. For HTTP
    the API key, or the address without keys, decides."""
    timeouts: Timeouts | None = None

    @property
    def names_length(self) -> bool:
        return self.max_tokens is not None and self.max_tokens < UNBOUNDED


def ignored_parts(requests: Iterable[Generate]) -> tuple[str, ...]:
    chats = [request.prompt for request in requests if isinstance(request.prompt, ChatPrompt)]
    return tuple(sorted({name for prompt in chats for name in prompt.ignored}))
