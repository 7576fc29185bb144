from __future__ import annotations

import attrs
import mlx.core as mx
import numpy as np

from trouper.engine.sampling.logits_processors import Unusable
from trouper.engine.sampling.logprobs import KeptMask, PendingLogprobs
from trouper.protocol.plans import NO_CHOICE, RowFault, RowId


@attrs.frozen(eq=False, kw_only=True)
class Sampled:
    """Result of sampling a step, lazy: one entry for each row, or for each position of verified
    drafts."""

    rows: tuple[RowId, ...]
    """Rows that decode, in the order of `tokens`."""
    tokens: mx.array
    """(n,) uint32."""
    logprobs: PendingLogprobs | None
    failed: tuple[tuple[RowId, RowFault], ...]
    """Rows whose grammar failed to make a mask."""
    numberless: mx.array
    """(n,) bool: whether the model's logits are no numbers."""
    unusable: Unusable | None
    """Failures of logits processors; None: no row has any."""
    choiceless: mx.array | None
    """(n,) bool: whether no token was left to choose. None: nothing changed the model's logits."""
    constrained: bool
    """Whether rows have grammars."""

    @property
    def is_lazy(self) -> bool:
        """Whether only a graph was built: grammars and logits processors wait for values."""
        return not self.constrained and self.unusable is None

    def faults(self, kept: KeptMask | None = None) -> dict[int, RowFault]:
        """Wait for the device and return the faults by position, without those in `failed` or of
        the model. `kept`: the positions before a rejected draft."""
        faults = {} if self.unusable is None else self.unusable.faults(kept)
        for position in (
            [] if self.choiceless is None else np.flatnonzero(np.array(self.choiceless)).tolist()
        ):
            if kept is None or kept[position]:
                faults.setdefault(position, NO_CHOICE)
        return faults

    def arrays(self) -> list[mx.array]:
        flags = [] if self.unusable is None else [self.unusable.flags]
        flags += [] if self.choiceless is None else [self.choiceless]
        return [
            self.tokens,
            self.numberless,
            *flags,
            *(self.logprobs.arrays() if self.logprobs else []),
        ]
