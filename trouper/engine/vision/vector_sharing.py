"""Vectors of images on all ranks: rank 0 encodes, the others get the result by a collective."""

from __future__ import annotations

from typing import Self

import attrs
import mlx.core as mx
from mlx import nn

from trouper.engine.adaptations.image_passes import embedding_of
from trouper.engine.distributed.rank_group import RankGroup
from trouper.engine.passes.media_pass import EncodedImage


@attrs.frozen
class DistantTower:
    """Rank 0's encoder, as the other ranks know it."""

    num_deepstack: int


@attrs.frozen(eq=False)
class VectorSharing:
    """`dtype`, `dim`: of the text model's embeddings. `terms`: 1 and the deepstack layers."""

    group: RankGroup
    dtype: mx.Dtype
    dim: int
    terms: int

    @classmethod
    def of(cls, model: nn.Module, group: RankGroup, deepstack: int) -> Self:
        """`model`: adapted to images."""
        embedded = embedding_of(model)(mx.array([[0]]))
        return cls(group, embedded.dtype, embedded.shape[-1], 1 + deepstack)

    # A sum, as of tokens (`RankGroup.agree`): every backend has it, and zeros change nothing.
    # Pixels would cost each rank the encoder's weights and time, and the control link, on which
    # heartbeats travel, would be busy with the vectors of a screenshot for longer than the ring.
    def share(self, tokens: int, image: EncodedImage | None) -> EncodedImage:
        """Return rank 0's vectors of an image of so many tokens; NaN if rank 0 has None. All ranks
        call this in the same step."""
        shape = self.terms * tokens, self.dim
        if not self.group.leads:
            own = mx.zeros(shape, self.dtype)
        elif image is None:
            own = mx.full(shape, mx.nan, self.dtype)
        else:
            own = mx.concatenate(image.arrays()).astype(self.dtype)
        embeddings, *deepstack = mx.split(self.group.sum(own), self.terms)
        shared = EncodedImage(embeddings, tuple(deepstack))
        mx.eval(shared.arrays())  # Else a rank that has a fault would not take part.
        return shared
