"""The engine step: builds a lazy graph from a plan, and launches ahead of reading."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from struct import unpack_from
from typing import cast

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.distributed.rank_group import ALONE, RankGroup
from trouper.engine.distributed.state_digests import Digests, Drafted
from trouper.engine.embeddings.embedding_modules import NO_MODULES, EmbeddingModules
from trouper.engine.grammars.grammar_compiler import Grammars
from trouper.engine.kv.block_store import BlockArrays, BlockStore
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.kv.rows import Rows, rows_for
from trouper.engine.kv.slot_rows import SlotRows
from trouper.engine.passes.pass_shapes import Shapes, of_device
from trouper.engine.passes.region import Ints
from trouper.engine.prefill import Prefilled, run_chunks
from trouper.engine.sampling.logits_processors import NO_PROCESSORS
from trouper.engine.sampling.logprobs import KeptMask
from trouper.engine.sampling.row_state import RowConstraint, RowState, admitted
from trouper.engine.sampling.sampling_batch import Sampled, SamplingBatch
from trouper.engine.spec_decode.draft_model import NO_DRAFT_LIMITS, DraftLimits
from trouper.engine.spec_decode.draft_proposals import DraftProposals
from trouper.engine.spec_decode.prompt_lookup import DRAFTING, Drafting
from trouper.engine.spec_decode.verification_spans import Spans, indices
from trouper.engine.vision.encoder import NOTHING_ENCODED, EncodeResults, ImageEncoder
from trouper.engine.vision.tower import Tower
from trouper.engine.vision.vector_sharing import DistantTower, VectorSharing
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.kv import BankStats
from trouper.protocol.logits_processor import Processors
from trouper.protocol.plans import NOT_A_NUMBER, Admit, Plan, RowFault, RowId, Stepped
from trouper.protocol.ranks import Digest, compare
from trouper.system import heap

Vectors = tuple[tuple[RowId, bytes], ...]
"""Of prompts that ended: little-endian float32 (dim,) each."""


@attrs.define(eq=False, kw_only=True)
class Launched:
    """Holds array references of its own: later steps may change rows, blocks and sampling state."""

    plan: Plan
    at: float
    """`time.perf_counter`, in seconds."""
    launch_s: float = 0.0
    """Seconds of the launch, without reads of earlier steps: a lower bound of the step's time."""
    prefilled: Prefilled
    persisted: list[BlockArrays]
    sampled: Sampled | None = None
    """None: no row decodes."""
    order: int = 0
    """Hash of slots, if the plan has a digest; else 0."""
    banks: tuple[BankStats, ...] | None = None
    """Banks after this step, if the plan has `report_banks`."""
    spans: Spans | None = None
    draft_s: float = 0.0
    """Seconds of the proposers."""
    preparing: bool = False
    encoding: EncodeResults = NOTHING_ENCODED
    stepped: Stepped | None = None

    @property
    def rows(self) -> tuple[RowId, ...]:
        return () if self.sampled is None else self.sampled.rows

    @property
    def has_first_tokens_alone(self) -> bool:
        """Whether all decoding rows get a first token; rows with a complete prompt are among
        `rows`."""
        return 0 < len(self.prefilled.complete) == len(self.rows)


