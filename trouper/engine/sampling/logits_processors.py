"""Logits processors: functions of an embedding program that change a row's logits."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.passes.region import Ints
from trouper.engine.sampling.logprobs import KeptMask
from trouper.engine.sampling.token_rows import RowTokens, TokenRows, with_state
from trouper.engine.spec_decode.verification_spans import Spans, indices
from trouper.protocol.logits_processor import Processors
from trouper.protocol.plans import RowFault

NO_PROCESSORS: Processors = {}


@attrs.frozen(eq=False)
class Processed:
    """Result of a row's processors at one position."""

    position: int
    logits: mx.array
    """(1, V). The input, if a processor raised."""
    choices: list[tuple[str, mx.array]]
    """(name of a processor, whether its logits allow no choice); "": the model's own logits."""
    raised: str = ""
    """Why a processor failed at once."""


@attrs.frozen(eq=False)
class Unusable:
    """Failures of a step's processors: exceptions, and lazy flags of logits without a choice."""

    raised: dict[int, str]
    """Exceptions, by position."""

    sources: list[tuple[int, str]]
    """(position, name of a processor), in order; "": the model's own logits."""
    flags: mx.array
    """(sources,) bool."""

    @classmethod
    def of(cls, calls: Sequence[Processed]) -> Unusable:
        choices = [(call.position, name, flag) for call in calls for name, flag in call.choices]
        return cls(
            {call.position: call.raised for call in calls if call.raised},
            [(position, name) for position, name, _ in choices],
            mx.concatenate([flag for _, _, flag in choices]),
        )

    def faults(self, kept: KeptMask | None = None) -> dict[int, RowFault]:
        """Return the fault of the first processor to blame, by position; none where the model's
        logits allow no choice. `kept`: the positions before a rejected draft."""
        blamed: dict[int, str] = {}
        for index in np.flatnonzero(np.array(self.flags)).tolist():
            position, name = self.sources[index]
            if kept is None or kept[position]:
                blamed.setdefault(position, name)
        raised = {
            position: reason
            for position, reason in self.raised.items()
            if kept is None or kept[position]
        }
        reasons = raised | {
            position: (
                f"logits processor {name!r} returned logits that allow no choice: no numbers "
                "(NaN), or all minus infinity"
            )
            for position, name in blamed.items()
            if name
        }
        return {
            position: RowFault("logits_processor", reason) for position, reason in reasons.items()
        }


class ProcessedRows:
    """Rows whose requests name processors."""

    def __init__(
        self,
        rows: Sequence[Sequence[str]],
        tokens: Sequence[RowTokens | None],
        processors: Processors,
    ) -> None:
        """rows: names of each row's processors; tokens: tokens of the rows that have any."""
        kept = with_state(rows, tokens)
        self._rows = np.array([index for index, _, _ in kept], np.int32)
        self._names = [names for _, names, _ in kept]
        self._processors = processors
        self._tokens = TokenRows([own for _, _, own in kept]) if kept else None

    def __call__(
        self, logits: mx.array, spans: Spans | None = None
    ) -> tuple[mx.array, Unusable | None]:
        """Process logits (n, V), or (positions, V) of the spans. Returns the logits, and the
        failures (None: no row has processors)."""
        if self._tokens is None:
            return logits, None
        calls = []
        for index, row in enumerate(self._rows.tolist()):
            tokens = self._tokens.tokens[index, : int(self._tokens.lengths[index])]
            drafts = [] if spans is None else spans.drafts_of(row)
            start = row if spans is None else int(spans.starts[row])
            for step in range(len(drafts) + 1):
                before = (
                    mx.concatenate([tokens, mx.array(drafts[:step], mx.int32)]) if step else tokens
                )
                calls.append(
                    self._processed(
                        self._names[index], start + step, before, logits[start + step][None]
                    )
                )
        result = logits.astype(mx.float32)
        changed = mx.concatenate([call.logits for call in calls])
        result[mx.array([call.position for call in calls])] = changed.astype(mx.float32)
        return result, Unusable.of(calls)

    def _processed(
        self, names: Sequence[str], position: int, tokens: mx.array, logits: mx.array
    ) -> Processed:
        given, choices = logits, [("", _without_choice(logits))]
        for name in names:
            try:
                logits = _checked(self._processors[name](tokens, logits), given.shape)
            except BaseException as error:  # noqa: BLE001
                # An embedder's code: whatever it raises concerns its row alone, also a panic of
                # Rust code, which is no `Exception`.
                reason = f"logits processor {name!r}: {type(error).__name__}: {error}"
                return Processed(position, given, choices, reason)
            choices.append((name, _without_choice(logits)))
        return Processed(position, logits, choices)

    def count(self, tokens: mx.array) -> None:
        """Count the step's lazy tokens, (n,)."""
        if self._tokens is not None:
            self._tokens.append(tokens[mx.array(self._rows)])

    def accepted(self, spans: Spans, tokens: Ints, kept: KeptMask) -> None:
        if self._tokens is not None:
            for positions, mask in spans.kept_of(self._rows, kept):
                self._tokens.append(indices(tokens[positions]), mask)

    def unstack(self) -> None:
        if self._tokens is not None:
            self._tokens.unstack()

    def state(self) -> list[mx.array]:
        """Return the arrays that steps change, (k, W)."""
        return [] if self._tokens is None else [self._tokens.tokens]


def _without_choice(logits: mx.array) -> mx.array:
    """Return whether logits (1, V) allow no choice, (1,): the sampler would take token 0."""
    return mx.isnan(logits).any(axis=-1) | (logits.max(axis=-1) == -mx.inf)


def _checked(returned: object, shape: tuple[int, ...]) -> mx.array:
    """Return a processor's result. Raises if it is no logits of this shape."""
    if not isinstance(returned, mx.array):
        raise TypeError(f"it returned {type(returned).__name__}, not mlx.core.array")
    if returned.shape != shape:
        raise ValueError(f"it returned {returned.shape} for logits of {shape}")
    return returned
