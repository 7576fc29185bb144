"""SplitMix64 against the published sequence of seed 1234567."""

from __future__ import annotations

import numpy as np

from trouper.protocol.splitmix import GOLDEN, mix64


def test_the_first_outputs_of_a_known_seed() -> None:
    states = np.uint64(1234567) + GOLDEN * np.arange(1, 4, dtype=np.uint64)
    assert mix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