class StepEngine:
    """Rows, sampling state, and the last step's lazy tokens. Lives on one thread."""

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
        draft_model: nn.Module | None = None,
        draft_limits: DraftLimits = NO_DRAFT_LIMITS,
        head: nn.Module | None = None,
        processors: Processors = NO_PROCESSORS,
        adapters: Sequence[str | None] = (),
        modules: EmbeddingModules = NO_MODULES,
        tower: Tower | DistantTower | None = None,
    ) -> None:
        """`shapes` None: the device's. `capabilities` None: guessed from the caches. `processors`:
        by name. `adapters`: names by index, from 1; may change. `modules` follow pooling. `tower`
        encodes images; the model is adapted to them."""
        self.shapes = shapes or of_device()
        self._rows, self.capabilities = rows_for(
            model, kv, drafting.slack, self.shapes, capabilities, draft=draft_model, head=head
        )
        self._blocks = BlockStore(self._rows.copies) if isinstance(self._rows, SlotRows) else None
        self._row_images = self._rows.images if isinstance(self._rows, SlotRows) else None
        self._encoder = None if tower is None else _encoder_of(tower, model, group)
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._adapters = adapters
        self._modules = modules
        self._state: dict[RowId, RowState] = {}
        self._sampling = SamplingBatch(vocabulary, group, self._state, processors)
        self._broken = BrokenRows(self._rows, self._state)
        self._constraints: dict[RowId, RowConstraint] = {}
        self.proposals = DraftProposals.of(drafting, self._rows, group.agree, draft_limits)
        self._last_read = 0.0
        self._reading_s = 0.0
        self._digests = Digests(
            self._rows,
            self._blocks,
            frozenset() if self._encoder is None else self._encoder.members,
        )
        self._fresh: dict[RowId, int] = {}
        """Last prompt token of rows before the first decode."""
        self.starting: Callable[[], None] | None = None
        """Called before the graph is sent; may `collect` the previous step."""
        self._unread: Launched | None = None

    def launch(self, plan: Plan) -> Launched:
        """Start the step. Blocks for rows with a grammar, whose last token is read while the pass
        runs, and for drafts, which need all previous tokens. Raises `RankDiffers` before any
        change."""
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

    # A launch carries out the parts of a plan in an order that the parts themselves dictate.
    #
    # Release, evict, store: make room. Blocks are copied from rows as before this plan: the plan
    #   that drops a row can store the row's last blocks.
    # Drop: before admission, which fills free slots instead of growing buffers.
    # Load, admit: an admitted row may restore blocks that this plan stores or loads. Room for all
    #   new rows is made at once: buffers that grow row by row would be copied each time.
    # Encode: before the prompts that need the vectors. Waits for the device, to measure its time.
    # Prefill: before decoding, because a completed prompt's last token runs in this step's pass.
    # Move: rows that outgrew buffers, before the step depends on the order of rows.
    # Persist: takes references to immutable arrays, which a later plan may evict.
    # Draft: proposals follow from committed tokens alone, which `launch` has read. One pass
    #   verifies or decodes all rows.
    # Sample: last, from the logits. Calls `starting`, then sends the pass to the device.
    #
    # Nothing else waits for the device, except copies between slots, rows with grammars
    # (`SamplingBatch.sample`), and a CPU that stores blocks (`eager_eval`).

    def _launch(self, plan: Plan) -> Launched:
        at, reading_s = time.perf_counter(), self._reading_s
        if plan.release_memory:
            mx.clear_cache()
            self._rows.give_back()
            heap.give_back()
        self._rows.begin_step()
        self._change_blocks_and_rows(plan)
        self.proposals.keep_up()
        encoding = self._encode(plan)
        prefilled = run_chunks(
            self._rows, self._state, plan.prefill, self._modules, self.shapes.lone_tokens
        )
        alone = prefilled.alone
        self._promote([row for row in prefilled.complete if row not in alone])
        self._rows.move_outgrown()
        persisted = self.blocks.persist(plan.persist) if plan.persist else []
        launched = Launched(
            plan=plan, at=at, prefilled=prefilled, persisted=persisted, encoding=encoding
        )
        if self._rows.decoding or alone:
            began = time.perf_counter()
            launched.spans = spans = None if alone else self._draft(plan)
            launched.draft_s = time.perf_counter() - began
            launched.sampled = self._decode(alone) if spans is None else self._verify(spans)
            expected = {*plan.decode, *(chunk.row for chunk in plan.prefill)}
            assert expected.issuperset(launched.rows), "a row decodes that the plan does not name"
        launched.preparing = self._rows.preparing
        launched.banks = self._rows.bank_stats() if plan.report_banks else None
        launched.launch_s = time.perf_counter() - at - (self._reading_s - reading_s)
        return launched

    def _encode(self, plan: Plan) -> EncodeResults:
        if self._encoder is None:
            return NOTHING_ENCODED
        self._encoder.forget(plan.forget)
        results = NOTHING_ENCODED
        if plan.encode:
            self._read_before()  # Else the encoder's time would hold the last step's.
            results = self._encoder.encode(plan.encode)
        assert self._row_images is not None, "rows that run alone take no images"
        for chunk in plan.prefill:
            if chunk.items:
                start = self._state[chunk.row].prefilled
                images = self._encoder.images(chunk.items)
                self._row_images.show(chunk.row, start, start + chunk.tokens, images)
        return results

    @property
    def blocks(self) -> BlockStore:
        assert self._blocks is not None, "rows of this model cannot be stored"
        return self._blocks

    def _change_blocks_and_rows(self, plan: Plan) -> None:
        if plan.evict:
            self.blocks.evict(plan.evict)
        self.proposals.complete({store.row: store.start + sum(store.sizes) for store in plan.store})
        for store in plan.store:
            self.blocks.store(store)
        self._drop(plan.drop)
        self._broken.clean_up()
        self._rows.bound(plan.kv_bound)
        for load in plan.load:
            self.blocks.load(load)
        if plan.admit:
            self._rows.make_room([admit.num_tokens for admit in plan.admit])
        for admit in plan.admit:
            self._admit(admit)

    def _drop(self, rows: Sequence[RowId]) -> None:
        for row in rows:
            del self._state[row]
            self._constraints.pop(row, None)
        self.proposals.drop(rows)
        self._rows.drop(rows)

    def _admit(self, admit: Admit) -> None:
        self._state[admit.row] = state = admitted(admit, self._vocabulary, self._grammars)
        if state.constraint is not None:
            self._constraints[admit.row] = state.constraint
        if admit.restore is not None and admit.restore.source is not None:
            self.proposals.complete({admit.restore.source: admit.restore.tokens})
        self._rows.open(
            admit.row,
            admit.num_tokens,
            1 + self._adapters.index(admit.adapter) if admit.adapter else 0,
        )
        if admit.media:
            assert self._row_images is not None, "rows that run alone take no images"
            self._row_images.open(admit.row, admit.media)
        if admit.restore is not None:
            assert admit.restore.tokens < len(state.prompt), (
                "one token of a prompt must be computed"
            )
            self.blocks.restore(admit.row, admit.restore)
            state.prefilled = admit.restore.tokens
        if self.capabilities.allows("drafts") and self.proposals.wants(ngrams=admit.drafts):
            self.proposals.open(
                admit.row, state.prompt.tolist(), state.prefilled, ngrams=admit.drafts
            )

    def _promote(self, complete: Sequence[RowId]) -> None:
        for row in complete:
            self._fresh[row] = int(self._state[row].prompt[-1])
            self._rows.promote(row)

    def _decode(self, alone: Mapping[RowId, Sequence[int]]) -> Sampled:
        parts = []
        if self._rows.decoding:
            parts.append(self._rows.decode(self._sampling.inputs(self._rows.decoding, self._fresh)))
        for row, tokens in alone.items():
            parts.append(self._rows.first(row, tokens))
            self._rows.promote(row)
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        self._join()
        return self._sample(logits)

    def _draft(self, plan: Plan) -> Spans | None:
        """Propose drafts, up to a token that the row's grammar rejects. None without drafts."""
        if not any(plan.drafts):
            return None
        drafts = self.proposals.drafts(
            dict(zip(plan.decode, plan.drafts, strict=True)), plan.proposer_of
        )
        for row in self._constraints.keys() & drafts.keys():
            drafts[row] = drafts[row][: self._constraints[row].fitting(drafts[row])]
        along = [drafts.get(row, ()) for row in self._rows.decoding]
        return Spans(along) if any(along) else None

    def _verify(self, spans: Spans) -> Sampled:
        last = self._sampling.inputs(self._rows.decoding, self._fresh)
        inputs = mx.concatenate([last[:, None], mx.array(spans.drafts.astype(np.uint32))], axis=1)
        logits = self._rows.verify(inputs, spans.counts)
        self._join()
        flat = logits.reshape(-1, logits.shape[-1])
        return self._sample(flat[indices(spans.grid_indices)] if spans.padded else flat, spans)

    def _sample(self, logits: mx.array, spans: Spans | None = None) -> Sampled:
        return self._sampling.sample(logits, spans, self._read_before, self.starting)

    def _join(self) -> None:
        self._fresh.clear()
        self._sampling.join(tuple(self._rows.decoding))

    def _read_before(self) -> None:
        if self._unread is not None:
            self.collect(self._unread)

    def collect(self, launched: Launched) -> Stepped:
        """Wait for the step and read the tokens."""
        if launched.stepped is None:
            launched.stepped = self._read(launched)
            self._unread = None if self._unread is launched else self._unread
        return launched.stepped

    def _read(self, launched: Launched) -> Stepped:
        """Read what the device computed, and commit tokens and accepted drafts to rows and
        grammars."""
        began = time.perf_counter()
        if launched.prefilled.ready is not None:
            mx.eval(launched.prefilled.ready)
        rows, kept, sampled = launched.rows, None, launched.sampled
        drawn: Ints = (
            np.zeros(0, np.int32) if sampled is None else np.array(sampled.tokens, np.int32)
        )
        drafted: Drafted = ()
        if launched.spans is not None:
            rows, kept, drafted = self._commit(launched.rows, launched.spans, drawn)
            drawn = drawn[kept]
        tokens = tuple(cast(list[int], drawn.tolist()))
        logprobs = sampled.logprobs.read(kept) if sampled and sampled.logprobs else ()
        scores = tuple(score for pending in launched.prefilled.scores for score in pending.read())
        embedded = _read_vectors(launched.prefilled.embedded)
        self._reading_s += (now := time.perf_counter()) - began
        seconds = max(now - max(launched.at, self._last_read), launched.launch_s)
        self._last_read = now
        stepped = Stepped(
            launched.plan.step,
            rows,
            tokens,
            logprobs,
            seconds,
            persisted=tuple(payload.read() for payload in launched.persisted),
            failed=(sampled.failed if sampled else ())
            + self._broken.found(launched, embedded, kept)
            + self._follow(rows, tokens),
            matched=self.proposals.matched(launched.rows) if launched.plan.watch else (),
            prompt_logprobs=scores,
            embedded=embedded,
            drafted=drafted,
            draft_s=launched.draft_s,
            encoded=launched.encoding.encoded,
            unencoded=launched.encoding.failed,
            encode_s=launched.encoding.seconds,
            banks=launched.banks,
            preparing=launched.preparing or self._rows.preparing,
        )
        return (
            stepped
            if launched.plan.digest is None
            else self._digests.settle(stepped, launched.order)
        )

    def _commit(
        self, rows: Sequence[RowId], spans: Spans, sampled: Ints
    ) -> tuple[tuple[RowId, ...], KeptMask, Drafted]:
        """Commit accepted drafts and the token behind (F22)."""
        accepted = spans.accepted(sampled)
        kept = spans.steps <= accepted[spans.owners]
        self._rows.accepted(accepted)
        self._sampling.accepted(spans, sampled, accepted, kept)
        tried = zip(rows, (spans.counts - 1).tolist(), accepted.tolist(), strict=True)
        drafted = tuple((row, tokens, right) for row, tokens, right in tried if tokens)
        return tuple(rows[owner] for owner in spans.owners[kept].tolist()), kept, drafted

    def _follow(
        self, rows: Sequence[RowId], tokens: Sequence[int]
    ) -> tuple[tuple[RowId, RowFault], ...]:
        """Pass sampled tokens to proposers and grammars, except of dropped rows."""
        self.proposals.append(rows, tokens)
        failed = []
        for row, token in zip(rows, tokens, strict=True) if self._constraints else ():
            if (constraint := self._constraints.get(row)) is not None and (
                reason := constraint.accept(token)
            ):
                failed.append((row, RowFault("grammar", reason)))
        return tuple(failed)

    def lengths(self) -> dict[RowId, int]:  # Tokens in each row's KV, for checks.
        return self._rows.lengths()

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes


