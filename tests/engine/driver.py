"""StepEngine driven from a script, synchronously: who joins and leaves at which step, in which
chunks.

Obeys trouper/protocol/plans.py: plan n is launched before plan n-1 is collected, and a row is
dropped with the plan after the one that holds its last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trouper.engine.kv.banks import Bank
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.step import Launched, StepEngine
from trouper.protocol.blocks import Tensors
from trouper.protocol.grammar import Grammar
from trouper.protocol.plans import (
    Admit,
    Breakers,
    Chunk,
    Plan,
    ProposerName,
    Restore,
    RowFault,
    RowId,
    Stepped,
    ThinkingLimit,
)
from trouper.protocol.replies import TokenLogprobs
from trouper.protocol.sampling import Sampling

GREEDY = Sampling(temperature=0)


@attrs.frozen
class Request:
    """A row's part in the script. It leaves when it has `tokens`, or with the plan of step `leave`,
    whatever it is doing then."""

    prompt: Sequence[int]
    tokens: int
    sampling: Sampling = GREEDY
    join: int = 0
    leave: int | None = None
    logprobs: int | None = None
    restore: Restore | None = None
    grammar: Grammar | None = None
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    thinking: ThinkingLimit | None = None
    drafts: bool = False
    breakers: Breakers | None = None
    processors: tuple[str, ...] = ()
    adapter: str = ""
    output_tokens: int = 0
    """The end of `prompt` that the row has sampled before; it resumes."""

    def end_of(self, start: int, tokens: int) -> int:
        """Where a chunk of about so many tokens ends."""
        return start + tokens


@attrs.define
class Row:
    """One request on its way."""

    id: RowId
    request: Request
    prefilled: int = attrs.field(
        default=attrs.Factory(
            lambda row: row.request.restore.tokens if row.request.restore else 0, takes_self=True
        )
    )
    planned: int = 0
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)

    @property
    def in_kv(self) -> int:
        """Tokens that its KV holds once all plans so far are done: all but the newest, which is not
        fed yet. A prompt's last token is fed with the plan that completes it."""
        return self.prefilled + max(self.planned - 1, 0)

    def ended(self, step: int) -> bool:
        return self.planned >= self.request.tokens or (
            self.request.leave is not None and step >= self.request.leave
        )

    def chunk(self, tokens: int) -> Chunk:
        count = min(tokens, len(self.request.prompt) - self.prefilled)
        taken = self.request.end_of(self.prefilled, count) - self.prefilled
        self.prefilled += taken
        if self.prefilled == len(self.request.prompt):
            self.planned = 1
        return Chunk(self.id, taken)


ChunkSize = Callable[[int], int]
"""From the step to how many tokens of each prompt it prefills."""

Allow = Callable[[int], int]
"""From the step to how many tokens each row may draft, for one row after the other."""


Orders = Mapping[int, Mapping[str, Any]]
"""Fields of the plan of some steps (counted over all plays): what to store, persist, load and
evict."""


