"""Sampling of the decoding rows. Arrays are rebuilt when rows change; the last tokens stay lazy,
the next pass's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.grammars.token_masks import Mask, masked
from trouper.engine.passes.region import Ints
from trouper.engine.sampling.dry import Dry
from trouper.engine.sampling.logits_processors import NO_PROCESSORS, ProcessedRows, Unusable
from trouper.engine.sampling.logprobs import KeptMask, PendingLogprobs, logprobs_of
from trouper.engine.sampling.penalties import Bias, MinTokens, Penalties
from trouper.engine.sampling.row_state import RowConstraint, RowState
from trouper.engine.sampling.sampler import BatchSampler
from trouper.engine.spec_decode.verification_spans import Spans
from trouper.protocol.logits_processor import Processors
from trouper.protocol.plans import NO_CHOICE, RowFault, RowId


@attrs.frozen(eq=False, kw_only=True)
class Sampled:
    """Result of sampling a step, lazy: one entry for each row, or for each position of verified
    drafts."""

    rows: tuple[RowId, ...]
    """Rows that decode, in the order of `tokens`."""
    tokens: mx.array
    """(n,) uint32."""
    logprobs: PendingLogprobs | None
    failed: tuple[tuple[RowId, RowFault], ...]
    """Rows whose grammar failed to make a mask."""
    numberless: mx.array
    """(n,) bool: whether the model's logits are no numbers."""
    unusable: Unusable | None
    """Failures of logits processors; None: no row has any."""
    choiceless: mx.array | None
    """(n,) bool: whether no token was left to choose. None: nothing changed the model's logits."""
    is_lazy: bool
    """Whether only a graph was built: grammars, logits processors and, on a CPU, top_p wait for
    values."""

    def faults(self, kept: KeptMask | None = None) -> dict[int, RowFault]:
        """Wait for the device and return the faults by position, without those in `failed` or of
        the model. `kept`: the positions before a rejected draft."""
        faults = {} if self.unusable is None else self.unusable.faults(kept)
        for position in (
            [] if self.choiceless is None else np.flatnonzero(np.array(self.choiceless)).tolist()
        ):
            if kept is None or kept[position]:
                faults.setdefault(position, NO_CHOICE)
        return faults

    def arrays(self) -> list[mx.array]:
        flags = [] if self.unusable is None else [self.unusable.flags]
        flags += [] if self.choiceless is None else [self.choiceless]
        return [
            self.tokens,
            self.numberless,
            *flags,
            *(self.logprobs.arrays() if self.logprobs else []),
        ]


