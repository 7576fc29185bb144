"""Checks a model by its tiny and its real form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from itertools import product
from typing import Any, TypeVar

import attrs
from mlx import nn

from trouper.engine.distributed.rank_group import ALONE, RankGroup
from trouper.engine.kv.model_caches import by_caches
from trouper.engine.kv.quantized_kv import PLAIN, KvFormat
from trouper.engine.kv.rows import guess
from trouper.engine.passes.pass_shapes import Shapes, of_device
from trouper.engine.platform.error_text import line_of
from trouper.engine.self_check import tiny
from trouper.engine.self_check.accuracy import (
    Reference,
    WrongAloneError,
    arithmetic_of,
    random_texts,
    run_alone,
)
from trouper.engine.self_check.matrix import (
    SEEDS,
    Failure,
    Matrix,
    Subject,
    run_in_slots,
    subject_of,
)
from trouper.engine.self_check.scenarios import BATCH, MORE, SHORT_LENGTHS, SHORT_PARTS, short_pass
from trouper.engine.self_check.shrinking import Config
from trouper.engine.self_check.tiny import CannotShrinkError
from trouper.protocol.capabilities import FEATURES, Capabilities, SelfCheckMode

Made = TypeVar("Made")
STEPS = len(BATCH) + len(MORE) + 1
"""Number of steps for a healthy model."""
CANNOT_SHRINK, WRONG_ALONE = 1 << len(FEATURES), 2 << len(FEATURES)
"""Bits that ranks exchange besides those of the features."""


@attrs.frozen
class CheckOutcome:
    """`capabilities`: of rows. `checked`: the models that were run, for the log."""

    capabilities: Capabilities
    checked: str


@attrs.frozen(eq=False)
class Check:
    """`advance`: called after each scenario. Passes contain collectives, so all ranks agree on
    every decision."""

    model: nn.Module
    config: Mapping[str, Any]
    vocabulary: int
    kv: KvFormat
    mode: SelfCheckMode
    group: RankGroup = ALONE
    shapes: Shapes = attrs.field(factory=of_device)
    advance: Callable[[], None] = lambda: None

    def run(self) -> CheckOutcome:
        """Raises `WrongAloneError`."""
        if self.mode == "off":
            return CheckOutcome(guess(self.model), "")
        start = by_caches(self.model)
        try:
            found, checked = self.of_tiny(start), "a tiny model of the same config"
        except CannotShrinkError:
            return CheckOutcome(self._full_check(start), "the model itself")
        if self.mode == "full":
            return CheckOutcome(self._full_check(found), f"{checked} and the model itself")
        return CheckOutcome(self._short(found), f"{checked} and a short pass of the model itself")

    # -- the tiny model: every rank by itself -----------------------------------------------------

    def of_tiny(self, start: Capabilities) -> Capabilities:
        """Run every scenario on a tiny model. Raises `CannotShrinkError` and `WrongAloneError`."""

        def check() -> Capabilities:
            matrix = self.tiny_matrix()
            # A router may be undecided within rounding: one of two seeds is enough.
            if not any(matrix.subject(seed).reference.consistent for seed in SEEDS):
                raise _differs_in_chunks(matrix.subject().reference)
            return matrix.capabilities(start)

        return self._agreed(check)

    def tiny_matrix(self) -> Matrix:
        """Make the matrix of the first suitable tiny model. Raises `CannotShrinkError`."""
        make = self._guarded(lambda: next(self._tiny_subjects(), None))
        if make is None:
            raise CannotShrinkError
        return Matrix(make, self._step)

    def _tiny_subjects(self) -> Iterator[Callable[[int], Subject]]:
        """Yield functions from a seed to a subject, for tiny configs whose finite logits depend on
        the context."""
        for config, gain in product(tiny.configs(self.model, self.config), tiny.GAINS):
            make = cache(partial(self._tiny_subject, config, gain))
            try:
                subject = make(SEEDS[0])
                if tiny.listens(subject.model, subject.reference.texts[0]):
                    yield make
            except Exception:  # noqa: BLE001, S112
                # Any architecture's code over arbitrary sizes: the next ones.
                continue

    def _tiny_subject(self, config: Config, gain: float, seed: int) -> Subject:
        model = tiny.build(config, seed, gain)
        vocabulary = min(tiny.vocabulary_of(model), self.vocabulary)
        return subject_of(model, vocabulary, seed, self.shapes)

    def _step(self, failure: Failure | None) -> Failure | None:
        self.advance()
        return failure

    def _agreed(self, check: Callable[[], Capabilities]) -> Capabilities:
        """Intersect the capabilities of all ranks. Raises the error of any rank."""
        found, problem, reason = Capabilities(), 0, ""
        try:
            found = check()
        except CannotShrinkError:
            problem = CANNOT_SHRINK
        except WrongAloneError as error:
            problem, reason = WRONG_ALONE, str(error)
        number_here = problem + sum(
            1 << index for index, feature in enumerate(FEATURES) if not found.allows(feature)
        )
        numbers = self.group.gather(number_here)
        for rank, number in enumerate(numbers):
            if number & WRONG_ALONE:
                raise WrongAloneError(reason or f"rank {rank} found it wrong")
            if number & CANNOT_SHRINK:
                raise CannotShrinkError
        for index, feature in enumerate(FEATURES):
            wrong = next((rank for rank, number in enumerate(numbers) if number >> index & 1), None)
            found = (
                found if wrong is None else found.without(feature, f"rank {wrong} found it wrong")
            )
        return found

    # -- the real model: all ranks together -------------------------------------------------------

    def _full_check(self, start: Capabilities) -> Capabilities:
        """Run every scenario on the real model, and again with quantized KV."""
        found = self._matrix(PLAIN).capabilities(start)
        self._require_sound(found)
        return (
            self._matrix(self.kv).capabilities(found)
            if self.kv.bits and found.allows("batch")
            else found
        )

    def _matrix(self, kv: KvFormat) -> Matrix:
        def make(seed: int) -> Subject:
            return self._guarded(
                lambda: subject_of(self.model, self.vocabulary, seed, self.shapes, kv)
            )

        return Matrix(make, lambda failure: self._any_rank(self._step(failure)))

    def _short(self, found: Capabilities) -> Capabilities:
        """Run two rows in one batch. If they fail, run every scenario on the real model."""
        subject = self._require_sound(found)
        failure = self._any_rank(self._step(subject.failure(short_pass(found), found)))
        if failure is None:
            return found
        if not found.allows("batch"):
            raise WrongAloneError(failure.reason)
        rechecked = self._full_check(found)
        return rechecked if rechecked != found else found.without("batch", failure.reason)

    def _require_sound(self, found: Capabilities) -> Subject:
        """Check that the model's own code gives the same numbers in other chunks. Raises
        `WrongAloneError`."""
        subject = self._guarded(lambda: self._short_subject(found))
        if self._any_rank(None if subject.reference.consistent else Failure("")) is not None:
            raise _differs_in_chunks(subject.reference)
        return subject

    def _short_subject(self, found: Capabilities) -> Subject:
        # Rows that step one by one have the model's own caches.
        kv = self.kv if found.allows("batch") else PLAIN
        texts = random_texts(SHORT_LENGTHS, self.vocabulary, SEEDS[0])
        run = run_in_slots(self.model, kv, self.shapes) if kv.bits else run_alone(self.model)
        reference = Reference(run, texts, arithmetic_of(self.model, kv), singles=0, odd=SHORT_PARTS)
        return Subject(self.model, kv, self.shapes, reference)

    def _guarded(self, make: Callable[[], Made]) -> Made:
        """Raises `WrongAloneError` for any exception of `make`."""
        try:
            return make()
        except WrongAloneError:
            raise
        except Exception as error:
            raise WrongAloneError(f"its own code fails: {line_of(error)}") from error

    def _any_rank(self, failure: Failure | None) -> Failure | None:
        """Return a failure of any rank. Every rank must call at the same point."""
        number_here = 0 if failure is None else 1 + failure.raised
        numbers = self.group.gather(number_here)
        worst = max(range(len(numbers)), key=lambda rank: numbers[rank])
        if failure is not None or not numbers[worst]:
            return failure
        return Failure(f"rank {worst} found it wrong", raised=numbers[worst] == 1 + True)


def _differs_in_chunks(reference: Reference) -> WrongAloneError:
    return WrongAloneError(
        "its own code gives other logits for a prompt in chunks than for the whole prompt "
        f"(they differ by {reference.noise:.2g} of their spread)"
    )
