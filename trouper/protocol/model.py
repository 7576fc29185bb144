"""Interface of a loaded model to the rest of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import trio

from trouper.protocol.capabilities import EVERYTHING, UNCHECKED, Capabilities, SelfCheck
from trouper.protocol.grammar import Grammar
from trouper.protocol.health import MemoryPressure
from trouper.protocol.kv import KvLayout
from trouper.protocol.plan_channel import PlanReceiver
from trouper.protocol.plans import Breakers, Pooling, Stepped
from trouper.protocol.ranks import Joined

NO_HEAD = "its checkpoint has none"
"""Why most models have no MTP head."""


@attrs.frozen(kw_only=True)
class InfillTokens:
    """Tokens of a vocabulary to fill in the middle."""

    prefix: int
    suffix: int
    middle: int | None
    """Token before the answer; None: the suffix comes first, and the answer goes on behind the
    prefix."""
    file: int | None = None
    """Token before another file; None: there is none."""
    repository: int | None = None
    """Token before the name of the repository; None: there is none."""
    ends: tuple[int, ...] = ()
    """Tokens that end the answer."""


class Tokenizer(Protocol):
    """Text to tokens and back. Pure and safe from any thread."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a turn, of the tokenizer, the model's config and its generation config
        (F16)."""

    @property
    def grammar_end(self) -> int | None:
        """Id that ends an answer that follows a grammar, where the model can sample none of
        `eos_token_ids`; None: it can."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def longest_token(self) -> int:
        """Bytes of the longest token."""

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Encode a text. `special`: with the special tokens that the tokenizer adds by default."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> tuple[int, ...]:
        """The chat template's tokens, once (F1). Raises `RequestFailed` (400) if the template
        refuses."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> str | None:
        """The chat template's text, whose tokens without special ones are those of `encode_chat`;
        None if a template of this model gives no text. Raises `RequestFailed` (400) if the template
        refuses."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the visible text; b"" for special tokens. One char may
        span tokens."""

    def token_text(self, token: int) -> str:
        """A printable form of one token, for logprobs; special tokens by name."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """Start and end markers of the model's reasoning; None if it has none."""

    def marker_tokens(self, marker: str) -> tuple[int, ...]:
        """Tokens of a reasoning marker, as the model writes it."""

    @property
    def infill(self) -> InfillTokens | None:
        """Tokens to fill in the middle; None if the vocabulary has none."""

    def breakers(self, breakers: tuple[str, ...]) -> Breakers:
        """Find the tokens of DRY's sequence breakers. For any thread. Raises `RequestFailed` (400)
        if they have too many."""

    @property
    def tool_parser(self) -> str | None:
        """Name of the format in which the model writes calls; None if the model has not learnt to
        call tools."""

    @property
    def reasoning_parser(self) -> str | None:
        """Name of the format in which the model writes reasoning; None if it has none."""

    @property
    def calling(self) -> tuple[str, str] | None:
        """Start and end markers of a tool call, for formats that `parse_calls` reads; None
        otherwise."""

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """Parse the text between the markers of `calling` into (name, arguments as JSON) of each
        call. May raise any exception."""

    def compile_grammar(self, grammar: Grammar, timeout_s: float) -> object:
        """Compile a grammar for the engine, which finds it for as long as the returned object is
        kept. For any thread. Raises `RequestFailed`: 400 if it cannot be followed, or takes longer
        than `timeout_s`; 503 if the system has no process for it."""

    def known_grammar(self, grammar: Grammar) -> object | None:
        """Return what `compile_grammar` has returned for it, without delay; None if that is not
        kept. Raises `RequestFailed` (400) if it is known that it cannot be followed."""


@attrs.frozen
class EmbeddingLayout:
    """Form of a model's embeddings: their dimensions, and the tokens whose hidden states are
    pooled."""

    dimensions: int
    pooling: Pooling


@attrs.frozen(kw_only=True)
class AdapterCard:
    """Properties of a LoRA adapter of a loaded model."""

    name: str
    directory: str
    rank: int
    """Its greatest rank in any layer."""
    fingerprint: str
    """Hash of its files' content, as hex. KV depends on it."""


@attrs.frozen(kw_only=True)
class AdapterPlan:
    """Memory that an adapter needs, before any of it is loaded. The matrices of all adapters of a
    layer are padded to the greatest rank."""

    added_bytes: int = 0
    """Bytes by which the matrices grow."""
    total_bytes: int = 0
    """Bytes of the matrices of all adapters afterwards."""
    loading_bytes: int = 0
    """Bytes that it takes at most while it is loaded, beside the matrices that rows have until
    then."""


