"""Shapes of a model's KV, found by a lazy pass that is never evaluated, and of blocks and
snapshots."""

# A block of r tokens is an array (planes, r, dim) for each dim and dtype: all heads of keys and
# values of all layers. Few large arrays cost about three copies of the bytes, one array a layer 3
# to 8, tokens as the outermost axis 13 to 24 (benchmarks/blocks.py).

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, chain, islice
from typing import TypeVar

import attrs
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from trouper.engine.kv.full_slots import FullSlots
from trouper.engine.kv.model_caches import begin, build_pass, flatten, guess_batching, slot_caches
from trouper.engine.kv.quantized_kv import KvFormat
from trouper.engine.kv.recorded_calls import layers_with_cache, recorded_calls
from trouper.engine.kv.recurrent_state import STEPS_BACK, StateSlots
from trouper.engine.kv.ring_slots import RingSlots, ring_length, ring_slack
from trouper.engine.kv.single_rows import measure_row
from trouper.engine.passes.pass_shapes import LEAD, NO_CUDNN, of_device
from trouper.engine.passes.region import Region
from trouper.protocol.capabilities import Capabilities
from trouper.protocol.kv import FIRST_BANK, KvLayout


@attrs.frozen
class ArrayShape:
    dims: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.dims)) * self.dtype.size

    @classmethod
    def of(cls, array: mx.array) -> ArrayShape:
        return cls(tuple(array.shape), array.dtype)


# Bytes of the array between blocks and slots. CPU allocators return larger arrays to the system,
# and pages are faulted in again.
SLAB_BYTES = 2**24
Leaves = tuple[tuple[ArrayShape, ...], ...]


