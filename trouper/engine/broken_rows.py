"""Ends rows whose logits are not numbers, and cleans the buffers.

A float16 model may overflow. Attention multiplies masked KV by 0, and NaN stays NaN: the next row
in the slot, or cached blocks, would break, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from trouper.engine.kv.rows import Rows
from trouper.engine.launched_step import Launched
from trouper.engine.sampling.logprobs import KeptMask
from trouper.engine.sampling.row_state import RowState
from trouper.protocol.plans import NOT_A_NUMBER, RowFault, RowId


class BrokenRows:
    """Finds broken rows at the reading of a step. `states`: of present rows."""

    def __init__(self, rows: Rows, states: Mapping[RowId, RowState]) -> None:
        self._rows, self._states = rows, states
        self._found: set[RowId] = set()

    def found(
        self, launched: Launched, kept: KeptMask | None = None
    ) -> tuple[tuple[RowId, RowFault], ...]:
        """Return rows with NaN logits or vectors, a failed logits processor, or no allowed token,
        for `Stepped.failed`. `kept`: counting positions of verified drafts. A logits processor's
        fault is in no buffer."""
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
        """Runs between drops and admissions."""
        if not self._found <= self._states.keys():
            self._found.intersection_update(self._states)
            self._rows.clean()


def _row_at(launched: Launched, position: int) -> RowId:
    return launched.rows[
        position if launched.spans is None else int(launched.spans.owners[position])
    ]
