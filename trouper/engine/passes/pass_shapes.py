"""Shapes of a pass: padding, and the rows that share the pass."""

# Some devices prepare kernels for each new shape: 40 ms on an H200 (MLX 0.32.4) for each new pair
# of shapes *and strides* of queries and keys, since cuDNN plans attention; 28 layers with different
# buffers took 1.1 s a chunk. There sizes are rounded to a few values, equal in all layers.

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from trouper.engine.platform import device
from trouper.protocol.kv import CAPACITY_STEP, FIRST_BANK, SHARED_TOKENS, bank_level, kv_capacity

# Tokens by which buffers grow.
STEP = CAPACITY_STEP
# Tokens by which padded passes differ.
WIDTH_STEP = 8
# Widths of compiled passes over lone prompts, prepared before the first request.
LONE_WIDTHS = (*range(32, 257, 32), *range(320, 513, 64))
# Maximum length of buffers for which MLX's kernel decodes faster than cuDNN on an H200: 4.5 ms
# against 5.0 up to 1,800 tokens, 8.5 against 5.2 at 20,000.
VECTOR_TOKENS = 2048
# Tokens by which such buffers are shorter than a multiple of 256, for which MLX would use cuDNN
# with a plan of 40 to 400 ms for each length and number of rows.
NO_CUDNN = 8
# Multiple of tokens at ends of prompt chunks: cuDNN plans for each length, 40 ms.
CHUNK_STEP = 512
# Minimum width of a pass with copied keys. Drafts are fewer: a copy a step costs more than a plan.
COPIED_WIDTH = 64
# Minimum of restored tokens. Restoring 28 layers launches for 2.5 to 3 ms, in which a GPU computes
# as many tokens. A row without KV also has a compiled pass.
MIN_RESTORED_TOKENS = 64
# Fields of a model's card on devices that prepare shapes.
PREPARED_CARD: dict[str, Any] = {
    "drafts_by_default": False,
    "chunk_step": CHUNK_STEP,
    "min_restored_tokens": MIN_RESTORED_TOKENS,
}
# Limits of attention by lengths for several tokens a row: their number, and the product with all
# rows' tokens. Beyond, tensor cores with a mask are worth more than a compiled pass.
MAX_KERNEL_WIDTH, MAX_KERNEL_SCORES = 33, 100_000
# Maximum queries times keys of a row for the kernel over chunks (`prefill_attention.py`). On an
# H200 cuDNN takes half the kernel's time without a mask, several times its time with one, and 42 ms
# to plan a new shape. The first bound is for shapes that recur, the second one for others.
PLANNED_ELEMENTS, TILED_ELEMENTS = 2**21, 2**24
# Tokens by which first buffers grow early, where all layers have the same lengths. Growth of all in
# one step would take 20 ms.
LEAD = 64


