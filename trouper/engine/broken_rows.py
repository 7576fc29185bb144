"""Rows whose logits are not numbers: they end with an error, and what they leave in buffers reaches
no other row.

A model in float16 may overflow over some texts. Then the keys and values of the row are no numbers
from there on, and neither are its logits. Attention masks what lies behind a row's tokens in its
slot, but multiplies it by 0, which makes no number of these; so a row that had such a slot after
the broken one would break, too, and cached blocks would keep what it has computed.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from trouper.engine.kv.rows import Rows
from trouper.engine.launched_step import Launched
from trouper.engine.row_state import RowState
from trouper.engine.sampling.logprobs import KeptMask
from trouper.protocol.plans import NOT_A_NUMBER, RowFault, RowId


class BrokenRows:
    """Finds them when a step is read, and cleans buffers when they are gone. `states`: of the rows
    that are there."""

    def __init__(self, rows: Rows, states: Mapping[RowId, RowState]) -> None:
        self._rows, self._states = rows, states
        self._found: set[RowId] = set()

    def found(
        self, launched: Launched, kept: KeptMask | None = None
    ) -> tuple[tuple[RowId, RowFault], ...]:
        """Rows of a step that is read which cannot continue, with the fault: their logits or
        vectors are no numbers, a logits processor failed, or no token is left to choose. For
        `Stepped.failed`. `kept`: which positions count, if drafts were verified. What a logits
        processor has broken is in no buffer."""
        broken = {row for row, vector in launched.prefilled.embedded if mx.isnan(vector[0]).item()}
        faults: dict[int, RowFault] = {}
        if (sampled := launched.sampled) is not None:
            broken.update(
                _row_at(launched, position)
                for position in np.flatnonzero(np.array(sampled.numberless)).tolist()
            )
            faults = sampled.faults(kept)
        self._found |= broken
        others = [
            (_row_at(launched, position), fault) for position, fault in sorted(faults.items())
        ]
        return (*((row, NOT_A_NUMBER) for row in sorted(broken)), *others)

    def clean_up(self) -> None:
        """Comes after rows are dropped, and before others are admitted."""
        if not self._found <= self._states.keys():
            self._found.intersection_update(self._states)
            self._rows.clean()


def _row_at(launched: Launched, position: int) -> RowId:
    """The row of a position of the step's logits."""
    return launched.rows[
        position if launched.spans is None else int(launched.spans.owners[position])
    ]
