"""Interface of a loaded model to the rest of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import trio

from trouper.protocol.capabilities import EVERYTHING, UNCHECKED, Capabilities, SelfCheck
from trouper.protocol.grammar import FollowedGrammar, Grammar
from trouper.protocol.health import MemoryPressure
from trouper.protocol.kv import KvLayout
from trouper.protocol.media import ImageLayout
from trouper.protocol.names import Kind
from trouper.protocol.plan_channel import PlanReceiver
from trouper.protocol.plans import Breakers, Pooling, Stepped
from trouper.protocol.ranks import Joined
from trouper.protocol.requests import PairTokens

# Default of `no_mtp`.
NO_HEAD = "its checkpoint has none"


@attrs.frozen(kw_only=True)
class InfillTokens:
    prefix: int
    suffix: int
    middle: int | None
    """Token before the answer; None: the suffix comes first, and the answer continues the
    prefix."""
    file: int | None = None
    repository: int | None = None
    ends: tuple[int, ...] = ()


class Tokenizer(Protocol):
    """Text to tokens and back. Pure and safe from any thread."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every id that ends a turn, from the tokenizer, the config and the generation config."""

    @property
    def grammar_end(self) -> int | None:
        """Id that ends an answer with a grammar, where none of `eos_token_ids` can be sampled; else
        None."""

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def longest_token(self) -> int:
        pass

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """`special`: with the tokenizer's default special tokens."""

    def encode_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int]:
        """Tokens of a query and a document for a cross-encoder, with special tokens, and the index
        of the second text if the model tells both apart, else 0."""

    def encode_batch(self, texts: Sequence[str | tuple[str, str]]) -> list[PairTokens]:
        """Tokens of texts and pairs, in one call. Raises any exception, for any of them."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> tuple[int, ...]:
        """Tokens of the chat template, which writes all special tokens. Raises `RequestFailed`
        (400) if the template refuses."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], kwargs: Mapping[str, Any]
    ) -> str | None:
        """Text for encoding without special tokens; None if a template gives no text. Raises
        `RequestFailed` (400) if the template refuses."""

    def token_bytes(self, token: int) -> bytes:
        """Visible bytes of a token; b"" for special tokens. One char may span tokens."""

    def token_text(self, token: int) -> str:
        """Printable form of a token, for logprobs; special tokens by name."""

    @property
    def thinking(self) -> tuple[str, str] | None:
        """Markers of reasoning, or None."""

    def marker_tokens(self, marker: str) -> tuple[int, ...]:
        """Tokens of a reasoning marker, as the model writes them."""

    @property
    def infill(self) -> InfillTokens | None:
        pass

    def breakers(self, breakers: tuple[str, ...]) -> Breakers:
        """Find the tokens of DRY's sequence breakers. Raises `RequestFailed` (400) if too many."""

    @property
    def tool_parser(self) -> str | None:
        """Format of tool calls; None if not learnt."""

    @property
    def unread_calls(self) -> bool:
        """Whether the template writes calls, in a format without a parser."""

    @property
    def reasoning_parser(self) -> str | None:
        pass

    @property
    def calling(self) -> tuple[str, str] | None:
        """Markers of a tool call for `parse_calls`, or None."""

    def parse_calls(self, text: str, tools: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """(name, arguments as JSON) of the calls. May raise any exception."""

    def compile_grammar(self, grammar: Grammar, timeout_s: float) -> FollowedGrammar:
        """Compile a grammar, which the engine finds while the returned object is kept. For any
        thread. Raises `RequestFailed`: 400 if the grammar cannot be followed or takes longer than
        `timeout_s`; 503 if the system has no process to spare."""

    def known_grammar(self, grammar: Grammar) -> FollowedGrammar | None:
        """The kept result of `compile_grammar`, without delay, or None. Raises `RequestFailed`
        (400) for a grammar known to fail."""


@attrs.frozen
class EmbeddingLayout:
    """Dimensions of embeddings, and the tokens whose hidden states are pooled."""

    dimensions: int
    pooling: Pooling
    prompts: tuple[tuple[str, str], ...] = ()
    """Name and text that a request may put before its texts."""
    default_prompt: str | None = None
    """Name of the prompt of requests that name none."""


@attrs.frozen(kw_only=True)
class AdapterCard:
    """A LoRA adapter."""

    name: str
    directory: str
    rank: int
    """Greatest rank in any layer."""
    fingerprint: str
    """Hash of the files, as hex. KV depends on the adapter."""


@attrs.frozen(kw_only=True)
class AdapterPlan:
    """Memory before loading. All matrices of a layer have the greatest rank."""

    added_bytes: int = 0
    total_bytes: int = 0
    """All adapters' bytes afterwards."""
    loading_bytes: int = 0
    """Peak beside the matrices in use."""


@attrs.frozen(kw_only=True)
class ModelCard:
    """Properties of a loaded model."""

    id: str
    created: int
    """Unix seconds."""
    context_length: int
    vocab_size: int
    architecture: str
    """The config's model_type."""
    dtype: str
    weights_bytes: int
    """On this rank, with the adapters of the start."""
    adapter_bytes: int = 0
    device: str
    capabilities: Capabilities = EVERYTHING
    self_check: SelfCheck = UNCHECKED
    architecture_source: str = "mlx-lm"
    """Package and version, and a plugin's module."""
    kv: KvLayout = KvLayout(cached=False)
    cache_bytes: int = 0
    """Memory to spare, unless --cache-memory sets a size."""
    memory_sharers: int = 1
    fingerprint: str = ""
    """Hash of weights, adapter, architecture and dtype, as hex; "" if nothing may be stored on
    disk."""
    embedding: EmbeddingLayout | None = None
    no_embedding: str = ""
    kind: Kind = "generator"
    """Purpose by the files; some embedders generate, too."""
    one_pass: bool = False
    """Whether whole prompts share padded passes, without KV."""
    scores: bool = False
    """Whether the model is a cross-encoder, which scores a query and a document together."""
    no_generation: str = ""
    """Why the model generates nothing; "" if the model does."""
    ranks: int = 1
    pipeline: bool = False
    """Whether each rank has consecutive layers, not a part of every layer."""
    chunk_step: int = 1
    """Multiple of tokens for ends of chunks: the device prepares each length."""
    min_restored_tokens: int = 0
    """A pass computes fewer without extra time."""
    drafts_by_default: bool = True
    """Prompt lookup where neither request nor settings say."""
    logits_processors: tuple[str, ...] = ()
    adapters: tuple[AdapterCard, ...] = ()
    draft_model: str | None = None
    draft_context: int | None = None
    """In tokens; rows draft up to there."""
    no_mtp: str = NO_HEAD
    """Why there is no MTP head; "" if there is one."""
    sampling_defaults: tuple[tuple[str, float], ...] = ()
    """By parameter, for requests that leave it open."""
    tool_parser: str = "none"
    reasoning_parser: str = "none"
    images: ImageLayout | None = None
    encoder_step_bytes: int = 0
    """Most bytes of a step that encodes an image, beside the weights."""
    no_images: str = ""
    """Why it takes none, for a person; "" if it does."""
    image_roles: tuple[str, ...] = ()
    """Roles whose messages can hold images by the chat template, sorted: equal cards have equal
    bytes."""
    adapted_messages: tuple[tuple[str, str], ...] = ()
    """Needed changes of messages: name and text for a person."""

    @property
    def pooling(self) -> Pooling:
        """For embeddings and scores; a score needs none."""
        return "first" if self.embedding is None else self.embedding.pooling

    @property
    def base_weights_bytes(self) -> int:
        return self.weights_bytes - self.adapter_bytes

    @property
    def batching(self) -> str:
        return "prompts in padded passes" if self.one_pass else self.capabilities.description

    @property
    def no_drafts(self) -> str:
        """Why drafts cannot be undone; "" if drafts can."""
        return self.capabilities.drafts


@attrs.frozen
class LoadedModel:
    card: ModelCard
    tokenizer: Tokenizer


@attrs.frozen(kw_only=True)
class MemoryStats:
    """Memory in bytes, as the device reports."""

    active_bytes: int
    spare_bytes: int
    limit_bytes: int
    resident_bytes: int = 0
    """With free memory in heaps; 0 where unknown or not releasable."""
    pressure: MemoryPressure = "unknown"
    swapped_bytes: int = 0
    """The machine's; 0 where unknown."""


@attrs.frozen
class Measured:
    """Facts before loading."""

    weights_bytes: int
    """In memory, with draft model and adapters."""
    created: int
    """Unix time of the config, as in `ModelCard`."""


class Engine(Protocol):
    """Driven by ModelStepper. The real engine owns one OS thread; the simulated one is async."""

    async def join(self, invitation: bytes) -> Joined:
        """Wait for the other ranks, before `load`, in native code. Rank 0's invitation goes to all.
        Returns at once without others."""

    async def load(self) -> LoadedModel:
        pass

    async def step(self, plans: PlanReceiver, results: trio.MemorySendChannel[Stepped]) -> None:
        """Answer plans until their channel ends, starting with no rows. May be called again after
        an error. Raises `RankDiffers` before launching a plan whose digest differs from the
        state."""

    def memory(self) -> MemoryStats: ...

    async def plan_adapter(self, name: str, directory: str) -> AdapterPlan:
        pass

    async def load_adapter(self, name: str, directory: str) -> AdapterCard:
        """Load a LoRA adapter while rows decode. Raises `ModelUnusable`, `AdapterFilesMissing`, or
        `OutOfDeviceMemory`, after which the model is unchanged."""

    async def unload_adapter(self, name: str) -> int:
        """Returns the bytes of the remaining adapters."""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Own the thread, if any, until cancelled."""
