"""What the rest of the server knows of a loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import trio

from trouper.protocol.capabilities import EVERYTHING, UNCHECKED, Capabilities, SelfCheck
from trouper.protocol.grammar import Grammar
from trouper.protocol.kv import KvLayout
from trouper.protocol.plans import Plan, Pooling, Stepped
from trouper.protocol.ranks import Joined


class Tokenizer(Protocol):
    """Text to tokens and back. Pure and safe from any thread."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a turn, of the tokenizer, the model's config and its generation config (F16)."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """The tokenizer's default. `special`: with the tokens that it puts around a text."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> tuple[int, ...]:
        """The chat template's tokens, once (F1). Raises `RequestFailed` (400) if the template refuses."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]) -> str | None:
        """The chat template's text, whose tokens without special ones are those of `encode_chat`; None if a template of this
        model gives no text. Raises `RequestFailed` (400) if the template refuses."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the visible text; b"" for special tokens. One char may span tokens."""

    def token_text(self, token: int) -> str:
        """A printable form of one token, for logprobs; special tokens by name."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """What the model writes before and after it thinks; None if it does not."""

    def marker_tokens(self, marker: str) -> tuple[int, ...]:
        """Of what stands before or after thinking, as the model writes it."""

    @property
    def calling(self) -> tuple[str, str] | None:
        """What the model writes before and after a call of a tool; None if it has not learnt to."""

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """What stands between `calling` to (name, arguments as JSON) of each call. Raises `ValueError` and its like."""

    def compile_grammar(self, grammar: Grammar, timeout_s: float) -> object:
        """Compile a grammar for the engine, which finds it for as long as the returned object is kept. For any thread. Raises
        `RequestFailed` (400) if it cannot be followed, or takes longer than `timeout_s`."""


@attrs.frozen
class EmbeddingStats:
    """What vectors a model gives: of so many numbers, from the hidden states of all tokens, the last, or the first."""

    dimensions: int
    pooling: Pooling


@attrs.frozen(kw_only=True)
class ModelCard:
    """The facts of a loaded model."""

    id: str
    created: int
    """Unix seconds."""
    context_length: int
    vocab_size: int
    architecture: str
    dtype: str
    weights_bytes: int
    """On this rank."""
    device: str
    capabilities: Capabilities = EVERYTHING
    """What rows may do."""
    self_check: SelfCheck = UNCHECKED
    """How that was found."""
    kv: KvLayout = KvLayout(cached=False)
    cache_bytes: int = 0
    """What the device can spare for cached blocks, unless --cache-memory says otherwise."""
    fingerprint: str = ""
    """Of the weights' content, adapter, architecture and dtype, as hex; "" if nothing may be kept on disk."""
    embedding: EmbeddingStats | None = None
    """None: it gives no embeddings."""
    ranks: int = 1
    """Processes that compute it together."""
    drafts_by_default: bool = True
    """Whether rows of which nobody says anything draft, if they can."""

    @property
    def batching(self) -> str:
        """How rows share a step: "batched", or "row by row" with the reason."""
        return self.capabilities.description

    @property
    def no_drafts(self) -> str:
        """Why rows cannot draft tokens and take wrong ones back; "" if they can."""
        return self.capabilities.drafts


@attrs.frozen
class LoadedModel:
    card: ModelCard
    tokenizer: Tokenizer


@attrs.frozen(kw_only=True)
class MemoryStats:
    """Bytes, from the device itself (R14)."""

    active_bytes: int
    spare_bytes: int
    """Held by the allocator for reuse."""
    limit_bytes: int
    resident_bytes: int = 0
    """Of the process, with what its heaps keep; 0 where nothing can be given back, or nothing is known."""


class Engine(Protocol):
    """What ModelStepper drives. The real one has an OS thread for life; the simulated one is async."""

    async def join(self, invitation: bytes) -> Joined:
        """Find the other ranks, before `load`. Rank 0's invitation becomes everybody's. Alone, this returns at once. Waits
        for all of them, in native code."""

    async def load(self) -> LoadedModel:
        """Load the model, once. Raises `ModelUnusable`."""

    async def step(self, plans: trio.MemoryReceiveChannel[Plan], results: trio.MemorySendChannel[Stepped]) -> None:
        """Answer plans until their channel ends, starting with no rows. May be called again after it raised. Raises
        `RankDiffers` before it launches a plan whose digest is not of its own state."""

    def memory(self) -> MemoryStats: ...

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Own the thread (or nothing) until cancelled."""