@attrs.frozen
class Shapes:
    """Padding and grouping of passes on a device."""

    pass_tokens: int
    """Prompt tokens that cost as much as a pass's fixed cost."""
    lone_tokens: int
    """Maximum of a lone prompt, or of its end, in one pass with logits of all tokens."""
    rounded: bool = False
    """Whether sizes are rounded, since the device prepares each shape."""
    mask_elements: int = 2**22
    """Maximum of queries times keys of a row with a mask as array, which spares new shapes."""
    vector_tokens: int = VECTOR_TOKENS
    """Maximum keys of a row for MLX's own kernels, which need no plan."""
    copied_width: int = COPIED_WIDTH
    first_bank: int = FIRST_BANK
    """Maximum tokens of rows in the bank of level 0; each level doubles the number."""
    length_kernel: bool = False
    """Whether the device has the kernels of attention by lengths (`decode_attention.py`,
    `prefill_attention.py`)."""
    shared_tokens: int = SHARED_TOKENS
    """Maximum tokens of rows in a shared bank."""

    def level(self, tokens: int) -> int:
        return bank_level(tokens, self.first_bank)

    def bank_tokens(self, level: int) -> int:
        return self.first_bank << level

    def shared(self, level: int) -> bool:
        return not level or self.bank_tokens(level) <= self.shared_tokens

    def width(self, tokens: int) -> int:
        """Width of a pass with at most `tokens` tokens a row. 1 stays 1: decoding has kernels."""
        return kv_capacity(tokens, WIDTH_STEP) if self.rounded and tokens > 1 else tokens

    def lone_width(self, tokens: int) -> int:
        """Width of the only pass over a short prompt, compiled where decoding is
        (`compiled_pass.py`)."""
        compiled = self.length_kernel and 1 < tokens <= LONE_WIDTHS[-1]
        return LONE_WIDTHS[bisect_left(LONE_WIDTHS, tokens)] if compiled else self.width(tokens)

    def keys(self, tokens: int) -> int:
        """Key positions that attention reads for rows up to `tokens` tokens; the mask hides the
        surplus. At most `capacity(tokens)`."""
        return self.capacity(tokens) if self.rounded else tokens

    def capacity(self, tokens: int) -> int:
        if not self.rounded:
            return -(-tokens // STEP) * STEP
        shorter = kv_capacity(tokens + NO_CUDNN, STEP) - NO_CUDNN
        return (
            shorter
            if shorter < self.vector_tokens
            else kv_capacity(max(tokens, self.vector_tokens + 1), STEP)
        )

    def capacities(self, tokens: int) -> Iterator[int]:
        size = 1
        while size <= tokens:
            yield self.capacity(size)
            size = self.capacity(size) + 1

    def alone(self, tokens: int, length: int) -> bool:
        """Whether a row of `length` tokens runs `tokens` more alone: a shared mask would be too
        large."""
        return self.rounded and self.width(tokens) * (length + tokens) > self.mask_elements

    def drafted_width(self, tokens: int) -> int:
        # From a ladder, for few compiled structures (`compiled_pass.py`). The policy drafts powers
        # of two.
        if not self.length_kernel or tokens > MAX_KERNEL_WIDTH:
            return self.width(tokens)
        return 1 + (1 << (tokens - 2).bit_length()) if tokens > 2 else tokens

    def by_length(self, rows: int, tokens: int, width: int) -> bool:
        """Whether the kernel for decoding computes attention of `width` tokens a row, with up to
        `tokens` tokens each."""
        few = width <= MAX_KERNEL_WIDTH and rows * width * tokens <= MAX_KERNEL_SCORES
        return self.length_kernel and (width == 1 or few)

    def tiled(self, rows: int, tokens: int, width: int) -> bool:
        """Whether the kernel over chunks computes attention of `width` tokens a row, with up to
        `tokens` tokens each. cuDNN gets long chunks of a row alone whose shapes recur."""
        recurs = rows == 1 and not width % CHUNK_STEP and not tokens % CHUNK_STEP
        bound = PLANNED_ELEMENTS if recurs else TILED_ELEMENTS
        return self.length_kernel and width > 1 and width * tokens <= bound

    def planned(self, tokens: int, width: int) -> bool:
        """Whether a chunk of a row alone gets cuDNN's attention without a mask, by a plan."""
        bound = PLANNED_ELEMENTS if self.length_kernel else self.mask_elements
        return self.rounded and width * tokens > bound and not self.tiled(1, tokens, width)

    def copied(self, width: int, keys: int) -> bool:
        """Whether a chunk's attention gets copies of keys and values (`Region.copied`): where MLX
        would use cuDNN."""
        return self.rounded and width >= self.copied_width and keys >= self.vector_tokens

    def groups(self, counts: Sequence[int]) -> list[range]:
        """Partition rows into padded passes of neighbours at minimum cost of passes and padding.
        Rows without tokens join only between others."""
        active = [index for index, count in enumerate(counts) if count]
        if not active:
            return []
        costs, cuts = [0], [0]
        for last in range(len(active)):
            best, cut, longest = None, 0, 0
            for first in range(last, -1, -1):
                longest = max(longest, counts[active[first]])
                rows = active[last] - active[first] + 1
                cost = costs[first] + self.pass_tokens + rows * self.width(longest)
                if best is None or cost < best:
                    best, cut = cost, first
            assert best is not None
            costs.append(best)
            cuts.append(cut)
        groups, end = [], len(active)
        while end:
            groups.append(range(active[cuts[end]], active[end - 1] + 1))
            end = cuts[end]
        return groups[::-1]


# On two cores a pass of SmolLM2-135M costs about 20 tokens.
EXACT = Shapes(pass_tokens=16, lone_tokens=16)
# Accelerators read the weights in the time of dozens of tokens.
ACCELERATED = Shapes(pass_tokens=64, lone_tokens=64)
# On an H100 (0.6B) a short prompt's first token took 31 ms in two passes, 17 in one.
ROUNDED = Shapes(pass_tokens=256, lone_tokens=LONE_WIDTHS[-1], rounded=True)


def of_device() -> Shapes:
    if device.prepares_shapes():
        return attrs.evolve(ROUNDED, length_kernel=device.runs_cuda_kernels())
    return EXACT if device.is_cpu() else ACCELERATED
