"""State that outlives a crash of Scheduler, RankMirror and ModelStepper: requests, and the
attribution of crashes."""

from __future__ import annotations

import logging
from itertools import count

import attrs

from trouper.actors.scheduling.allocation_failures import (
    BOUND_S,
    AllocationFailures,
    SystemShortages,
)
from trouper.actors.scheduling.crash_attribution import Blame, Involved, Standing, Verdict, cause_of
from trouper.actors.scheduling.prepared_request import PreparedRequest
from trouper.actors.scheduling.sequence import Sequence
from trouper.protocol.health import RecoveryStats
from trouper.protocol.problems import OutOfDeviceMemory, Problem, SystemShortage

log = logging.getLogger("trouper.recovery")


@attrs.frozen(eq=False)
class LeftBehind:
    carried: tuple[Sequence, ...]
    """Oldest first."""
    involved: tuple[Involved, ...]
    certain: bool
    """Whether the only row of `involved` was being handled."""
    closed: bool
    problem: Problem
    used_bytes: int = 0


# Blocks in memory are lost: after an exception in a step neither arrays nor device can be trusted.
# Files are verified when read: rows resume from the disk and compute the rest again.
class Recovery:
    """Recovery of one graph. Several ranks have none: one rank's crash ends all."""

    def __init__(self) -> None:
        self.blame, self.allocations = Blame(), AllocationFailures()
        self.shortages = SystemShortages()
        self.stats = RecoveryStats()
        self.image_ids = count()
        """Ids of images to encode, never reused."""
        self.closed = False
        self._left: LeftBehind | None = None
        self._ended = False
        self.crashed = False
        """Whether the next scheduler must test the engine first."""

    def standing(self, client: PreparedRequest, tokens: bytes, now: float) -> Standing:
        standing = self.blame.standing(client, tokens, now)
        standing.alone |= self.allocations.runs_alone(standing, now)
        return standing

    def hand_over(self, left: LeftBehind) -> int:
        """Take an ending scheduler's requests, or fail them after the graph's end. Returns the
        number."""
        self._left, self.closed = left, left.closed
        return self.end() if self._ended else 0

    def judge(self, error: BaseException, now: float) -> Verdict:
        """Decide what a crash of the group means: a lack of memory or of the system's resources,
        which counts no crash, or a fault to attribute to requests."""
        left, self.crashed = self._left, True
        cause = cause_of(error)
        involved = left.involved if left is not None else ()
        used_bytes = left.used_bytes if left is not None else 0
        no_memory = isinstance(error, OutOfDeviceMemory) and self.allocations.failed(
            involved, used_bytes, now
        )
        if no_memory:
            verdict = Verdict(counts=False)
        elif isinstance(error, SystemShortage):
            self.shortages.failed(involved, now)
            verdict = Verdict(counts=False)
        else:
            verdict = self.blame.crashed(
                cause, involved, now, certain=left is not None and left.certain
            )
        if left is not None:  # A scheduler that crashes before it resumes any request blames none.
            self._left = attrs.evolve(left, involved=(), certain=False)
        self._count(
            crashes=1, convicted=verdict.convicted is not None, allocation_failures=no_memory
        )
        what = f"{len(involved)} rows were in the step"
        if verdict.convicted is not None:
            what = f"caused by content {verdict.convicted.hex()[:12]}, which is refused from now on"
        if no_memory and (bound := self.allocations.bound_bytes):
            what += (
                f", and the device had no memory: rows and cached blocks have {bound / 1e6:.3g} MB "
                f"for {BOUND_S:.0f} s"
            )
        log.warning(
            "the engine restarts after %s; %s; %d requests go on", cause, what, len(self._carried)
        )
        return verdict

    def take_up(self) -> tuple[Sequence, ...]:
        carried, self._left = self._carried, None
        return carried

    def note_resumed(self) -> None:
        self._count(resumed=1)

    def note_refused(self) -> None:
        self._count(refused=1)

    def look(self, now: float) -> RecoveryStats:
        quarantined, apart = self.blame.quarantine.count(now), self.blame.apart(now)
        bound_bytes, stats = self.allocations.look(now), self.stats
        if (stats.quarantined, stats.apart, stats.bound_bytes) != (quarantined, apart, bound_bytes):
            self.stats = attrs.evolve(
                stats, quarantined=quarantined, apart=apart, bound_bytes=bound_bytes
            )
        return self.stats

    def end(self) -> int:
        """Fail the remaining requests. Returns the number."""
        carried, left, self._left, self._ended = self._carried, self._left, None, True
        for sequence in carried:
            assert left is not None
            sequence.fail(left.problem)
        return len(carried)

    @property
    def _carried(self) -> tuple[Sequence, ...]:
        return self._left.carried if self._left is not None else ()

    def _count(self, **more: int) -> None:
        self.stats = attrs.evolve(
            self.stats, **{name: getattr(self.stats, name) + n for name, n in more.items()}
        )


def crashes_engine(left_s: float) -> Problem:
    # 422: OpenAI's and Anthropic's clients repeat 408, 409, 429 and 5xx by themselves.
    message = (
        "this request makes the engine crash, also when it runs alone; the same is refused for "
        f"{left_s:.0f} s"
    )
    return Problem(422, message, "invalid_request_error", None, "request_crashes_engine")
