"""Shares of tenants, clients with separate API keys: rows, queue and prefill. Pure. No effect on a
single tenant.

- **Queue**: of equal priority, the tenant with the fewest rows goes first. Each tenant may fill a
  separate queue.
- **Rows**: at most the number of rows divided by the tenants present.
- **Prefill**: a step's tokens are split between tenants, then between prompts. While others decode,
  prefill takes credit: each second gives every tenant a share of a second, up to `CREDIT_S`. Rare
  long prompts are not slowed down. The encoder's time for images takes the same credit.

Batches yield to all others (`preemption.py`), and take turns among themselves.

Source of the queue: the virtual token counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ordered
from operator import itemgetter

import attrs

from trouper.actors.scheduling.prefill_budget import share_chunks
from trouper.actors.scheduling.sequence import Sequence
from trouper.protocol.plans import Chunk, Plan, RowId, Stepped

# About 2,000 tokens of a small model on two CPU cores, 140,000 of 4B on a GPU.
CREDIT_S = 4.0
DEBT_S = 1.0
"""Largest debt of a tenant that prefilled while no other decoded."""
Tenant = tuple[bool, str]
"""Whether of a batch, and the tenant's name."""


def tenant_of(sequence: Sequence) -> Tenant:
    return sequence.of_batch, sequence.request.tenant


@attrs.frozen
class ChargedWork:
    """Tenants that pay for a step's prefill, and for its image."""

    rows: Mapping[RowId, Tenant]
    encoding: Tenant | None

    @property
    def tenants(self) -> set[Tenant]:
        return {*self.rows.values()} | ({self.encoding} if self.encoding else set())


NO_WORK = ChargedWork({}, None)


@attrs.define(eq=False)
class TenantShares:
    rows: int
    running: Counter[Tenant] = attrs.field(factory=Counter)
    """No count is 0."""
    waiting: Counter[Tenant] = attrs.field(factory=Counter)
    """No count is 0."""
    _credit_s: dict[Tenant, float] = attrs.field(factory=dict)
    # Rows, and all of a tenant's, may have left before the answer.
    # Of each unanswered step under contention.
    _planned: dict[int, ChargedWork] = attrs.field(factory=dict)

    def enter(self, counter: Counter[Tenant], sequence: Sequence) -> None:
        counter[tenant_of(sequence)] += 1

    def leave(self, counter: Counter[Tenant], sequence: Sequence) -> None:
        tenant = tenant_of(sequence)
        counter[tenant] -= 1
        if not counter[tenant]:
            del counter[tenant]

    @property
    def present(self) -> set[Tenant]:
        """Tenants with a row or a waiting request, without batches."""
        return {tenant for tenant in self.running.keys() | self.waiting.keys() if not tenant[0]}

    @property
    def contended(self) -> bool:
        return len(self.running) + len(self.waiting) > 1 and len(self.present) > 1

    @property
    def row_share(self) -> int:
        return max(1, self.rows // max(1, len(self.present)))

    def admits(self, sequence: Sequence) -> bool:
        tenant = tenant_of(sequence)
        return tenant[0] or self.running[tenant] < self.row_share or not self.contended

    def in_turn(self, sequences: Ordered[Sequence]) -> Ordered[Sequence]:
        """Sequences of one priority, by the tenants' number of rows, then as given."""
        if len(self.waiting) < 2:
            return sequences
        would_have = self.running.copy()
        keyed: list[tuple[int, Sequence]] = []
        for sequence in sequences:
            tenant = tenant_of(sequence)
            keyed.append((would_have[tenant], sequence))
            would_have[tenant] += 1
        return [sequence for _, sequence in sorted(keyed, key=itemgetter(0))]

    # -- prefill ---------------------------------------------------------------------------------

    def may_prefill(
        self, prefilling: list[Sequence], decoding: Iterable[Sequence]
    ) -> list[Sequence]:
        """Rows that may prefill next, or have images encoded; all, if only the same tenant
        decodes."""
        if not prefilling or not self.contended:
            return prefilling
        streaming = {tenant_of(sequence) for sequence in decoding}
        return [row for row in prefilling if self._has_credit(row) or streaming <= {tenant_of(row)}]

    def _has_credit(self, row: Sequence) -> bool:
        return self._credit_s.get(tenant_of(row), CREDIT_S) > 0

    def share_prefill(
        self,
        remaining: Ordered[tuple[RowId, int]],
        rows: Mapping[RowId, Sequence],
        budget: int,
        max_tokens: int,
    ) -> tuple[Chunk, ...]:
        """Split `budget` tokens between tenants, and each part between rows as `share_chunks`
        does."""
        by_tenant: dict[Tenant, list[tuple[RowId, int]]] = {}
        for row, tokens in remaining:
            by_tenant.setdefault(tenant_of(rows[row]), []).append((row, tokens))
        if len(by_tenant) < 2:
            return share_chunks(remaining, budget, max_tokens)
        requested = [
            (RowId(index), sum(tokens for _, tokens in its))
            for index, its in enumerate(by_tenant.values())
        ]
        shares = share_chunks(requested, budget, budget)
        chunks = {
            chunk.row: chunk
            for its, share in zip(by_tenant.values(), shares, strict=True)
            for chunk in share_chunks(its, share.tokens, max_tokens)
        }
        return tuple(chunks[row] for row, _ in remaining)

    def note_work(
        self,
        step: int,
        chunks: Iterable[Chunk],
        encoding: Sequence | None,
        rows: Mapping[RowId, Sequence],
    ) -> None:
        """Note who pays for a step. `encoding`: the row whose image is encoded."""
        if not self.contended:
            return
        work = ChargedWork(
            {chunk.row: tenant_of(rows[chunk.row]) for chunk in chunks},
            None if encoding is None else tenant_of(encoding),
        )
        if work != NO_WORK:
            self._planned[step] = work

    def charge(self, plan: Plan, stepped: Stepped, decode_s: float) -> None:
        """Charge a step; `decode_s` is the time of a step that only decodes."""
        work = self._planned.get(plan.step, NO_WORK)
        for step in [step for step in self._planned if step <= plan.step]:
            del self._planned[step]
        if work == NO_WORK and not self._credit_s:
            return
        present = self.present | work.tenants
        for tenant in [*self._credit_s]:  # Others have full credit, which does not grow.
            self._change_credit(tenant, stepped.seconds / max(1, len(present)))
        if work.encoding is not None:
            self._change_credit(work.encoding, -stepped.encode_s)
        prefilled = sum(chunk.tokens for chunk in plan.prefill)
        other_s = stepped.encode_s + (decode_s if plan.decode else 0.0)
        prefill_s = max(0.0, stepped.seconds - other_s)
        for chunk in plan.prefill if work.rows else ():
            self._change_credit(work.rows[chunk.row], -prefill_s * chunk.tokens / prefilled)

    def _change_credit(self, tenant: Tenant, seconds: float) -> None:
        credit = self._credit_s.get(tenant, CREDIT_S) + seconds
        self._credit_s[tenant] = max(credit, -DEBT_S)
        if credit >= CREDIT_S:
            del self._credit_s[tenant]
