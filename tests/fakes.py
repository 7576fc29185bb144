"""An engine without MLX for the simulated world: async, on the virtual clock, with made-up but deterministic tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from trouper.protocol.model import LoadedModel, MemoryFacts, ModelCard
from trouper.protocol.plans import Chunk, Plan, RowId, Stepped
from trouper.protocol.replies import TokenLogprobs

EOS = 256


class ByteTokenizer:
    """Token id = byte; 256 ends the answer."""

    eos_token_ids = frozenset({EOS})
    has_chat_template = True

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> tuple[int, ...]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b""

    def token_text(self, token: int) -> str:
        return chr(token) if token < EOS else "<eos>"


TokenAt = Callable[[int, int], int]
"""(a number made of the prompt, position) to the token there."""


def letters(key: int, position: int) -> int:
    return 97 + (key + 7 * position) % 26


@attrs.define
class FakeRow:
    """A row whose next token depends on its prompt and position only."""

    prompt_tokens: int
    key: int
    logprobs: int | None
    prefilled: int = 0
    position: int = 0


def card(context_length: int = 4096) -> ModelCard:
    return ModelCard(
        id="fake", created=1_700_000_000, context_length=context_length, vocab_size=EOS + 1, architecture="fake",
        dtype="float32", weights_bytes=0, device="simulated", batching="batched",
    )  # fmt: skip


@attrs.define(eq=False)
class FakeEngine:
    """Follows the protocol of plans.py: answers plan n-1 when plan n has arrived, and counts what it holds.

    `before_step` is awaited before each plan with work: sleep there to be slow, raise there to crash.
    """

    before_step: Callable[[Plan], Awaitable[None]] | None = None
    token_at: TokenAt = letters
    tokenizer: ByteTokenizer = attrs.field(factory=ByteTokenizer)
    rows: dict[RowId, FakeRow] = attrs.field(factory=dict)
    facts: MemoryFacts = attrs.field(factory=lambda: MemoryFacts(active_bytes=0, spare_bytes=0, limit_bytes=1))
    plans_seen: list[Plan] = attrs.field(factory=list)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        await trio.sleep_forever()

    async def load(self) -> LoadedModel:
        return LoadedModel(card(), self.tokenizer)

    def memory(self) -> MemoryFacts:
        return self.facts

    async def step(self, plans: trio.MemoryReceiveChannel[Plan], results: trio.MemorySendChannel[Stepped]) -> None:
        self.rows.clear()
        try:
            await self._answer(plans, results)
            assert not self.rows, "the scheduler ended without dropping every row"
        finally:
            self.rows.clear()

    async def _answer(self, plans: trio.MemoryReceiveChannel[Plan], results: trio.MemorySendChannel[Stepped]) -> None:
        pending: Stepped | None = None
        async for plan in plans:
            self.plans_seen.append(plan)
            began = trio.current_time()
            if plan.has_work and self.before_step is not None:
                await self.before_step(plan)
            stepped = self._compute(plan, trio.current_time() - began)
            if pending is not None:
                results.send_nowait(pending)
            pending = stepped if plan.has_work else None
            if pending is None:
                results.send_nowait(stepped)
        assert pending is None, "the scheduler ended without flushing the pipeline"

    def _compute(self, plan: Plan, seconds: float) -> Stepped:
        for dropped in plan.drop:
            del self.rows[dropped]
        for admit in plan.admit:
            self.rows[admit.row] = FakeRow(len(admit.prompt) // 4, sum(admit.prompt), admit.logprobs)
        for row in plan.decode:
            assert self.rows[row].position > 0, "decode before the prompt was prefilled"
        produced = plan.decode + tuple(chunk.row for chunk in plan.prefill if self._prefill(chunk))
        tokens = tuple(self._next_token(self.rows[row]) for row in produced)
        wanted = tuple(
            (row, TokenLogprobs(token, -0.5, tuple((97 + k, -0.5 - k) for k in range(n))))
            for row, token in zip(produced, tokens, strict=True)
            if (n := self.rows[row].logprobs) is not None
        )
        return Stepped(plan.step, produced, tokens, wanted, seconds)

    def _prefill(self, chunk: Chunk) -> bool:
        """Whether the prompt ended in this step."""
        row = self.rows[chunk.row]
        row.prefilled += chunk.tokens
        assert chunk.tokens > 0
        assert row.prefilled <= row.prompt_tokens, "more prefill than prompt"
        return row.prefilled == row.prompt_tokens

    def _next_token(self, row: FakeRow) -> int:
        row.position += 1
        return self.token_at(row.key, row.position - 1)