class SamplingBatch:
    """`states`: the engine's state of each row. `processors`: logits processors by name."""

    def __init__(
        self,
        vocabulary: int,
        group: RankGroup,
        states: Mapping[RowId, RowState],
        processors: Processors = NO_PROCESSORS,
    ) -> None:
        self.members: tuple[RowId, ...] = ()
        """The decoding rows, in order."""
        self._vocabulary, self._group, self._states = vocabulary, group, states
        self._processors = processors
        self._tokens: mx.array | None = None
        """The last sampled tokens; None until drafts are verified."""
        self.drawn = np.zeros(0, np.uint64)
        """(n,): number of tokens that each member has sampled."""
        self._constrained: list[tuple[int, RowConstraint]] = []

    def inputs(self, rows: Sequence[RowId], fresh: Mapping[RowId, int]) -> mx.array:
        """Return the next input of each row, (n,): the last sampled token, or the `fresh` one."""
        if tuple(rows) == self.members and self._tokens is not None:
            return self._tokens
        index_of = {row: index for index, row in enumerate(self.members)}
        new = mx.array([fresh.get(row, 0) for row in rows], mx.uint32)
        if not any(row in index_of for row in rows):
            return new
        assert self._tokens is not None
        old = self._tokens[mx.array([index_of.get(row, 0) for row in rows])]
        return mx.where(mx.array([row in index_of for row in rows]), old, new)

    def join(self, rows: tuple[RowId, ...]) -> None:
        """Set the decoding rows, and rebuild the arrays if they changed."""
        if rows == self.members:
            return
        self._keep_states()
        self.members = rows
        states = [self._states[row] for row in rows]
        samplings = [state.sampling for state in states]
        self._sampler = BatchSampler(samplings, self._vocabulary)
        self._bias = Bias(samplings)
        self._min_tokens = MinTokens(
            [(0 if state.constraint else state.min_tokens, state.ends) for state in states]
        )
        self._constrained = [
            (index, state.constraint) for index, state in enumerate(states) if state.constraint
        ]
        self._constrained_indices = mx.array([index for index, _ in self._constrained], mx.int32)
        self._penalties = Penalties(samplings, [state.history for state in states])
        self._dry = Dry(samplings, [state.repetitions for state in states])
        self._processed = ProcessedRows(
            [state.processors for state in states],
            [state.tokens for state in states],
            self._processors,
        )
        self._histories = (self._penalties, self._dry, self._processed)
        self.drawn = np.array([state.drawn for state in states], np.uint64)
        self._logprob_requests = [
            (index, rows[index], k)
            for index, state in enumerate(states)
            if (k := state.logprobs) is not None
        ]
        self._logprob_tokens = {
            row: state.logprob_tokens
            for row, state in zip(rows, states, strict=True)
            if state.logprob_tokens
        }

    def _keep_states(self) -> None:
        """Write the arrays' state back to the rows."""
        for history in self._histories if self.members else ():
            history.unstack()
        for row, drawn in zip(self.members, self.drawn.tolist(), strict=True):
            if row in self._states:
                self._states[row].drawn = drawn

    def sample(
        self,
        logits: mx.array,
        spans: Spans | None,
        read_before: Callable[[], None],
        starting: Callable[[], None] | None,
    ) -> Sampled:
        """Sample tokens (n,) from logits (n, V), or one for each position of the spans, after which
        `accepted` must follow. `read_before` reads the previous tokens, for grammars. `starting` is
        called after the graph is built."""
        drawn = (
            self.drawn
            if spans is None
            else self.drawn[spans.owners] + spans.steps.astype(np.uint64)
        )
        shaped = self._bias(logits, spans)
        for penalties in (self._penalties, self._dry):
            shaped = penalties(shaped, spans)
        shaped, unusable = self._processed(shaped, spans)
        shaped = self._min_tokens(shaped, drawn, spans)
        if self._constrained:
            # The device computes the logits while the masks are made from the previous tokens.
            mx.async_eval(logits)
            read_before()
            shaped = self._follow_grammars(shaped, spans)
        if starting is not None and self._sampler.reads_logits:
            starting()  # Else the tokens before would wait for this pass.
            starting = None
        tokens = self._group.agree(
            self._sampler(shaped, drawn, None if spans is None else spans.owners)
        )
        self.drawn += np.uint64(1)
        for history in self._histories if spans is None else ():
            history.count(tokens)
        requested = self._logprob_requests if spans is None else self._logprobs_along(spans)
        logprobs = logprobs_of(logits, tokens, requested, self._logprob_tokens)
        if starting is not None:
            starting()
        sampled = Sampled(
            rows=self.members,
            tokens=tokens,
            logprobs=logprobs,
            failed=self._failed_grammars(),
            # One shows it for all, which are products of the same hidden state.
            numberless=mx.isnan(logits[:, 0]),
            unusable=unusable,
            choiceless=None if shaped is logits else _choiceless(shaped, tokens),
            is_lazy=not (self._constrained or self._sampler.reads_logits or unusable),
        )
        mx.async_eval(sampled.arrays(), self._history_arrays())
        self._tokens = tokens if spans is None else None
        return sampled

    def accepted(self, spans: Spans, sampled: Ints, accepted: Ints, kept: KeptMask) -> None:
        """Apply a verification. sampled, kept: (positions,); accepted: (n,) number of accepted
        drafts."""
        self.drawn += accepted.astype(np.uint64)
        self._tokens = mx.array(sampled[spans.starts + accepted].astype(np.uint32))
        for history in self._histories:
            history.accepted(spans, sampled, kept)
        mx.async_eval(self._history_arrays())

    def _history_arrays(self) -> list[mx.array]:
        return [array for history in self._histories for array in history.state()]

    def _logprobs_along(self, spans: Spans) -> list[tuple[int, RowId, int]]:
        starts, counts = spans.starts.tolist(), spans.counts.tolist()
        return [
            (position, row, k)
            for index, row, k in self._logprob_requests
            for position in range(starts[index], starts[index] + counts[index])
        ]

    def _follow_grammars(self, shaped: mx.array, spans: Spans | None) -> mx.array:
        masks: list[Mask] = []
        positions = self._constrained_indices
        if spans is None:
            masks = [
                constraint.allowed(int(self.drawn[index]))
                for index, constraint in self._constrained
            ]
        else:
            positions = self._masks_along(spans, masks)
        return masked(shaped, positions, np.stack(masks))

    def _failed_grammars(self) -> tuple[tuple[RowId, RowFault], ...]:
        return tuple(
            (self.members[index], RowFault("grammar", constraint.fault))
            for index, constraint in self._constrained
            if constraint.fault
        )

    def _masks_along(self, spans: Spans, masks: list[Mask]) -> mx.array:
        """Append the masks of constrained rows to `masks`. Returns the positions."""
        positions: list[int] = []
        for index, constraint in self._constrained:
            along = constraint.along(spans.drafts_of(index), int(self.drawn[index]))
            spans.max_accepted[index] = len(along) - 1
            positions += range(spans.starts[index], spans.starts[index] + len(along))
            masks += along
        return mx.array(positions, mx.int32)


def _choiceless(shaped: mx.array, tokens: mx.array) -> mx.array:
    """Return whether no token was left to choose from logits (n, V), (n,): then the sampled token
    is forbidden."""
    return mx.logical_not(mx.take_along_axis(shaped, tokens[:, None], axis=-1)[:, 0] > -mx.inf)
