"""The engine step: builds one lazy graph from a plan, and launches it before the tokens of the previous plan are read."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import cast

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper import heap
from trouper.engine.distributed.rank_group import ALONE, RankGroup
from trouper.engine.distributed.state_digests import Digests
from trouper.engine.grammars.grammar_compiler import Constraint, Grammars
from trouper.engine.kv.block_payloads import BlockArrays
from trouper.engine.kv.block_store import BlockStore
from trouper.engine.kv.pass_shapes import Shapes, of_device
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.kv.region import Ints
from trouper.engine.kv.row_state import RowState
from trouper.engine.kv.slot_rows import SlotRows, rows_for
from trouper.engine.pooling import Pool
from trouper.engine.sampling.logprobs import KeptMask, PendingLogprobs, logprobs_of
from trouper.engine.sampling.penalties import History
from trouper.engine.sampling.sampling_batch import SamplingBatch
from trouper.engine.sampling.thinking_budget import ThinkingRule
from trouper.engine.spec_decode.draft_proposals import DraftProposals
from trouper.engine.spec_decode.prompt_lookup import DRAFTING, Drafting
from trouper.engine.spec_decode.verification_spans import Spans, indices
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.plans import Admit, Plan, RowId, Stepped
from trouper.protocol.ranks import Digest, compare

SCORE_TOKENS = 128
"""Number of prompt tokens whose logits are computed at a time: the logits of one token take 1 MB for a large vocabulary."""


@attrs.define(eq=False)
class Launched:
    """A launched step, and its result once it is read."""

    plan: Plan
    at: float
    rows: tuple[RowId, ...]
    tokens: mx.array | None
    logprobs: PendingLogprobs | None
    prefilled: mx.array | None
    """A small array that is ready when the step's prefill is done."""
    persisted: list[BlockArrays]
    scores: list[PendingLogprobs]
    """Logprobs of prompt tokens."""
    embedded: list[tuple[RowId, mx.array]]
    failed: tuple[tuple[RowId, str], ...] = ()
    """Rows whose grammar failed to make a mask, with the reason."""
    order: int = 0
    """Hash of the order of rows in their slots, if the plan has a digest; else 0."""
    spans: Spans | None = None
    """Positions of the drafts that the step verifies. The number of accepted drafts is known when the tokens are read."""
    stepped: Stepped | None = None
    """The result, once the step was read."""


