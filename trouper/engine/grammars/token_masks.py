"""Token masks: bits of the tokens that a row may have next. The device expands bits by a table of
256 bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher

BITS = mx.array(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(
        np.bool_
    )
)
"""(256, 8): bits of each byte, lowest first."""
Mask = np.ndarray[Any, np.dtype[np.uint8]]
"""Lowest bit first."""


def mask_bytes(vocabulary: int) -> int:
    """Bytes of a mask of `vocabulary` logits: a multiple of 4, for 32-bit words."""
    return (vocabulary + 31) // 32 * 4


def reason_of(message: str) -> str:
    """Shorten llguidance's message to one line."""
    first, *remaining = message.strip().splitlines() or [""]
    return " ".join(
        [first, *(line.removeprefix("error: ") for line in remaining if line.startswith("error: "))]
    )


class Constraint:
    """The state of one row in a grammar."""

    def __init__(self, matcher: LLMatcher, eos: Mask, min_tokens: int, ends: Mask) -> None:
        self._matcher, self._eos, self._min_tokens, self._ends = matcher, eos, min_tokens, ends

    @property
    def fault(self) -> str:
        """Why the grammar cannot be followed further, or "". Masks are then meaningless."""
        return reason_of(self._matcher.get_error()) if self._matcher.is_error() else ""

    def accept(self, token: int) -> str:
        """Consume the next token. Returns an error message, or ""."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            return self.fault or "the grammar does not go on"
        return ""

    def fitting(self, draft: Sequence[int]) -> int:
        return 0 if self._matcher.is_stopped() else self._matcher.validate_tokens(list(draft))

    def along(self, draft: Sequence[int], drawn: int) -> list[Mask]:
        """Masks before each draft token, and after the last; fewer if the grammar ends."""
        # On a copy of the matcher, since a failed one cannot be rolled back.
        masks = [self.allowed(drawn)]
        lookahead = Constraint(self._matcher.deep_copy(), self._eos, self._min_tokens, self._ends)
        for index, token in enumerate(draft, 1):
            if lookahead.accept(token):
                break
            mask = lookahead.allowed(drawn + index)
            if lookahead.fault:
                break
            masks.append(mask)
        return masks

    def allowed(self, drawn: int) -> Mask:
        """Mask after `drawn` tokens; a complete text allows only the end."""
        stopped = self._matcher.is_stopped()
        mask = (
            self._eos
            if stopped
            else np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: len(self._eos)]
        )
        if drawn >= self._min_tokens:
            return mask
        remaining = mask & ~self._ends
        return remaining if remaining.any() else mask


def masked(logits: mx.array, rows: mx.array, packed: Mask) -> mx.array:
    """Set logits (n, V) to -inf where masks `packed` (k, bytes) of `rows` (k,) forbid a token."""
    allowed = BITS[mx.array(packed)].reshape(packed.shape[0], -1)[:, : logits.shape[1]]
    if packed.shape[0] == logits.shape[0]:
        # All rows are masked: two copies of the logits less, two thirds of the time.
        return mx.where(allowed, logits, -mx.inf)
    shaped = logits.astype(mx.float32)
    shaped[rows] = mx.where(allowed, shaped[rows], -mx.inf)
    return shaped


Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Evicts the least recently used values beyond a bound in bytes. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()
        self.nbytes = 0

    def get(self, key: Hashable) -> Value | None:
        """Return a value and count it as used; None: absent."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: Value, nbytes: int) -> None:
        """Add a value, unless larger than the bound."""
        with self._lock:
            if key in self._values:
                self.nbytes -= self._values.pop(key)[1]
            self._values[key] = value, nbytes
            self.nbytes += nbytes
            while self.nbytes > self._max_bytes:
                _, (_, size) = self._values.popitem(last=False)
                self.nbytes -= size