@attrs.frozen
class Layout:
    """Arrays of blocks and snapshots. full: (heads, 1, dim) for each buffer that can be cut at a
    token. rings: (window, heads, dim). states: (1, ...). call_bytes: arguments of the recorded
    calls, for one token of a verifying pass."""

    full: Leaves
    rings: Leaves
    states: Leaves
    call_bytes: int = 0

    @cached_property
    def sliceable(self) -> tuple[ArrayShape, ...]:
        """One token's shape in each buffer that can be cut at a token."""
        return tuple(chain.from_iterable(self.full))

    @cached_property
    def token_bytes(self) -> int:
        return sum(shape.nbytes for shape in self.sliceable)

    @cached_property
    def snapshot_bytes(self) -> int:
        return self.state_bytes + sum(shape.nbytes for shape in chain(*self.rings))

    @cached_property
    def ring_token_bytes(self) -> int:
        return sum(shape.nbytes // shape.dims[0] for shape in chain(*self.rings))

    @cached_property
    def state_bytes(self) -> int:
        return sum(shape.nbytes for shape in chain(*self.states))

    @cached_property
    def digest(self) -> str:
        """Hash of shapes, dtypes and the order of arrays, in hex."""
        return sha256(repr((self.full, self.rings, self.states)).encode()).hexdigest()[:16]

    def block(self, tokens: int) -> list[ArrayShape]:
        return [
            ArrayShape((sum(self.sliceable[index].dims[0] for index in group), tokens, dim), dtype)
            for (dim, dtype), group in self._groups.items()
        ]

    def snapshot(self, tokens: int) -> list[ArrayShape]:
        rings = [
            ArrayShape((min(tokens, ring.dims[0]), *ring.dims[1:]), ring.dtype)
            for ring in chain(*self.rings)
        ]
        return [*rings, *chain(*self.states)]

    def pack(self, parts: Sequence[mx.array]) -> list[mx.array]:
        """Concatenate the (heads, n, dim) arrays of all buffers to a block's arrays."""
        return [
            mx.concatenate([parts[index] for index in group]) for group in self._groups.values()
        ]

    def unpack(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        return [arrays[array][planes] for array, planes in self.planes]

    @cached_property
    def planes(self) -> list[tuple[int, slice]]:
        """For each buffer, the array of a block and the planes there."""
        found: dict[int, tuple[int, slice]] = {}
        for array, group in enumerate(self._groups.values()):
            ends = list(accumulate(self.sliceable[index].dims[0] for index in group))
            starts = [0, *ends[:-1]]
            found |= {
                index: (array, slice(*ends_of))
                for index, *ends_of in zip(group, starts, ends, strict=True)
            }
        return [found[index] for index in range(len(self.sliceable))]

    def slabs(self, tokens: int) -> list[Slab]:
        """Split all leaves into slabs of at most SLAB_BYTES for this many tokens."""
        sizes = [sum(shape.nbytes for shape in leaf) * tokens for leaf in self.full]
        slabs, first, above = [], 0, dict.fromkeys(self._groups, 0)
        for last in range(1, len(sizes) + 1):
            if last == len(sizes) or sum(sizes[first : last + 1]) > SLAB_BYTES:
                subset = Layout(self.full[first:last], (), ())
                slabs.append(Slab(slice(first, last), subset, self._planes(subset, above)))
                first = last
        return slabs

    def _planes(
        self, subset: Layout, above: dict[tuple[int, mx.Dtype], int]
    ) -> list[tuple[int, slice]]:
        # For each array of `subset`, the array here and the planes there. Advances `above`.
        planes = []
        for index, key in enumerate(self._groups):
            if key in subset._groups:
                count = sum(subset.sliceable[buffer].dims[0] for buffer in subset._groups[key])
                planes.append((index, slice(above[key], above[key] + count)))
                above[key] += count
        order = list(subset._groups)
        return sorted(planes, key=lambda plane: order.index(list(self._groups)[plane[0]]))

    @cached_property
    def _groups(self) -> dict[tuple[int, mx.Dtype], list[int]]:
        # Buffers that share an array, by (dim, dtype).
        groups: dict[tuple[int, mx.Dtype], list[int]] = {}
        for index, shape in enumerate(self.sliceable):
            groups.setdefault((shape.dims[2], shape.dtype), []).append(index)
        return groups


@attrs.frozen
class Slab:
    """Consecutive leaves, and the planes in the arrays of a whole block."""

    leaves: slice
    layout: Layout
    planes: list[tuple[int, slice]]


def layout_of(model: nn.Module, kv: KvFormat, *drafters: nn.Module) -> Layout:
    """Derive the layout from an unevaluated pass over one token. The layers of `drafters` come
    last."""
    if drafters:
        own = layout_of(model, kv)
        theirs = [leaf for drafter in drafters for leaf in layout_of(drafter, kv).full]
        return attrs.evolve(own, full=(*own.full, *theirs))
    caches = slot_caches(model, kv)
    leaves = flatten(caches)
    region = Region(0, np.zeros(1, np.int32), np.ones(1, np.int32), 1)
    begin(caches, region)
    states = [leaf.view for leaf in leaves if isinstance(leaf, StateSlots)]
    for state in states:
        state.calls = []
    with recorded_calls(layers_with_cache(model) if states else []):
        build_pass(model, caches, region)
    return Layout(
        tuple(tuple(map(_token, leaf.buffers)) for leaf in leaves if isinstance(leaf, FullSlots)),
        tuple(
            tuple(_window(leaf, buffer) for buffer in leaf.buffers)
            for leaf in leaves
            if isinstance(leaf, RingSlots)
        ),
        tuple(
            tuple(map(ArrayShape.of, leaf.state()))
            for leaf in leaves
            if isinstance(leaf, StateSlots)
        ),
        call_bytes=sum(call.nbytes for state in states for call in state.calls or ()),
    )


def _token(buffer: mx.array) -> ArrayShape:
    _, heads, _, dim = buffer.shape
    return ArrayShape((heads, 1, dim), buffer.dtype)


def _window(leaf: RingSlots, buffer: mx.array) -> ArrayShape:
    _, heads, _, dim = buffer.shape
    return ArrayShape((leaf.window, heads, dim), buffer.dtype)


T = TypeVar("T")


def dealt(parts: Sequence[T], leaves: Leaves) -> list[list[T]]:
    """Split the parts of all caches of one kind by cache."""
    remaining = iter(parts)
    parts_of_leaves = [list(islice(remaining, len(leaf))) for leaf in leaves]
    assert next(remaining, None) is None, "more arrays than the model has"
    return parts_of_leaves


def kv_layout(
    model: nn.Module,
    kv: KvFormat,
    capabilities: Capabilities | None = None,
    drafters: Sequence[nn.Module] = (),
    *,
    draft_tokens: int = 0,
) -> KvLayout:
    """The KV layout for the model's card. `capabilities` None: guessed. `drafters`: draft model and
    MTP head. `draft_tokens`: the longest draft."""
    if capabilities is None:
        capabilities = guess_batching(model)
    reason = capabilities.batch or capabilities.restore
    not_kept = f"not kept beyond a row ({reason})"
    if capabilities.batch:
        token_bytes, row_bytes = measure_row(model)
        return KvLayout(
            cached=False,
            token_bytes=token_bytes,
            ring_slack_bytes=row_bytes,
            first_bank=0,
            description=not_kept,
        )
    layout = layout_of(model, kv, *drafters)
    verified_bytes = layout.state_bytes + (1 + draft_tokens) * layout.call_bytes
    kept = KvLayout(
        token_bytes=layout.token_bytes,
        snapshot_bytes=layout.snapshot_bytes,
        ring_slack_bytes=layout.ring_token_bytes * ring_length(0, ring_slack(draft_tokens)),
        dequantized_token_bytes=max(
            (_dequantized_bytes(leaf, kv) for leaf in layout.full), default=0
        ),
        draft_state_bytes=STEPS_BACK * verified_bytes if capabilities.allows("drafts") else 0,
        lead_tokens=LEAD + NO_CUDNN if of_device().rounded else 0,
        first_bank=FIRST_BANK if capabilities.allows("banks") else None,
        description=_description(layout, kv),
        shapes=layout.digest,
    )
    if not reason:
        return kept
    return attrs.evolve(
        kept,
        cached=False,
        snapshot_bytes=0,
        ring_slack_bytes=kept.ring_slack_bytes + kept.snapshot_bytes,
        description=not_kept,
    )


def _dequantized_bytes(leaf: tuple[ArrayShape, ...], kv: KvFormat) -> int:
    # Bytes of one token's quantized keys and values, dequantized to the scales' dtype.
    scales = [leaf[index + 1] for index, shape in enumerate(leaf) if shape.dtype == mx.uint32]
    return sum(scale.nbytes * kv.group_size for scale in scales)


def _description(layout: Layout, kv: KvFormat) -> str:
    parts = [
        f"{_size(layout.token_bytes)} a token" if layout.token_bytes else "nothing for each token"
    ]
    if layout.snapshot_bytes:
        kinds = [
            name
            for name, present in (
                ("sliding windows", any(layout.rings)),
                ("states", any(layout.states)),
            )
            if present
        ]
        parts.append(f"{_size(layout.snapshot_bytes)} a snapshot of {' and '.join(kinds)}")
    if kv.bits and layout.token_bytes:
        parts.append(_quantized(layout, kv))
    return ", ".join(parts)


def _quantized(layout: Layout, kv: KvFormat) -> str:
    # Each quantized buffer has packed values, scales and biases; the group size does not divide
    # others.
    packed = sum(shape.dtype == mx.uint32 for shape in layout.sliceable)
    plain = len(layout.sliceable) - 3 * packed
    if not packed:
        return f"not quantized (its heads are no multiple of {kv.group_size})"
    return kv.description + (f", but for {plain} of {packed + plain} buffers" if plain else "")


def _size(count: int) -> str:
    for unit in ("bytes", "kB"):
        if count < 10_000:
            return f"{count:.0f} {unit}"
        count = round(count / 1000)
    return f"{count} MB"