class StepEngine:
    """Rows, their sampling state, and the lazy tokens of the last step. Lives on one thread."""

    def __init__(
        self,
        model: nn.Module,
        vocabulary: int,
        kv: KvFormat = PLAIN,
        grammars: Grammars | None = None,
        group: RankGroup = ALONE,
        *,
        drafting: Drafting = DRAFTING,
        shapes: Shapes | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        """`shapes` None: chosen for the device. `capabilities` None: guessed from the model's caches."""
        self._rows, self.capabilities = rows_for(model, kv, drafting.slack, shapes or of_device(), capabilities)
        self._blocks = BlockStore(self._rows) if isinstance(self._rows, SlotRows) else None
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._state: dict[RowId, RowState] = {}
        self._sampling = SamplingBatch(vocabulary, group, self._state)
        self._bound: set[RowId] = set()
        """Rows whose next token a grammar or a thinking budget restricts."""
        self._proposals = DraftProposals(drafting)
        self._fresh: dict[RowId, int] = {}
        """Last prompt token of each row that decodes for the first time."""
        self._last_read = 0.0
        self.starting: Callable[[], None] | None = None
        """Called in a launch after the graph of the next tokens is built and before it is sent to the device. The callback may
        `collect` the previous step."""
        self._unread: Launched | None = None
        """The last launched step, unless its tokens were read."""
        self._digests = Digests(self._rows, self._blocks)

    # -- launch ----------------------------------------------------------------------------------

    def launch(self, plan: Plan) -> Launched:
        """Build and start the step. Returns at once where the device is asynchronous, unless a row follows a grammar:
        then its last token must be read, after the pass over the model was started and while it runs. A step with drafts,
        and a step after one with drafts, needs all previous tokens. Raises `RankDiffers` before any change."""
        if plan.digest is not None:
            self._compare(plan.step, plan.digest)
        if plan.drafts or (self._unread is not None and self._unread.spans is not None):
            self._read_before()
        self._unread = launched = self._launch(plan)
        if plan.digest is not None:
            launched.order = self._digests.order()
        return launched

    def _compare(self, step: int, expected: Digest) -> None:
        if not self._digests.knows(expected.settled):
            self._read_before()
        compare(step, expected, self._digests.now(expected.settled))

    def _launch(self, plan: Plan) -> Launched:
        at = time.perf_counter()
        if plan.release_memory:
            mx.clear_cache()
            self._rows.give_back()
            heap.give_back()
        self._store(plan)
        self._drop(plan.drop)
        self._load(plan)
        if plan.admit:
            self._rows.make_room(len(plan.admit))
        for admit in plan.admit:
            self._admit(admit)
        scores: list[PendingLogprobs] = []
        embedded = self._embed(plan)
        prefilled, alone = self._prefill(plan, scores)
        persisted = self.blocks.persist(plan.persist) if plan.persist else []
        if not (self._rows.decoding or alone):
            return Launched(plan, at, (), None, None, prefilled, persisted, scores, embedded)
        spans = self._draft(plan)
        tokens, logprobs = self._decode(alone) if spans is None else self._verify(spans)
        expected = {*plan.decode, *(chunk.row for chunk in plan.prefill)}
        members, failed = self._sampling.members, self._sampling.failed
        assert expected.issuperset(members), "a row decodes that the plan does not name"
        return Launched(
            plan, at, members, tokens, logprobs, prefilled, persisted, scores, embedded, failed, spans=spans
        )

    @property
    def blocks(self) -> BlockStore:
        assert self._blocks is not None, "rows of this model cannot be stored"
        return self._blocks

    def _store(self, plan: Plan) -> None:
        if plan.evict:
            self.blocks.evict(plan.evict)
        for store in plan.store:
            self.blocks.store(store)

    def _load(self, plan: Plan) -> None:
        for load in plan.load:
            self.blocks.load(load)

    def _drop(self, rows: Sequence[RowId]) -> None:
        for row in rows:
            del self._state[row]
        self._bound.difference_update(rows)
        self._proposals.drop(rows)
        self._rows.drop(rows)

    def _admit(self, admit: Admit) -> None:
        prompt = np.frombuffer(admit.prompt, "<i4")
        given, output = np.split(prompt, [len(prompt) - admit.num_output_tokens])
        history = History(given, self._vocabulary, output) if admit.sampling.penalized else None
        constraint = self._constraint(admit)
        if constraint is not None:
            for token in output.tolist():
                constraint.took(token)
        self._state[admit.row] = RowState(
            prompt, admit.sampling, admit.logprobs, drawn=admit.num_output_tokens, history=history, constraint=constraint,
            min_tokens=admit.min_tokens, ends=admit.ends, prompt_logprobs=admit.prompt_logprobs,
            pool=Pool(admit.embed) if admit.embed else None,
        )  # fmt: skip
        if constraint is not None:
            self._bound.add(admit.row)
        if admit.drafts and self.capabilities.allows("drafts"):
            self._proposals.open(admit.row, prompt.tolist())
        self._rows.open(admit.row)
        if admit.restore is not None:
            assert admit.restore.tokens < len(prompt), "one token of a prompt must be computed"
            self.blocks.restore(admit.row, admit.restore)
            self._state[admit.row].prefilled = admit.restore.tokens

    def _constraint(self, admit: Admit) -> Constraint | ThinkingRule | None:
        if admit.thinking is not None:
            return ThinkingRule(admit.thinking, self._vocabulary)
        if admit.grammar is None:
            return None
        assert self._grammars is not None, "grammars need a tokenizer"
        return self._grammars.constraint(admit.grammar, admit.min_tokens, admit.ends)

    def _prefill(self, plan: Plan, scores: list[PendingLogprobs]) -> tuple[mx.array | None, list[RowId]]:
        """Run the chunks. A prompt's last token is not prefilled but decoded, so that no logits are computed for the
        other tokens, unless the request asks for prompt logprobs. Returns the rows whose first token must run alone."""
        chunks: dict[RowId, Sequence[int]] = {}
        complete: list[RowId] = []
        for chunk in plan.prefill:
            state = self._state[chunk.row]
            if state.pool is not None:
                continue
            end = state.prefilled + chunk.tokens
            assert end <= len(state.prompt), "a plan prefills more than the prompt"
            if end == len(state.prompt):
                complete.append(chunk.row)
            tokens = state.prompt[state.prefilled : min(end, len(state.prompt) - 1)]
            if len(tokens) and state.prompt_logprobs is not None:
                scores += self._score(chunk.row, state, end)
            elif len(tokens):
                chunks[chunk.row] = tokens.tolist()
            state.prefilled = end
        prefilled = self._rows.prefill(chunks)
        alone = [row for row in complete if not self._rows.decodes_from_nothing(row)]
        for row in complete:
            if row not in alone:
                self._fresh[row] = int(self._state[row].prompt[-1])
                self._rows.promote(row)
        return prefilled, alone

    def _embed(self, plan: Plan) -> list[tuple[RowId, mx.array]]:
        """Run chunks of prompts that are embedded. Returns the vectors of prompts that end in this step."""
        done = []
        for chunk in plan.prefill:
            state = self._state[chunk.row]
            if state.pool is None:
                continue
            end = state.prefilled + chunk.tokens
            state.pool.add(self._rows.hidden(chunk.row, state.prompt[state.prefilled : end].tolist()))
            state.prefilled = end
            mx.async_eval(state.pool.kept)
            if end == len(state.prompt):
                done.append((chunk.row, state.pool.vector()))
        mx.async_eval([vector for _, vector in done])
        return done

    def _score(self, row: RowId, state: RowState, end: int) -> list[PendingLogprobs]:
        """Run a chunk of a prompt and compute the logprob of the token after each of its tokens."""
        scores = []
        assert state.prompt_logprobs is not None
        last = min(end, len(state.prompt) - 1)
        for start in range(state.prefilled, last, SCORE_TOKENS):
            stop = min(start + SCORE_TOKENS, last)
            logits = self._rows.score(row, state.prompt[start:stop].tolist())
            following = mx.array(state.prompt[start + 1 : stop + 1].astype(np.uint32))
            requests = [(index, row, state.prompt_logprobs) for index in range(stop - start)]
            pending = logprobs_of(logits, following, requests)
            assert pending is not None
            mx.async_eval(pending.arrays())
            scores.append(pending)
        return scores

    def _decode(self, alone: list[RowId]) -> tuple[mx.array, PendingLogprobs | None]:
        parts = []
        if self._rows.decoding:
            parts.append(self._rows.decode(self._inputs()))
        for row in alone:
            parts.append(self._rows.first(row, int(self._state[row].prompt[-1])))
            self._rows.promote(row)
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        self._join()
        return self._sample(logits)

    def _draft(self, plan: Plan) -> Spans | None:
        """Propose drafts for the rows that the plan allows some. None if no row has a draft."""
        if not any(plan.drafts):
            return None
        drafts = self._proposals.drafts(dict(zip(plan.decode, plan.drafts, strict=True)))
        for row in self._bound.intersection(drafts):
            drafts[row] = self._fitting(row, drafts[row])
        along = [drafts.get(row, ()) for row in self._rows.decoding]
        return Spans(along) if any(along) else None

    def _fitting(self, row: RowId, draft: list[int]) -> list[int]:
        """Truncate a draft where the row's grammar rejects it."""
        constraint = self._state[row].constraint
        return draft if constraint is None else draft[: constraint.fitting(draft)]

    def _verify(self, spans: Spans) -> tuple[mx.array, PendingLogprobs | None]:
        """Run all decoding rows, with and without drafts, in one pass."""
        inputs = mx.concatenate([self._inputs()[:, None], mx.array(spans.drafts.astype(np.uint32))], axis=1)
        logits = self._rows.verify(inputs, spans.counts)
        self._join()
        flat = logits.reshape(-1, logits.shape[-1])
        return self._sample(flat[indices(spans.grid_indices)] if spans.padded else flat, spans)

    def _sample(self, logits: mx.array, spans: Spans | None = None) -> tuple[mx.array, PendingLogprobs | None]:
        return self._sampling.sample(logits, spans, self._read_before, self.starting)

    def _inputs(self) -> mx.array:
        return self._sampling.inputs(self._rows.decoding, self._fresh)

    def _join(self) -> None:
        self._fresh.clear()
        self._sampling.join(tuple(self._rows.decoding))

    def _read_before(self) -> None:
        """Collect the previous step, if it was not read."""
        if self._unread is not None:
            self.collect(self._unread)

    # -- collect ---------------------------------------------------------------------------------

    def collect(self, launched: Launched) -> Stepped:
        """Wait for the step and read its tokens."""
        if launched.stepped is None:
            launched.stepped = self._read(launched)
            if self._unread is launched:
                self._unread = None
        return launched.stepped

    def _read(self, launched: Launched) -> Stepped:
        if launched.prefilled is not None:
            mx.eval(launched.prefilled)
        rows, kept = launched.rows, None
        sampled: Ints = np.zeros(0, np.int32) if launched.tokens is None else np.array(launched.tokens, np.int32)
        drafted: tuple[tuple[RowId, int, int], ...] = ()
        if launched.spans is not None:
            rows, kept, drafted = self._commit(launched.rows, launched.spans, sampled)
            sampled = sampled[kept]
        tokens = tuple(cast(list[int], sampled.tolist()))
        logprobs = launched.logprobs.read(kept) if launched.logprobs else ()
        scores = tuple(score for pending in launched.scores for score in pending.read())
        embedded = tuple((row, np.array(vector, "<f4").tobytes()) for row, vector in launched.embedded)
        now = time.perf_counter()
        seconds, self._last_read = now - max(launched.at, self._last_read), now
        persisted = tuple(payload.read() for payload in launched.persisted)
        failed = launched.failed + self._follow(rows, tokens)
        matched = self._proposals.matched(launched.rows) if launched.plan.watch else ()
        stepped = Stepped(
            launched.plan.step, rows, tokens, logprobs, seconds, persisted, failed, scores, embedded, drafted,
            matched=matched,
        )  # fmt: skip
        return stepped if launched.plan.digest is None else self._settle(launched, stepped)

    def _settle(self, launched: Launched, stepped: Stepped) -> Stepped:
        """Add the hashes that other ranks must agree on."""
        tokens_hash = self._digests.settle(stepped.step, launched.order, stepped.rows, stepped.tokens)
        self._digests.accepted(stepped.step, stepped.drafted)
        return attrs.evolve(stepped, order=launched.order, tokens_hash=tokens_hash)

    def _commit(
        self, rows: Sequence[RowId], spans: Spans, sampled: Ints
    ) -> tuple[tuple[RowId, ...], KeptMask, tuple[tuple[RowId, int, int], ...]]:
        """Commit each row's accepted drafts and the token sampled after them (F22): lengths, histories, positions and inputs
        change accordingly. No step was launched since."""
        accepted = spans.accepted(sampled)
        kept = spans.steps <= accepted[spans.owners]
        self._rows.accepted(accepted)
        self._sampling.accepted(spans, sampled, accepted, kept)
        tried = zip(rows, (spans.counts - 1).tolist(), accepted.tolist(), strict=True)
        drafted = tuple((row, tokens, right) for row, tokens, right in tried if tokens)
        return tuple(rows[owner] for owner in spans.owners[kept].tolist()), kept, drafted

    def _follow(self, rows: Sequence[RowId], tokens: Sequence[int]) -> tuple[tuple[RowId, str], ...]:
        """Pass the sampled tokens to proposers and grammars. The grammar of a row that was dropped since is skipped."""
        self._proposals.took(rows, tokens)
        failed = []
        for row, token in zip(rows, tokens, strict=True) if self._bound else ():
            if row in self._bound and (constraint := self._state[row].constraint) is not None:
                reason = constraint.took(token)
                if reason:
                    failed.append((row, reason))
        return tuple(failed)

    def lengths(self) -> dict[RowId, int]:
        """Tokens in each row's KV, for checks."""
        return self._rows.lengths()

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes
