"""Faults that the tests plant into right models and caches, each wrong in one way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.recurrent_state import StateRows
from trouper.engine.kv.ring_slots import RingSlots
from trouper.engine.kv.slot_cache import SlotCache
from trouper.engine.passes.region import Ints, Region
from trouper.protocol.capabilities import Feature


class Proxy:
    """A slot cache that gives the model something wrong."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @property
    def region(self) -> Region:
        return self._cache.region


class OffsetOffByOne(Proxy):
    """With several rows."""

    @property
    def offset(self) -> mx.array | int:
        return self._cache.offset + int(len(self.region.lengths) > 1)


class OffsetOfTheWidest(Proxy):
    """Every row stands where the longest does: the offset is taken from the width of the keys."""

    @property
    def offset(self) -> mx.array:
        return mx.full(self.region.offset.shape, int(self.region.lengths.max()))


class MaskOfRowOneIgnored(Proxy):
    def make_mask(self, *given: Any, **more: Any) -> Any:
        mask = self._cache.make_mask(*given, **more)  # type: ignore[attr-defined]
        if isinstance(mask, mx.array) and mask.shape[0] > 1:
            mask = mx.concatenate([mask[:1], mx.ones_like(mask[1:2]), mask[2:]])
        return mask


class FirstTokenMisplaced(Proxy):
    """A row without KV that decodes beside others."""

    @property
    def offset(self) -> mx.array | int:
        lengths = self.region.lengths
        beside = self.region.width == 1 and len(lengths) > 1
        return self._cache.offset + mx.array(((lengths == 0) & beside).astype("int32"))


class PaddingTakenIn(Proxy):
    """Rows with padding in a prompt's pass get other values."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        padded = (self.region.counts < self.region.width) & (not self.region.singly)
        factor = mx.array(1.0 + padded.astype("float32")).reshape(-1, 1, 1, 1)
        return self._cache.update_and_fetch(keys, values * factor)  # type: ignore[attr-defined]


class DraftsLeaveTraces(Proxy):
    """A pass over drafts overwrites what the row began with."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        found = self._cache.update_and_fetch(keys, values)  # type: ignore[attr-defined]
        if self.region.singly and self.region.width > 1:
            buffer = self._cache.buffers[1]
            buffer[self.region.start : self.region.stop, :, :1] = values[:, :, -1:]
        return found


class Planted(nn.Module):  # type: ignore[misc]
    """A model whose passes go wrong. `before` is called with the tokens and the caches of each
    pass, and gives the caches."""

    def __init__(
        self, inner: nn.Module, before: Callable[[mx.array, list[Any]], list[Any]]
    ) -> None:
        super().__init__()
        self.inner = inner
        self._before = before

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = self.inner(tokens, cache=self._before(tokens, cache))
        return logits

    @property
    def layers(self) -> Sequence[nn.Module]:
        layers: Sequence[nn.Module] = self.inner.layers
        return layers

    def make_cache(self) -> list[Any]:
        caches: list[Any] = make_prompt_cache(self.inner)
        return caches


def through(proxy: type[Proxy]) -> Callable[[nn.Module], nn.Module]:
    """Slot caches are replaced, those of mlx-lm are not."""

    def before(_: mx.array, caches: list[Any]) -> list[Any]:
        return [proxy(cache) if isinstance(cache, SlotCache) else cache for cache in caches]

    return lambda model: Planted(model, before)


def raising(when: Callable[[mx.array, list[Any]], bool]) -> Callable[[nn.Module], nn.Module]:
    def before(tokens: mx.array, caches: list[Any]) -> list[Any]:
        if when(tokens, caches):
            raise ValueError("shapes that nobody meant")
        return caches

    return lambda model: Planted(model, before)


def in_slots(caches: list[Any]) -> bool:
    return any(isinstance(cache, SlotCache) for cache in caches)


def leaking(model: nn.Module) -> nn.Module:
    """Recurrent state of several rows becomes their mean."""

    def before(tokens: mx.array, caches: list[Any]) -> list[Any]:
        for cache in caches:
            if isinstance(cache, ArraysCache) and tokens.shape[0] > 1:
                cache.cache = [
                    mx.broadcast_to(state.mean(0, keepdims=True), state.shape)
                    for state in cache.cache
                ]
        return caches

    return Planted(model, before)


class Nonsense(Planted):
    """A model without any numbers."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return super().__call__(tokens, cache) * mx.nan


class ByChunk(Planted):
    """A model whose logits depend on how many tokens it is fed at a time."""

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = super().__call__(tokens, cache)
        return logits * (
            1 + 0.3 * mx.arange(logits.shape[-1]) / logits.shape[-1] * (tokens.shape[1] % 3)
        )


def unchanged(_: mx.array, caches: list[Any]) -> list[Any]:
    return caches


# -- faults of our own caches --------------------------------------------------------------------


def written_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored values begin one token late. (Keys and values together would be the same KV in
    another order.)"""
    write, begin_with = FullSlots.write, FullSlots.begin_with

    def shifted(
        self: FullSlots, slot: int, start: int, parts: Sequence[mx.array], room: int = 0
    ) -> None:
        write(self, slot, start, [parts[0], mx.roll(parts[1], 1, 1)], room)

    def begun(self: FullSlots, parts: Sequence[Sequence[mx.array]], room: int) -> None:
        begin_with(self, [parts[0], [mx.roll(piece, 1, 1) for piece in parts[1]]], room)

    monkeypatch.setattr(FullSlots, "write", shifted)
    monkeypatch.setattr(FullSlots, "begin_with", begun)


def snapshot_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows come back one token off."""
    restore = RingSlots.restore

    def rotated(self: RingSlots, slot: int, length: int, parts: Sequence[mx.array]) -> None:
        restore(self, slot, length, [mx.roll(part, 1, 0) for part in parts])

    monkeypatch.setattr(RingSlots, "restore", rotated)


def window_one_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    visible = RingSlots._visible
    monkeypatch.setattr(RingSlots, "_visible", lambda self, window: visible(self, window + 1))


def rows_stay_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that takes a slot that became free leaves its KV behind."""
    monkeypatch.setattr(SlotCache, "put_row", lambda *_: None)


def one_draft_too_many_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent states are those after one token more than a row has."""
    keep_tokens = StateRows.keep_tokens

    def keep_more(self: StateRows, kept: Ints) -> None:
        keep_tokens(self, kept + 1)

    monkeypatch.setattr(StateRows, "keep_tokens", keep_more)


@attrs.frozen
class Fault:
    """family: of the right model. feature: what must be turned off. model, caches: how it goes
    wrong."""

    family: str
    feature: Feature
    model: Callable[[nn.Module], nn.Module] = lambda model: model
    caches: Callable[[pytest.MonkeyPatch], None] = lambda _: None


FAULTS = {
    "an offset off by one with several rows": Fault("llama", "batch", through(OffsetOffByOne)),
    "an offset from the width of the keys": Fault("llama", "batch", through(OffsetOfTheWidest)),
    "a mask that is ignored for one row": Fault("qwen3", "batch", through(MaskOfRowOneIgnored)),
    "a crash with two rows": Fault(
        "llama", "batch", raising(lambda tokens, _: tokens.shape[0] == 2)
    ),
    "a crash with an odd chunk": Fault(
        "llama",
        "batch",
        raising(
            lambda tokens, caches: tokens.shape[1] % 2 == 1 < tokens.shape[1] and in_slots(caches)
        ),
    ),
    "state that leaks between rows": Fault("lfm2", "batch", leaking),
    "a window one token too wide": Fault("gemma3_text", "batch", caches=window_one_wider),
    "KV that stays behind when a row moves": Fault(
        "mixtral", "batch", caches=rows_stay_where_they_were
    ),
    "a first token that is misplaced beside others": Fault(
        "llama", "prefill_together", through(FirstTokenMisplaced)
    ),
    "padding that is taken in": Fault("qwen2", "prefill_together", through(PaddingTakenIn)),
    "blocks restored one token late": Fault("llama", "restore", caches=written_shifted),
    "a window restored one token off": Fault("gpt_oss", "restore", caches=snapshot_rotated),
    "states of one draft token too many": Fault(
        "qwen3_5", "drafts", caches=one_draft_too_many_kept
    ),
    "states of one draft token too many, of all that there is": Fault(
        "rwkv7", "drafts", caches=one_draft_too_many_kept
    ),
    "drafts that leave traces": Fault("phi3", "drafts", through(DraftsLeaveTraces)),
}
