"""The table of models: the state of each, the events that change it, and what comes next. Pure.

`ModelTable.next` decides; the model manager carries out what it says, and reports how it went by
the table's events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Generic, Literal, TypeVar

import attrs

from trouper.protocol.problems import DRAINING, Problem, RequestFailed

# Most files are opened and read in less than a second. A dead network mount, or a FIFO, hangs a
# load, and nothing can interrupt the thread; its weights count as loaded, since the load may go on.
SILENT_S = 15.0  # Time without progress after which others load beside this model.
# Kernels of a large model take up to a minute to compile.
STALLED_S = 120.0  # Time without progress after which requests for the model are refused.
RETRY_S = 60.0  # Time between attempts to load a faulty model, since each may unload another.

State = Literal[
    "unloaded",
    "asleep",
    "queued",
    "measuring",
    "waiting",
    "loading",
    "silent",
    "ready",
    "unloading",
    "ending",
]
"""From `queued` to `silent` a model is on its way to `ready`: its files are measured, it waits for
room and for its turn, it is loaded. `silent`: loading, for so long without progress that others
load beside it. `unloading`: it will end once its running requests have ended. `ending`: its graph
of actors ends."""
Shown = Literal["unloaded", "asleep", "waiting", "loading", "ready", "unloading"]
SHOWN: Mapping[State, Shown] = {
    "unloaded": "unloaded",
    "asleep": "asleep",
    "queued": "waiting",
    "measuring": "waiting",
    "waiting": "waiting",
    "loading": "loading",
    "silent": "loading",
    "ready": "ready",
    "unloading": "unloading",
    "ending": "unloading",
}
"""The states as clients see them."""
Away = Literal["unloaded", "asleep"]
AWAY: tuple[Away, ...] = ("unloaded", "asleep")
COMING: tuple[State, ...] = ("queued", "measuring", "waiting", "loading", "silent")
TRANSITIONS: Mapping[State, frozenset[State]] = {
    # The only model is not measured: it may have any size.
    "unloaded": frozenset({"queued", "waiting"}),
    "asleep": frozenset({"queued", "waiting", "unloaded"}),
    "queued": frozenset({"measuring", "unloaded"}),
    "measuring": frozenset({"waiting", "unloaded"}),
    "waiting": frozenset({"loading", "unloaded"}),
    "loading": frozenset({"silent", "ready", "unloaded"}),
    "silent": frozenset({"ready", "unloaded"}),
    "ready": frozenset({"unloading", "ending", "unloaded"}),
    "unloading": frozenset({"ending", "unloaded", "asleep"}),
    # Force unloads once more: it ends at once what still writes its blocks.
    "ending": frozenset({"unloading", "unloaded", "asleep"}),
}
"""The states that may follow each. A model that crashes is unloaded."""


@attrs.define(eq=False)
class Wait:
    """A lease that waits: over once granted, or refused with a `problem`."""

    since: float
    limit_s: float
    """Bound on the time for which others are in the way, without loading."""
    is_over: bool = False
    problem: Problem | None = None

    def end(self, problem: Problem | None = None) -> None:
        self.is_over = True
        self.problem = problem


@attrs.define(eq=False)
class ModelRow:
    names: tuple[str, ...]
    state: State = "unloaded"
    weights_bytes: int = 0
    leases: int = 0
    waits: list[Wait] = attrs.field(factory=list)
    queued_at: float = -inf
    blocked_since: float = inf
    """Time since when those who use this model, or others, keep it from being loaded."""
    heard_at: float = inf
    """Time of the last progress of loading; infinite: nobody watches."""
    used_at: float = 0.0
    """Time of loading, or of the last release of a lease."""
    problem: Problem | None = None
    unusable_until: float = -inf
    pinned: bool = False
    ttl_s: float = 0.0
    """Time without requests until sleep; 0: never."""
    away_as: Away = "unloaded"
    is_forced: bool = False
    """Whether running requests do not delay the end."""

    def enter(self, state: State) -> None:
        """The only door to another state."""
        assert state == self.state or state in TRANSITIONS[self.state], (
            f"{self.names[0]} cannot be {state} after {self.state}"
        )
        self.state = state

    def leave(self) -> None:
        """The graph has ended: be away as was ordered, and unloaded after a crash."""
        self.enter(self.away_as)
        self.away_as = "unloaded"

    def end_waits(self, problem: Problem | None = None, waits: Sequence[Wait] = ()) -> None:
        """Grant leases, or refuse them for a problem: all, or only these."""
        for wait in tuple(waits or self.waits):
            self.waits.remove(wait)
            wait.end(problem)

    @property
    def source(self) -> str:
        return self.names[0]

    @property
    def has_weights(self) -> bool:
        return self.state in ("silent", "ready", "unloading", "ending")

    @property
    def is_idle(self) -> bool:
        return self.state == "ready" and not self.leases and not self.pinned

    @property
    def is_kept(self) -> bool:
        return self.state == "ready" and self.pinned

    @property
    def sleeps_at(self) -> float:
        return self.used_at + self.ttl_s if self.is_idle and self.ttl_s else inf

    def gives_up_at(self, wait: Wait) -> float:
        return max(wait.since, self.blocked_since) + wait.limit_s

    def due_times(self) -> Iterator[float]:
        """Times at which something comes next without an event."""
        yield self.sleeps_at
        if self.state == "loading":
            yield self.heard_at + SILENT_S
        if self.state == "silent":
            yield self.heard_at + STALLED_S
        yield from map(self.gives_up_at, self.waits)


T = TypeVar("T", bound=ModelRow)


@attrs.frozen
class LoadLimits:
    weights_bytes: int
    max_models: int | None = None


@attrs.frozen
class Measure(Generic[T]):
    model: T


@attrs.frozen
class Load(Generic[T]):
    model: T


@attrs.frozen
class Unload(Generic[T]):
    """End the graph of a model; `at_once`: its running requests, too."""

    model: T
    away_as: Away = "unloaded"
    at_once: bool = False


@attrs.frozen
class Refuse(Generic[T]):
    """Those who waited have been refused."""

    model: T
    problem: Problem


@attrs.frozen
class WaitUntil:
    """Nothing to do until this time, or the next event."""

    time: float


Step = Measure[T] | Load[T] | Unload[T] | Refuse[T] | WaitUntil


@attrs.define(eq=False)
class ModelTable(Generic[T]):
    """The events come first, then what comes next. `now`: of a clock that never goes back."""

    rows: list[T]
    limits: LoadLimits
    draining: bool = False
    _growths: list[tuple[T, Wait]] = attrs.field(factory=list)

    def ask(self, row: T, now: float, limit_s: float) -> Wait:
        """A lease, at once if the model is ready. The wait always ends."""
        wait = Wait(now, limit_s)
        problem = DRAINING if self.draining else _lasting_problem(row, now)
        if problem is not None:
            wait.end(problem)
        elif row.state == "ready":
            row.leases += 1
            wait.end()
        else:
            row.waits.append(wait)
            self.request(row, now)
        return wait

    def request(self, row: T, now: float) -> None:
        """Load a model on demand. Without a lease that waits, only where no other has to go."""
        if row.state in AWAY:
            row.enter("queued" if self.has_several else "waiting")
            row.problem = None
            row.queued_at = now

    def leave(self, row: T, wait: Wait, now: float) -> None:
        """The client has left, before its lease was granted or since."""
        if wait in row.waits:
            row.waits.remove(wait)
            if not row.waits and row.state in ("queued", "measuring", "waiting"):
                row.enter("unloaded")
        elif wait.problem is None:
            self.release(row, now)

    def release(self, row: T, now: float) -> None:
        row.leases -= 1
        row.used_at = now

    def measured(self, row: T, weights_bytes: int) -> None:
        # Those who waited may have left meanwhile.
        if row.state == "measuring":
            row.weights_bytes = weights_bytes
            row.enter("waiting")

    def heard(self, row: T, now: float) -> None:
        """Loading has made progress."""
        if row.state in ("loading", "silent"):
            row.heard_at = now
            row.problem = None

    def loaded(self, row: T, weights_bytes: int, now: float) -> None:
        row.enter("ready")
        row.weights_bytes = weights_bytes
        row.used_at = now
        row.problem = None
        row.blocked_since = inf
        row.leases += len(row.waits)
        row.end_waits()

    def ended(self, row: T, now: float, problem: Problem | None = None) -> None:
        """The graph has ended; with a `problem`: it crashed, or could not be loaded."""
        row.is_forced = False
        row.blocked_since = inf
        if problem is None:
            row.leave()
            if row.waits:
                self.request(row, now)
            return
        row.away_as = "unloaded"
        row.leave()
        row.problem = problem
        passes = problem.retry_after_s is not None and problem.retry_after_s < RETRY_S
        row.unusable_until = now if passes else now + RETRY_S
        row.end_waits(problem)

    def unload(self, row: T, away_as: Away, now: float, *, force: bool = False) -> None:
        """Order a loaded model, or one that sleeps, to be away. Raises `RequestFailed` (409) for a
        pinned one without `force`."""
        assert row.state not in COMING, "it cannot be interrupted"
        if row.state in AWAY:
            if away_as == "unloaded":
                row.enter("unloaded")
            return
        if row.is_kept and not force:
            raise RequestFailed(_pinned(row))
        row.away_as = away_as
        row.blocked_since = min(row.blocked_since, now)
        if row.state != "ending" or (force and not row.is_forced):
            row.enter("unloading")
        row.is_forced = row.is_forced or force

    def grow(self, row: T, weights_bytes: int, now: float) -> Wait:
        """Room for so many bytes more of a loaded model, which count from now on. Refused at once
        unless idle models can go."""
        row.weights_bytes += weights_bytes
        wait = Wait(now, inf)
        if self.draining:
            wait.end(DRAINING)
        else:
            self._growths.append((row, wait))
        return wait

    def drain(self) -> None:
        """End all waits: nothing is loaded any more."""
        self.draining = True
        for row in self.rows:
            row.end_waits(DRAINING)
        for _, wait in self._growths:
            wait.end(DRAINING)
        self._growths.clear()

    @property
    def has_several(self) -> bool:
        return len(self.rows) > 1

    # -- what comes next -------------------------------------------------------------------------

    def next(self, now: float) -> Step[T]:
        """Decide what comes next, and note that it has begun. The caller carries the step out,
        until `WaitUntil` comes."""
        if self.draining:
            return WaitUntil(inf)
        step = (
            self._next_by_itself(now)
            or self._next_growth(now)
            or self._next_load(now)
            or self._next_sleep(now)
        )
        if step is not None:
            return step
        # There may be hundreds of models that are away.
        present = [row for row in self.rows if row.state not in AWAY]
        times = [time for row in present for time in row.due_times()]
        # Whatever was due already waits for an event.
        return WaitUntil(min((time for time in times if time > now), default=inf))

    def _next_by_itself(self, now: float) -> Step[T] | None:
        """A step that no other model has a say in."""
        for row in self.rows:
            if row.state == "queued":
                row.enter("measuring")
                return Measure(row)
            if row.state == "unloading" and (row.is_forced or not row.leases):
                return self._end(row, row.away_as, now)
            if row.state == "loading" and now >= row.heard_at + SILENT_S:
                row.enter("silent")
            is_stalled = row.state == "silent" and now >= row.heard_at + STALLED_S
            if is_stalled and row.problem is None:
                row.problem = _stalled(row)
                return _refuse(row, row.problem)
            if late := [wait for wait in row.waits if row.gives_up_at(wait) <= now]:
                return _refuse(row, _timed_out(row, late[0].limit_s), late)
        return None

    def _next_growth(self, now: float) -> Step[T] | None:
        while self._growths and not self._is_loading():
            row, wait = self._growths[0]
            step = next_for(self.rows, row, self.limits)
            if isinstance(step, Unload):
                return self._end(step.model, "unloaded", now)
            reason = lacking_room(self.rows, row, self.limits)
            if step is None and not reason:
                break  # The one that ends may make room enough.
            self._growths.pop(0)
            wait.end(_no_room(reason) if reason else None)
        return None

    def _next_load(self, now: float) -> Step[T] | None:
        """One model is loaded after another, in the order in which they were queued. One without
        room lets others pass."""
        waiting = [row for row in self.rows if row.state == "waiting"]
        for row in sorted(waiting, key=lambda row: row.queued_at):
            step = next_for(self.rows, row, self.limits)
            if not row.waits and not isinstance(step, Load):
                row.enter("unloaded")
                continue
            if isinstance(step, Refuse):
                return _refuse(row, step.problem)
            is_blocked = step is None and lacking_room(self.rows, row, self.limits)
            row.blocked_since = min(row.blocked_since, now) if is_blocked else inf
            if step is None or self._is_loading():
                continue
            if isinstance(step, Unload):
                return self._end(step.model, "unloaded", now)
            row.enter("loading")
            row.heard_at = now if self.has_several else inf
            return step
        return None

    def _next_sleep(self, now: float) -> Step[T] | None:
        # One after another: to end a graph takes time, and the next one may be used meanwhile.
        if not any(row.state == "ending" for row in self.rows):
            for row in self.rows:
                if row.state == "ready" and row.sleeps_at <= now:
                    return self._end(row, "asleep", now)
        return None

    def _is_loading(self) -> bool:
        # Its weights count once they are loaded, or when others may be loaded beside it.
        return any(row.state == "loading" for row in self.rows)

    def _end(self, row: T, away_as: Away, now: float) -> Unload[T]:
        row.away_as = away_as
        row.blocked_since = min(row.blocked_since, now)
        row.enter("ending")
        return Unload(row, away_as, at_once=row.is_forced)


def _lasting_problem(row: ModelRow, now: float) -> Problem | None:
    lasts = row.state == "silent" or (row.state in AWAY and now < row.unusable_until)
    return row.problem if lasts else None


def _refuse(row: T, problem: Problem, waits: Sequence[Wait] = ()) -> Refuse[T]:
    row.end_waits(problem, waits)
    if row.state == "waiting" and not row.waits:
        row.enter("unloaded")
        row.problem = problem
        row.blocked_since = inf
    return Refuse(row, problem)


def _stalled(row: ModelRow) -> Problem:
    message = (
        f"{row.names[0]} is being loaded and has made no progress for {STALLED_S:g} s: its files "
        f"({row.source}) may be on a file system that does not answer"
    )
    return _unavailable(message, "model_load_stalled", 30)


def _timed_out(row: ModelRow, limit_s: float) -> Problem:
    name = row.names[0]
    if row.state == "waiting":
        return _no_room(
            f"{name} is not loaded, and the other models were in use for {limit_s:g} s "
            "(--model-memory)"
        )
    message = f"{name} is being unloaded, and its requests have not ended for {limit_s:g} s"
    return _unavailable(message, "queue_timeout")


def _no_room(message: str) -> Problem:
    return _unavailable(message, "no_memory_for_model")


def _unavailable(message: str, code: str, retry_after_s: int = 5) -> Problem:
    return Problem(503, message, "server_error", "model", code, retry_after_s=retry_after_s)


def _pinned(row: ModelRow) -> Problem:
    message = f"{row.names[0]} is pinned: release it (POST /v1/models/pin), or send force"
    return Problem(409, message, "invalid_request_error", "model", code="model_pinned")


# -- room ----------------------------------------------------------------------------------------


def next_for(
    models: Sequence[T], new: T, limits: LoadLimits
) -> Load[T] | Unload[T] | Refuse[T] | None:
    """Decide what comes next for `new`; None: others have to end first. Idle models are unloaded,
    least recently used first, unless that would not suffice."""
    others = [model for model in models if model is not new]
    if has_room(loaded(others), new, limits):
        return Load(new)
    if reason := lacking_after_pinned(models, new, limits):
        return Refuse(new, _no_room(reason))
    # No other goes while one ends, whose room may suffice.
    if any(other.state == "ending" for other in others) or lacking_room(models, new, limits):
        return None
    idle = [other for other in others if other.is_idle]
    return Unload(min(idle, key=lambda model: model.used_at))


def has_room(others: Sequence[ModelRow], new: ModelRow, limits: LoadLimits) -> bool:
    """Whether a model fits beside others. A single model may have any size."""
    if limits.max_models is not None and len(others) >= limits.max_models:
        return False
    return (
        not others
        or sum(other.weights_bytes for other in others) + new.weights_bytes <= limits.weights_bytes
    )


def loaded(models: Sequence[T]) -> list[T]:
    """Models with weights in memory, even while unloading or loading in silence."""
    return [model for model in models if model.has_weights]


def lacking_room(models: Sequence[ModelRow], new: ModelRow, limits: LoadLimits) -> str:
    """Reason why a model would not fit without all idle ones, and those that end; "" if it
    would."""
    held = [model for model in loaded(models) if model is not new and model.state != "ending"]
    return _lack([model for model in held if not model.is_idle], new, limits)


def lacking_after_pinned(models: Sequence[ModelRow], new: ModelRow, limits: LoadLimits) -> str:
    """Reason why a model would not fit beside the pinned ones; "" if it would."""
    # No other model is named: clients read the reason, and their keys may hide models.
    held = [model for model in loaded(models) if model is not new and model.is_kept]
    return _lack(held, new, limits, holders="pinned models")


def _lack(held: Sequence[ModelRow], new: ModelRow, limits: LoadLimits, holders: str = "") -> str:
    if has_room(held, new, limits):
        return ""
    used = sum(model.weights_bytes for model in held)
    holders = holders or ", ".join(
        f"{model.names[0]} ({'pinned' if model.pinned else 'in use'})" for model in held
    )
    if limits.max_models is not None and len(held) >= limits.max_models:
        return (
            f"{new.names[0]} would be one more than {limits.max_models} loaded models "
            f"(--max-loaded-models): {holders}"
        )
    free = max(0, limits.weights_bytes - used)
    return (
        f"{new.names[0]} needs {new.weights_bytes / 1e9:.2f} GB for its weights, and "
        f"{free / 1e9:.2f} of "
        f"{limits.weights_bytes / 1e9:.2f} GB (--model-memory) are left beside {holders}, which "
        "would have to be unloaded"
    )


def fits_now(models: Sequence[ModelRow], model: ModelRow, limits: LoadLimits) -> bool | None:
    """Whether a model could be loaded without disturbing others; None: unknown size."""
    return None if not model.weights_bytes else not lacking_room(models, model, limits)