@attrs.frozen(kw_only=True)
class ModelCard:
    """Properties of a loaded model."""

    id: str
    created: int
    """Time of creation, in Unix seconds."""
    context_length: int
    vocab_size: int
    architecture: str
    """The config's model_type."""
    dtype: str
    weights_bytes: int
    """Bytes of the weights on this rank, with the adapters that the model was loaded with."""
    adapter_bytes: int = 0
    """Bytes of these adapters' matrices."""
    device: str
    capabilities: Capabilities = EVERYTHING
    """Capabilities of the model's rows."""
    self_check: SelfCheck = UNCHECKED
    """How the capabilities were found."""
    architecture_source: str = "mlx-lm"
    """The package that the model's code is of, with its version, and with the module if it is a
    plugin."""
    kv: KvLayout = KvLayout(cached=False)
    cache_bytes: int = 0
    """Memory that the device can spare for cached blocks, unless --cache-memory sets it."""
    memory_sharers: int = 1
    """Number of models in this process that share the device's memory."""
    fingerprint: str = ""
    """Fingerprint of the weights' content, the adapter, the architecture and the dtype, as hex; ""
    if nothing may be stored on disk."""
    embedding: EmbeddingLayout | None = None
    """Form of the embeddings; None if the model gives none."""
    no_embedding: str = ""
    """Why the model gives no embeddings, if that is its files' affair."""
    no_generation: str = ""
    """Why the model generates nothing; "" if it does."""
    ranks: int = 1
    """Number of processes that compute the model together."""
    chunk_step: int = 1
    """Multiple of tokens at which chunks of a prompt end where they can, since the device prepares
    each new length."""
    min_restored_tokens: int = 0
    """Minimum number of cached tokens that are restored: a pass computes fewer in the time that it
    takes anyway."""
    drafts_by_default: bool = True
    """Whether rows draft by prompt lookup where the request and the settings do not say."""
    logits_processors: tuple[str, ...] = ()
    """Names of the embedding program's logits processors."""
    adapters: tuple[AdapterCard, ...] = ()
    """LoRA adapters that the model was loaded with."""
    draft_model: str | None = None
    """Name of the draft model, as --draft-model says it; None: there is none."""
    draft_context: int | None = None
    """Context length of the draft model in tokens. Rows draft by it as far as that. None: there is
    none."""
    no_mtp: str = NO_HEAD
    """Why the model has no MTP head to draft with; "" if it has."""
    tool_parser: str = "none"
    """Name of the format in which the model writes calls."""
    reasoning_parser: str = "none"
    """Name of the format in which the model writes reasoning."""
    adapted_messages: tuple[tuple[str, str], ...] = ()
    """Changes of messages that the chat template needs, each by name and as text for a person."""

    @property
    def base_weights_bytes(self) -> int:
        """Bytes of the weights without adapters."""
        return self.weights_bytes - self.adapter_bytes

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
    """Memory in bytes, as the device itself reports it (R14)."""

    active_bytes: int
    spare_bytes: int
    """Free buffers that the allocator keeps for reuse."""
    limit_bytes: int
    resident_bytes: int = 0
    """Resident memory of the process, including free memory in its heaps; 0 where it is unknown or
    cannot be released."""
    pressure: MemoryPressure = "unknown"
    """The system's verdict on the memory of the whole machine."""
    swapped_bytes: int = 0
    """Memory of the machine in swap files; 0 where it is unknown."""


@attrs.frozen
class Measured:
    """What is known of a model before it is loaded."""

    weights_bytes: int
    """Bytes of its weights in memory, those of a draft model and of adapters among them."""
    created: int
    """Unix time of its config, as in `ModelCard`."""


class Engine(Protocol):
    """The engine that ModelStepper drives. The real engine owns one OS thread for life; the
    simulated one is async."""

    async def join(self, invitation: bytes) -> Joined:
        """Find the other ranks, before `load`. Rank 0's invitation becomes everybody's. Alone, this
        returns at once. Waits for all of them, in native code."""

    async def load(self) -> LoadedModel:
        """Load the model, once. Raises `ModelUnusable`."""

    async def step(self, plans: PlanReceiver, results: trio.MemorySendChannel[Stepped]) -> None:
        """Answer plans until their channel ends, starting with no rows. May be called again after
        it raised. Raises `RankDiffers` before it launches a plan whose digest is not of its own
        state."""

    def memory(self) -> MemoryStats: ...

    async def plan_adapter(self, name: str, directory: str) -> AdapterPlan:
        """Find how much memory a LoRA adapter needs, before `load_adapter`. Raises what that
        raises."""

    async def load_adapter(self, name: str, directory: str) -> AdapterCard:
        """Load a LoRA adapter of the loaded model, while rows decode. Raises `ModelUnusable`,
        `AdapterFilesMissing` if there are none, and `OutOfDeviceMemory`, after which the model is
        as before."""

    async def unload_adapter(self, name: str) -> int:
        """Unload a LoRA adapter that no request has any more. Returns the bytes of all that are
        left."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Own the thread (or nothing) until cancelled."""
