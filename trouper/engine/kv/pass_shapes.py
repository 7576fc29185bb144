"""Shapes of a pass over the model: its padding, and the rows that share it.

Some devices prepare kernels for each new shape before it runs. Seen on an H200 (MLX 0.32.4): 40 ms
for each new pair of shapes *and strides* of queries and keys, since cuDNN plans attention for
exactly these; 28 layers whose buffers had grown at 28 different moments took 1.1 s for each chunk
of a prompt. On such devices sizes are rounded up to a few values, and all layers have the same.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from trouper.engine.platform import device
from trouper.protocol.kv import CAPACITY_STEP, FIRST_BANK, SHARED_TOKENS, bank_level, kv_capacity

STEP = CAPACITY_STEP
"""Number of tokens by which buffers grow."""
WIDTH_STEP = 8
"""Number of tokens by which padded passes differ."""
LONE_WIDTHS = (*range(32, 257, 32), *range(320, 513, 64))
"""Widths of compiled passes over lone prompts, each of which is prepared before the first
request."""
VECTOR_TOKENS = 2048
"""Maximum length of buffers for which MLX's own kernel decodes faster than cuDNN. On an H200 (4B
shape, one row): 4.5 ms against
5.0 at 300 to 1,800 tokens, 8.5 against 5.2 at 20,000."""
NO_CUDNN = 8
"""Number of tokens by which such buffers are shorter than a multiple of 256. MLX decodes rows of
equal length with cuDNN only if the buffer's length is a multiple, and cuDNN plans for each length
and number of rows: 40 ms, on a fresh machine 400."""
CHUNK_STEP = 512
"""Multiple of tokens at which chunks of long prompts end, so that lengths recur: cuDNN plans for
each, 40 ms."""
COPIED_WIDTH = 64
"""Minimum width of a pass whose keys are copied. Drafts are fewer: a copy at each step would cost
more than it spares."""
MIN_RESTORED_TOKENS = 64
"""Minimum number of cached tokens that are restored. To restore KV into 28 layers takes 2.5 to 3 ms
of launching on an H200 and an H100, in which a GPU computes more tokens than these: it reads the
weights anyway. And a row without KV has a compiled pass."""
PREPARED_CARD: dict[str, Any] = {
    "drafts_by_default": False,
    "chunk_step": CHUNK_STEP,
    "min_restored_tokens": MIN_RESTORED_TOKENS,
}
"""What the card of a model says on devices that prepare each new shape."""
MAX_KERNEL_WIDTH, MAX_KERNEL_SCORES = 33, 100_000
"""Limits of attention by lengths for several tokens of each row: their number, and theirs times all
rows' tokens. Beyond, the tensor cores that attention with a mask uses are worth more than a
compiled pass. A layer on an H200 (4B shape), by lengths and with a mask: 8 rows of 500 with 9
tokens each 110 and 89 us, 32 of 500 with 5 each 202 and 194, one of 20,000 with 9 395 and 213."""
LEAD = 64
"""Number of tokens by which the first buffers grow before they are full, where all layers' buffers
have the same lengths. If all grew in one step, it would take 20 ms longer for all rows."""


@attrs.frozen
class Shapes:
    """How passes are padded and grouped on a device."""

    pass_tokens: int
    """Number of prompt tokens that cost as much as the fixed cost of one pass."""
    lone_tokens: int
    """Maximum number of tokens of a lone prompt, or of its end, that take one pass. It computes
    logits of all of them, where a pass over all but the last token and one more over that compute
    them once."""
    rounded: bool = False
    """Whether sizes are rounded up to a few values, since the device prepares each new shape."""
    mask_elements: int = 2**22
    """Maximum number of queries times keys of a row for which attention gets a mask as an array, to
    spare the device a new shape. Attention with such a mask computes all scores: 2,048 queries over
    20,480 keys took 29 GB on an H200 (Qwen3-4B's shape)."""
    vector_tokens: int = VECTOR_TOKENS
    """Maximum number of keys of a row for which MLX's own kernels run, which need no plan."""
    copied_width: int = COPIED_WIDTH
    first_bank: int = FIRST_BANK
    """Maximum number of tokens of rows in the bank of level 0; each level has twice as many."""
    length_kernel: bool = False
    """Whether the device has attention of decoding rows by their lengths
    (`decode_attention.py`)."""
    shared_tokens: int = SHARED_TOKENS
    """Maximum number of tokens of rows in a bank that rows share."""

    def level(self, tokens: int) -> int:
        """Level of the bank for a row of `tokens` tokens."""
        return bank_level(tokens, self.first_bank)

    def bank_tokens(self, level: int) -> int:
        """Maximum number of tokens of rows in a bank of this level."""
        return self.first_bank << level

    def shared(self, level: int) -> bool:
        """Whether rows share the bank of this level."""
        return not level or self.bank_tokens(level) <= self.shared_tokens

    def width(self, tokens: int) -> int:
        """Width of a pass in which a row runs at most `tokens` tokens. 1 stays 1: decoding has
        kernels of its own."""
        return kv_capacity(tokens, WIDTH_STEP) if self.rounded and tokens > 1 else tokens

    def lone_width(self, tokens: int) -> int:
        """Width of the only pass over a short prompt, which is compiled where decoding is
        (`compiled_pass.py`)."""
        compiled = self.length_kernel and 1 < tokens <= LONE_WIDTHS[-1]
        return LONE_WIDTHS[bisect_left(LONE_WIDTHS, tokens)] if compiled else self.width(tokens)

    def keys(self, tokens: int) -> int:
        """Number of key positions of each row that attention reads, where rows hold at most
        `tokens` tokens; the mask hides the surplus. At most `capacity(tokens)`."""
        return self.capacity(tokens) if self.rounded else tokens

    def capacity(self, tokens: int) -> int:
        """Capacity of buffers that must hold `tokens` tokens."""
        if not self.rounded:
            return -(-tokens // STEP) * STEP
        shorter = kv_capacity(tokens + NO_CUDNN, STEP) - NO_CUDNN
        return (
            shorter
            if shorter < self.vector_tokens
            else kv_capacity(max(tokens, self.vector_tokens + 1), STEP)
        )

    def capacities(self, tokens: int) -> Iterator[int]:
        """All capacities of rounded buffers up to the one for `tokens` tokens, in ascending
        order."""
        size = 1
        while size <= tokens:
            yield self.capacity(size)
            size = self.capacity(size) + 1

    def alone(self, tokens: int, length: int) -> bool:
        """Whether a row of `length` tokens runs `tokens` more without other rows: a pass with them
        would need a mask as an array, and this one would be too large."""
        return self.rounded and self.width(tokens) * (length + tokens) > self.mask_elements

    def drafted_width(self, tokens: int) -> int:
        """Width of a pass in which a row verifies at most `tokens` - 1 drafts: of a ladder, so that
        a pass has few structures and each is compiled (`compiled_pass.py`). The policy drafts by
        powers of two."""
        if not self.length_kernel or tokens > MAX_KERNEL_WIDTH:
            return self.width(tokens)
        return 1 + (1 << (tokens - 2).bit_length()) if tokens > 2 else tokens

    def by_length(self, rows: int, tokens: int, width: int) -> bool:
        """Whether `width` tokens of each row, of up to `tokens` in all, get attention by their
        lengths."""
        few = width <= MAX_KERNEL_WIDTH and rows * width * tokens <= MAX_KERNEL_SCORES
        return self.length_kernel and (width == 1 or few)

    def copied(self, width: int, keys: int) -> bool:
        """Whether attention of a row's chunk gets copies of keys and values (`Region.copied`):
        where MLX would use cuDNN."""
        return self.rounded and width >= self.copied_width and keys >= self.vector_tokens

    def groups(self, counts: Sequence[int]) -> list[range]:
        """Partition the rows into padded passes of neighbours, given how many tokens each row runs,
        at the minimum total cost of passes and padding. Rows without tokens belong to a group only
        if they lie between other rows of it."""
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


EXACT = Shapes(pass_tokens=16, lone_tokens=16)
"""Shapes on a CPU. On two cores a pass of SmolLM2-135M takes about as long as 20 more tokens in
it."""
ACCELERATED = Shapes(pass_tokens=64, lone_tokens=64)
"""Shapes on an accelerator, which reads the weights in the time of dozens of tokens' arithmetic."""
ROUNDED = Shapes(pass_tokens=256, lone_tokens=LONE_WIDTHS[-1], rounded=True)
"""One H100, 0.6B, through HTTP: the first token after 305 tokens took 31 ms in two passes, after 77
tokens 17 in one."""


def of_device() -> Shapes:
    """Choose the shapes for the default device."""
    if device.prepares_shapes():
        return attrs.evolve(ROUNDED, length_kernel=device.runs_cuda_kernels())
    return EXACT if device.is_cpu() else ACCELERATED
