"""Images in one forward pass: encoded vectors, and positions on three axes."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import mlx.core as mx


@attrs.frozen(eq=False)
class EncodedImage:
    """The vectors of an image, in the space of the text model's embeddings."""

    embeddings: mx.array
    """(tokens, dim)."""
    deepstack: tuple[mx.array, ...] = ()
    """(tokens, dim) for each of the text model's first layers (Qwen3-VL, arXiv 2511.21631)."""

    def arrays(self) -> list[mx.array]:
        return [self.embeddings, *self.deepstack]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


@attrs.frozen(eq=False)
class MediaPass:
    """Images in a pass of n rows and `width` columns. Such a pass is built anew each time, never
    compiled."""

    columns: mx.array
    """(m,) uint32: indices of embedded tokens in the flattened pass (n * width,)."""
    embeddings: mx.array
    """(m, dim)."""
    deepstack: tuple[mx.array, ...] = ()
    """(m, dim) for each of the first layers."""
    positions: mx.array | None = None
    """(3, n, width) int32: frame, row and column of M-RoPE; None with one axis."""
    _rotations: dict[object, tuple[mx.array, mx.array]] = attrs.field(factory=dict)

    def put(self, embedded: mx.array) -> mx.array:
        """Return the embeddings (n, width, dim) with the encoder's vectors, as a new array: some
        models scale theirs in place."""
        flat = mx.array(embedded.reshape(-1, embedded.shape[-1]))
        flat[self.columns] = self.embeddings.astype(flat.dtype)
        return flat.reshape(embedded.shape)

    def put_token(self, tokens: mx.array, token: int) -> mx.array:
        """Return the tokens (n, width) with `token` in the places of the vectors."""
        flat = mx.array(tokens.reshape(-1))
        flat[self.columns] = token
        return flat.reshape(tokens.shape)

    def add_deepstack(self, hidden: mx.array, layer: int) -> mx.array:
        """Return the hidden states (n, width, dim) after `layer`, with its vectors added."""
        if layer >= len(self.deepstack):
            return hidden
        flat = hidden.reshape(-1, hidden.shape[-1])
        added = self.deepstack[layer].astype(flat.dtype)
        return flat.at[self.columns].add(added).reshape(hidden.shape)

    def rotation(
        self, key: object, compute: Callable[[mx.array], tuple[mx.array, mx.array]]
    ) -> tuple[mx.array, mx.array]:
        """Cosines and sines that layers with an equal `key` share."""
        assert self.positions is not None, "the model has no M-RoPE"
        if key not in self._rotations:
            self._rotations[key] = compute(self.positions)
        return self._rotations[key]
