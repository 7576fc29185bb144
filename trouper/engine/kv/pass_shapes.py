"""What shape a pass over the model gets: how much it is padded, and which rows share it.

On some devices each new shape is prepared anew before it runs. Seen on an H200 (MLX 0.32.4): 40 ms for each new pair of
shapes *and strides* of queries and keys, since cuDNN plans attention for exactly these; 28 layers whose buffers had grown at
28 different moments took 1.1 s for each chunk of a prompt. There sizes are rounded up to a few, and layers are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trouper.engine.platform import device

STEP = 256
"""Tokens by which buffers grow, as in mlx-lm's caches."""
WIDTH_STEP = 8


@attrs.frozen
class Shapes:
    """`pass_tokens`: of a prompt so many cost as much as a pass does by itself."""

    pass_tokens: int
    rounded: bool = False

    def width(self, tokens: int) -> int:
        """Of a pass in which a row runs at most so many tokens. One stays one: decoding has kernels of its own."""
        return coarse(tokens, WIDTH_STEP) if self.rounded and tokens > 1 else tokens

    def keys(self, tokens: int) -> int:
        """How many places of each row attention looks at, most of them hidden by its mask, where rows hold at most so
        many tokens. Never more than `capacity` of as many."""
        return coarse(tokens, STEP) if self.rounded else tokens

    def capacity(self, tokens: int) -> int:
        """Of buffers that must hold so many."""
        return coarse(tokens, STEP) if self.rounded else -(-tokens // STEP) * STEP

    def groups(self, counts: Sequence[int]) -> list[range]:
        """Which neighbours share a padded pass, by how many tokens each row runs: what costs least, with a price for each
        pass and for padding. Rows without tokens are in no group unless they lie between others of it."""
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


def coarse(size: int, step: int) -> int:
    """At least `size`: a multiple of `step`, and of an eighth to a quarter of itself."""
    unit = max(step, 1 << max((size - 1).bit_length() - 3, 0))
    return -(-size // unit) * unit


EXACT = Shapes(pass_tokens=16)
"""On a CPU of two cores a pass of SmolLM2-135M takes about as long as it takes for 20 tokens more."""
ACCELERATED = Shapes(pass_tokens=64)
"""Accelerators read the weights while dozens of tokens would be computed."""
ROUNDED = Shapes(pass_tokens=256, rounded=True)


def of_device() -> Shapes:
    if device.prepares_shapes():
        return ROUNDED
    return EXACT if device.is_cpu() else ACCELERATED