class Driver:
    """Plays scripts on one engine and checks after each launch that KV lengths are token counts."""

    def __init__(
        self,
        engine: StepEngine,
        chunk: int | ChunkSize = 32,
        orders: Orders | None = None,
        allow: Allow | None = None,
        propose: Callable[[int], ProposerName] = lambda _: "ngram",
    ) -> None:
        """`propose`: from the step to what drafts, for one row after the other."""
        self.engine = engine
        self._propose = propose
        self.drafted: list[tuple[RowId, int, int]] = []
        self.prefilled: Counter[RowId] = Counter()
        """Prompt tokens that each row had computed."""
        self.persisted: list[Tensors] = []
        self.failed: list[tuple[RowId, RowFault]] = []
        self._orders = orders or {}
        self._chunk: ChunkSize = chunk if callable(chunk) else lambda _: chunk
        self._allow = allow
        self._step = 0
        self._rows: dict[RowId, Row] = {}
        self._next = 0
        self._pending: Launched | None = None

    def play(self, requests: Sequence[Request]) -> list[Row]:
        """All of them to their end. Steps of `join` and `leave` count from now."""
        began = self._step
        waiting = sorted(range(len(requests)), key=lambda place: requests[place].join)
        rows: dict[int, Row] = {}
        while waiting or self._rows:
            now = self._step - began
            dropped = [row for row in self._rows.values() if row.ended(now)]
            for row in dropped:
                del self._rows[row.id]
            entering = [place for place in waiting if requests[place].join <= now]
            waiting = [place for place in waiting if requests[place].join > now]
            for place in entering:
                rows[place] = self._enter(requests[place])
            self._take(self._plan(dropped, [rows[place] for place in entering], now), _by_id(rows))
        self._take(Plan(self._step), _by_id(rows))
        assert self.engine.lengths() == {}
        assert self.engine.nbytes == 0
        return [rows[place] for place in range(len(requests))]

    def _enter(self, request: Request) -> Row:
        row = Row(RowId(self._next), request)
        self._next += 1
        return row

    def _plan(self, dropped: list[Row], entering: list[Row], now: int) -> Plan:
        decode = [row for row in self._rows.values() if row.planned]
        for row in decode:
            row.planned += 1
        drafts = tuple(self._allow(now) for _ in decode) if self._allow else ()
        self._rows |= {row.id: row for row in entering}
        chunks = [row.chunk(self._chunk(now)) for row in self._rows.values() if not row.planned]
        for chunk in chunks:
            self.prefilled[chunk.row] += chunk.tokens
        return Plan(
            self._step,
            tuple(row.id for row in dropped),
            tuple(map(_admit, entering)),
            tuple(row.id for row in decode),
            tuple(chunks),
            drafts=drafts if any(drafts) else (),
            proposers=tuple(self._propose(now) for _ in decode) if any(drafts) else (),
            **self._orders.get(self._step, {}),
        )

    def _take(self, plan: Plan, rows: dict[RowId, Row]) -> None:
        self._step += 1
        launched = self.engine.launch(plan)
        self._count_settled()
        assert self.engine.lengths() == {row.id: row.in_kv for row in self._rows.values()}
        finished = [self._pending] if self._pending is not None else []
        self._pending = launched if plan.has_work else None
        if not plan.has_work:
            finished.append(launched)
        for step in finished:
            self._read(self.engine.collect(step), rows)

    def _count_settled(self) -> None:
        """A step with drafts is read before the next is launched."""
        if (
            self._allow is not None
            and self._pending is not None
            and (stepped := self._read_already(self._pending))
        ):
            for row, _, accepted in stepped.drafted:
                if row in self._rows:
                    self._rows[row].planned += accepted

    def _read_already(self, launched: Launched) -> Stepped | None:
        return launched.stepped

    def _read(self, stepped: Stepped, rows: dict[RowId, Row]) -> None:
        self.persisted += stepped.persisted
        self.failed += stepped.failed
        self.drafted += stepped.drafted
        more = sum(accepted for _, _, accepted in stepped.drafted)
        assert len(set(stepped.rows)) + more == len(stepped.rows) == len(stepped.tokens)
        for row, token in zip(stepped.rows, stepped.tokens, strict=True):
            rows[row].tokens.append(token)
        for row, logprobs in stepped.logprobs:
            rows[row].logprobs.append(logprobs)


def _admit(row: Row) -> Admit:
    request = row.request
    prompt = np.array(request.prompt, "<i4").tobytes()
    return Admit(
        row.id,
        prompt,
        request.sampling,
        request.logprobs,
        request.restore,
        request.grammar,
        request.min_tokens,
        request.ends,
        thinking=request.thinking,
        drafts=request.drafts,
        breakers=request.breakers,
        logits_processors=request.processors,
        adapter=request.adapter,
        num_output_tokens=request.output_tokens,
    )


def _by_id(rows: dict[int, Row]) -> dict[RowId, Row]:
    return {row.id: row for row in rows.values()}


def answers(
    engine: StepEngine, requests: Sequence[Request], chunk: int | ChunkSize = 32
) -> list[list[int]]:
    """The tokens of each request."""
    return [row.tokens for row in Driver(engine, chunk).play(requests)]


def only_bank(engine: StepEngine) -> Bank:
    """The bank of all rows, where there is one."""
    assert isinstance(engine._rows, SlotRows)
    [bank] = engine._rows._banks
    return bank
