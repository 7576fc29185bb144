"""What is played with each config: rows of different lengths in every company that the engine makes
of them."""

from __future__ import annotations

import attrs
import numpy as np
from mlx import nn

from tests import arithmetic
from tests.family_configs import VOCABULARY
from tests.zoo.playing import SLACK, SMALL_BANKS, Play, alone, distance, log_probabilities
from trouper.engine.passes.pass_shapes import EXACT, ROUNDED, Shapes
from trouper.protocol.capabilities import Capabilities

BOUND = 2 * arithmetic.TF32_CLOSE if arithmetic.TF32 else 2e-3
"""Log-probabilities differ by less, unless something is wrong: see docs/architectures.md."""


def words(count: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.RandomState(seed).randint(1, VOCABULARY - 1, count)]


def alone_mix(play: Play) -> None:
    """One row by itself, in odd pieces, then decoding past the window."""
    row = play.open(0, words(60, 1))
    play.score(row, 5)
    play.prefill({row: 7})
    play.promote(row)
    play.decode(14)
    play.drop(row)


def together_mix(play: Play) -> None:
    """Rows of four lengths prefill in one call, decode together; others join, one with a single
    token; some leave."""
    long, middle, short = (
        play.open(1, words(110, 2)),
        play.open(2, words(60, 3)),
        play.open(3, words(40, 4)),
    )
    play.prefill({long: 33, middle: 7, short: 1})
    play.prefill({long: 29, middle: 12, short: 4})
    play.promote(long, middle, short)
    play.decode(2)
    one = play.open(4, words(30, 5))
    play.promote(one)
    play.decode(2)
    later, last = play.open(5, words(50, 6)), play.open(6, words(30, 7))
    play.prefill({later: 19, last: 3})
    play.decode()
    play.prefill({last: 2})
    play.promote(last, later)
    play.decode(2)
    play.drop(middle)
    play.decode(2)
    play.drop(long, last)
    play.decode(14)
    play.drop(*list(play.tracks))


def restored_mix(play: Play) -> None:
    """A prompt is stored at a length that no block divides; rows begin with it beside one that
    decodes."""
    source = play.open(7, words(60, 8))
    play.prefill({source: 32})
    play.prefill({source: 9})
    play.store(source, 16)
    play.promote(source)
    play.decode(2)
    first = play.restore(8, words(30, 9))
    second = play.restore(9, words(30, 10))
    play.prefill({first: 6, second: 1})
    play.promote(first, second)
    play.decode(4)
    play.drop(source, first)
    play.decode(2)
    play.drop(second)
    third = play.restore(10, words(30, 11))
    play.promote(third)
    play.decode(2)
    play.drop(third)


def drafted_mix(play: Play) -> None:
    """Drafts of different lengths, right in part, beside rows that draft nothing; then decoding as
    before."""
    one, two, three = (
        play.open(11, words(80, 12)),
        play.open(12, words(60, 13)),
        play.open(13, words(60, 14)),
    )
    play.prefill({one: 37, two: 14, three: 3})
    play.promote(one, two, three)
    play.decode()
    play.verify({one: (3, 3), two: (3, 1)})
    play.verify({one: (2, 0), three: (3, 2)})
    play.decode()
    play.verify({one: (SLACK // 2, 1), two: (1, 1), three: (1, 0)})
    play.decode(2)
    play.drop(one, two, three)


def short_mix(play: Play) -> None:
    """The cheapest mix in which every fault that was ever found shows."""
    long, short = play.open(1, words(90, 2)), play.open(2, words(40, 3))
    play.prefill({long: 33, short: 5})
    play.prefill({long: 8})
    if play.can_restore:
        play.store(long, 16)
    play.promote(long, short)
    play.decode()
    one = play.open(3, words(30, 4))
    play.promote(one)
    play.decode()
    later = play.restore(4, words(20, 5)) if play.can_restore else play.open(4, words(20, 5))
    play.prefill({later: 3})
    play.promote(later)
    if play.drafts:
        play.verify({long: (3, 2), short: (2, 0)})
    play.decode()
    play.drop(short)
    play.decode(2)
    play.drop(*list(play.tracks))


MIXES = {
    "alone": alone_mix,
    "together": together_mix,
    "restored": restored_mix,
    "drafted": drafted_mix,
}


@attrs.frozen
class Outcome:
    """What a config showed. `faults`: by mix, the error beyond the bound or the exception's
    text."""

    errors: dict[str, float] = attrs.field(factory=dict)
    crashes: dict[str, str] = attrs.field(factory=dict)

    @property
    def wrong(self) -> dict[str, float]:
        return {mix: error for mix, error in self.errors.items() if not error <= BOUND}

    @property
    def right(self) -> bool:
        return not (self.wrong or self.crashes)


def play_all(
    model: nn.Module, shapes: Shapes = SMALL_BANKS, capabilities: Capabilities | None = None
) -> tuple[Play, Outcome]:
    """Each mix that the model's batching allows, on rows of its own."""
    outcome, play = Outcome(), Play(model, shapes=shapes, capabilities=capabilities)
    for name, mix in MIXES.items():
        if (name == "restored" and not play.can_restore) or (name == "drafted" and not play.drafts):
            continue
        play = Play(model, shapes=shapes, capabilities=capabilities)
        try:
            mix(play)
            outcome.errors[name] = play.error()
        except Exception as error:  # noqa: BLE001  Whatever a model raises is what it showed.
            outcome.crashes[name] = f"{type(error).__name__}: {error}"
    return play, outcome


def own_loop_error(model: nn.Module) -> float:
    """How much mlx-lm's own loop depends on the pieces in which a prompt comes: what is right is
    defined up to that."""
    tokens = words(60, 15)
    one = alone(model, tokens, [40, *[1] * 20])
    other = alone(model, tokens, [7, 25, 1, 20, *[1] * 7])
    return distance(log_probabilities(one), log_probabilities(other))


ALL_SHAPES = {
    "exact": EXACT,
    "banked": SMALL_BANKS,
    "rounded": attrs.evolve(ROUNDED, first_bank=16, shared_tokens=32),
}
