"""Rows of models that cannot share a pass."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from trouper.engine.kv.model_body import body_of
from trouper.engine.lora.row_adapters import AdapterRows, applied
from trouper.engine.passes.region import Ints
from trouper.engine.passes.seams import exchanging
from trouper.engine.platform.eager_eval import start_eval
from trouper.protocol.kv import BankStats
from trouper.protocol.plans import KvBound, RowId

# Tokens of three passes: after the first, which may be as long as most windows, two equal ones show
# the growth.
MEASURED = (1024, 256, 256)


class SingleRows:
    """Each row has the model's own caches and passes. No KV is stored or restored."""

    preparing = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._caches: dict[RowId, list[Any]] = {}
        self._lengths: dict[RowId, int] = {}
        self._decoding: list[RowId] = []
        self._adapters = AdapterRows(model)

    def begin_step(self) -> None:
        """Preparations are not counted."""

    @property
    def decoding(self) -> Sequence[RowId]:
        return self._decoding

    @property
    def order(self) -> Sequence[RowId]:
        return [*self._decoding, *(row for row in self._caches if row not in self._decoding)]

    def make_room(self, lengths: Sequence[int]) -> None:
        """Each row has its own caches."""

    def bound(self, bound: KvBound | None) -> None:
        pass

    def give_back(self) -> None:
        """Caches are freed with the row."""

    def clean(self) -> None:
        """Rows share no buffers."""

    def move_outgrown(self) -> None:
        """Each row has its own caches."""

    def open(self, row: RowId, tokens: int = 0, adapter: int = 0) -> None:  # noqa: ARG002
        self._adapters.open(row, adapter)
        self._caches[row] = make_prompt_cache(self._model)
        self._lengths[row] = 0

    def prefill(self, chunks: Mapping[RowId, Sequence[int]]) -> mx.array | None:
        done = None
        for row, tokens in chunks.items():
            if tokens:
                self._forward(row, mx.array([tokens]))
                states = tree_flatten([cache.state for cache in self._caches[row]])
                done = start_eval([state for _, state in states if isinstance(state, mx.array)])
        return done

    def score(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        return self._forward(row, mx.array([tokens]))[0]

    def hidden(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        assert self._body is not None, "this model gives no embeddings"
        self._lengths[row] += len(tokens)
        with exchanging(self._model), applied(self._adapters.of([row])):
            states: mx.array = self._body(mx.array([tokens]), cache=self._caches[row])
        return states[0]

    @cached_property
    def _body(self) -> nn.Module | None:
        return body_of(self._model)

    def promote(self, row: RowId) -> None:
        self._decoding.append(row)

    def decodes_from_nothing(self, row: RowId) -> bool:  # noqa: ARG002  Each row runs alone.
        return True

    def first(self, row: RowId, tokens: Sequence[int]) -> mx.array:
        return self._forward(row, mx.array([tokens]))[:, -1, :]

    def decode(self, tokens: mx.array) -> mx.array:
        rows = [
            self._forward(row, tokens[index : index + 1, None])
            for index, row in enumerate(self._decoding)
        ]
        return mx.concatenate([logits[:, -1, :] for logits in rows])

    def verify(self, tokens: mx.array, counts: Ints) -> mx.array:  # noqa: ARG002
        raise AssertionError("rows that step alone draft nothing")

    def accepted(self, more: Ints) -> None:  # noqa: ARG002
        raise AssertionError("rows that step alone draft nothing")

    def _forward(self, row: RowId, tokens: mx.array) -> mx.array:
        self._lengths[row] += tokens.shape[1]
        with exchanging(self._model), applied(self._adapters.of([row])):
            logits: mx.array = self._model(tokens, cache=self._caches[row])
        return logits

    def drop(self, rows: Sequence[RowId]) -> None:
        for row in rows:
            del self._caches[row], self._lengths[row]
        self._adapters.drop(rows)
        self._decoding = [row for row in self._decoding if row in self._caches]

    def lengths(self) -> dict[RowId, int]:
        return dict(self._lengths)

    @property
    def nbytes(self) -> int:
        return sum(map(_bytes_of, itertools.chain(*self._caches.values())))

    def bank_stats(self) -> tuple[BankStats, ...]:
        """One bank, whose capacity is the longest row."""
        rows = len(self._lengths)
        if not rows:
            return ()
        return (
            BankStats(
                capacity_tokens=max(self._lengths.values()),
                rows=rows,
                slots=rows,
                bytes=self.nbytes,
            ),
        )


def _bytes_of(cache: Any) -> int:
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    # Some of mlx-vlm's. Empty before the first pass.
    states = (array for _, array in tree_flatten(cache.state))
    return sum(array.nbytes for array in states if isinstance(array, mx.array))


def measure_row(model: nn.Module) -> tuple[int, int]:
    """Bytes that the model's own caches keep for a token, and besides, by passes that are built,
    not run. (0, 0): unknown, or an encoder."""
    caches, sizes = make_prompt_cache(model), [0]
    try:
        for tokens in MEASURED:
            model(mx.ones((1, tokens), mx.int32), cache=caches)
            sizes.append(sum(map(_bytes_of, caches)))
    except Exception:  # noqa: BLE001  Any architecture's code.
        return 0, 0
    per_token = -(-(sizes[-1] - sizes[-2]) // MEASURED[-1])
    return per_token, max(0, sizes[-1] - per_token * sum(MEASURED))