def _encoder_of(tower: Tower | DistantTower, model: nn.Module, group: RankGroup) -> ImageEncoder:
    if group.size == 1:
        return ImageEncoder(tower)
    return ImageEncoder(tower, VectorSharing.of(model, group, tower.num_deepstack))


class BrokenRows:
    """Ends rows whose logits are not numbers, at the reading of a step, and cleans the buffers.
    `states`: of present rows."""

    # A float16 model may overflow. Attention multiplies masked KV by 0, and NaN stays NaN: the next
    # row in the slot, or cached blocks, would break, too.

    def __init__(self, rows: Rows, states: Mapping[RowId, RowState]) -> None:
        self._rows, self._states = rows, states
        self._found: set[RowId] = set()

    def found(
        self, launched: Launched, embedded: Vectors, kept: KeptMask | None = None
    ) -> tuple[tuple[RowId, RowFault], ...]:
        """Return rows with NaN logits or vectors, a failed logits processor, or no allowed token,
        for `Stepped.failed`. `kept`: counting positions of verified drafts."""
        broken = {row for row, vector in embedded if isnan(unpack_from("<f", vector)[0])}
        faults: dict[int, RowFault] = {}
        if (sampled := launched.sampled) is not None:
            broken.update(
                _row_at(launched, position)
                for position in np.flatnonzero(np.array(sampled.numberless)).tolist()
            )
            faults = sampled.faults(kept)
        self._found |= broken
        others = [
            (_row_at(launched, position), fault) for position, fault in sorted(faults.items())
        ]
        return (*((row, NOT_A_NUMBER) for row in sorted(broken)), *others)

    def clean_up(self) -> None:
        """Runs between drops and admissions."""
        if not self._found <= self._states.keys():
            self._found.intersection_update(self._states)
            self._rows.clean()


def _read_vectors(embedded: Sequence[tuple[RowId, mx.array]]) -> Vectors:
    if not embedded:
        return ()
    # Each read of an array waits for the device.
    vectors = np.array(mx.stack([vector for _, vector in embedded]), "<f4")
    return tuple((row, each.tobytes()) for (row, _), each in zip(embedded, vectors, strict=True))


def _row_at(launched: Launched, position: int) -> RowId:
    return launched.rows[
        position if launched.spans is None else int(launched.spans.owners[position])
    ]
