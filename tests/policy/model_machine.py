"""Hypothesis plays clients, graphs and a clock for a table of models, and does what it says comes
next; after each event the table is at rest, and holds what it promises."""

from __future__ import annotations

from math import inf

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from trouper.actors.runtime.model_table import (
    AWAY,
    COMING,
    RETRY_S,
    SILENT_S,
    STALLED_S,
    Away,
    Load,
    LoadLimits,
    Measure,
    ModelRow,
    ModelTable,
    Refuse,
    Step,
    Unload,
    Wait,
    WaitUntil,
)
from trouper.protocol.problems import DRAINING, Problem, RequestFailed

FAULT = Problem(500, "no weights")
SHORTAGE = Problem(503, "too many open files", retry_after_s=1)
STEPS = 100
"""More than any event can cause."""
picks = st.integers(0, 2**16)
sizes = st.integers(1, 10)


@attrs.define(eq=False)
class Client:
    row: ModelRow
    wait: Wait
    since: float
    limit_s: float


def naive_room(row: ModelRow, others: list[ModelRow], limits: LoadLimits) -> bool:
    if limits.max_models is not None and len(others) >= limits.max_models:
        return False
    return not others or (
        sum(other.weights_bytes for other in others) + row.weights_bytes <= limits.weights_bytes
    )


class ModelMachine(RuleBasedStateMachine):
    @initialize(
        weights=st.lists(sizes, min_size=1, max_size=4),
        limits=st.builds(LoadLimits, st.integers(1, 20), st.none() | st.integers(1, 3)),
        ttl_s=st.sampled_from([0.0, 40.0]),
        drains=st.booleans(),
    )
    def start(self, weights: list[int], limits: LoadLimits, ttl_s: float, drains: bool) -> None:
        self.drains = drains
        rows = [ModelRow((f"m{index}",), ttl_s=ttl_s) for index, _ in enumerate(weights)]
        self.limits = limits
        self.table = ModelTable(rows, limits)
        self.sizes = dict(zip(rows, weights, strict=True))
        self.now = 0.0
        self.wake_at = inf
        self.measuring: list[ModelRow] = []
        self.loading: list[ModelRow] = []
        self.running: list[ModelRow] = []
        self.ending: dict[ModelRow, Unload[ModelRow]] = {}
        self.ordered: dict[ModelRow, tuple[Away, bool]] = {}
        """Orders to unload, and whether by force, until the graph has ended."""
        self.ordered_at: dict[ModelRow, float] = {}
        self.clients: list[Client] = []
        self.growths: list[Wait] = []
        self.blocked_since: dict[ModelRow, float] = {}
        """Since when models in use leave a model no room."""
        for row in rows:
            self.table.request(row, self.now)
            self.settle()
        self.let_files_answer()

    # -- the manager -----------------------------------------------------------------------------

    def settle(self) -> None:
        for _ in range(STEPS):
            step = self.table.next(self.now)
            if isinstance(step, WaitUntil):
                assert step.time > self.now, "else the manager would not rest"
                self.wake_at = step.time
                self.note_blocked()
                return
            self.carry_out(step)
        raise AssertionError(f"no rest after {STEPS} steps")

    def note_blocked(self) -> None:
        for row in self.table.rows:
            if row.state == "waiting" and not naive_room(row, self.in_use(), self.limits):
                self.blocked_since.setdefault(row, self.now)
            else:
                self.blocked_since.pop(row, None)

    def in_use(self) -> list[ModelRow]:
        """Those that nobody may unload for another, except what ends already."""
        silent = [row for row in self.loading if row.state == "silent"]
        kept = [row for row in self.running if row.leases or row.pinned or row in self.ordered]
        return [*silent, *(row for row in kept if row not in self.ending)]

    def carry_out(self, step: Step[ModelRow]) -> None:
        match step:
            case Measure(row):
                assert row.state == "measuring" and len(self.table.rows) > 1
                self.measuring.append(row)
            case Load(row):
                self.begin_load(row)
            case Unload(row):
                self.begin_end(step)
            case Refuse(row, problem):
                assert row not in self.running or row in self.ordered or row in self.ending
                assert problem.status == 503

    def begin_load(self, row: ModelRow) -> None:
        assert row not in [*self.loading, *self.running], "never two graphs of one model"
        assert all(other.state == "silent" for other in self.loading), "one after another"
        others = [*self.running, *self.loading]
        assert naive_room(row, others, self.limits), "the bound on weights holds"
        self.loading.append(row)

    def begin_end(self, step: Unload[ModelRow]) -> None:
        row = step.model
        away_as, forced = self.ordered.get(row, (None, False))
        assert row in self.running
        assert step.at_once == forced
        assert step.at_once or not self.leases(row), "a leased one stays"
        if away_as is not None:
            assert step.away_as == away_as
        else:
            assert not row.pinned, "a pinned one stays"
            assert not self.ending, "one after another"
            idle = [other for other in self.running if not other.leases and not other.pinned]
            idle = [other for other in idle if other not in self.ordered]
            oldest = min(other.used_at for other in idle)
            assert step.away_as == "asleep" or row.used_at == oldest, "least recently used first"
        assert row not in self.ending or (step.at_once and not self.ending[row].at_once)
        self.ending[row] = step

    def leases(self, row: ModelRow) -> int:
        return sum(
            client.row is row and client.wait.is_over and client.wait.problem is None
            for client in self.clients
        )

    def row(self, pick: int) -> ModelRow:
        return self.table.rows[pick % len(self.table.rows)]

    # -- clients ---------------------------------------------------------------------------------

    @rule(pick=picks, limit_s=st.sampled_from([inf, 5.0, 30.0]))
    def ask(self, pick: int, limit_s: float) -> None:
        row = self.row(pick)
        before = row.state
        lasting = row.problem is not None and (
            before == "silent" or (before in AWAY and self.now < row.unusable_until)
        )
        wait = self.table.ask(row, self.now, limit_s)
        assert wait.is_over == (lasting or before == "ready")
        assert wait.problem == (row.problem if lasting else None)
        self.clients.append(Client(row, wait, self.now, limit_s))
        self.settle()

    @rule(pick=picks, stays=st.booleans(), pinned=st.sampled_from([None, None, True]))
    def serve(self, pick: int, stays: bool, pinned: bool | None) -> None:
        """A client whose model is loaded without a fault, if there is room."""
        self.ask(pick, 5.0)
        self.let_files_answer()
        if pinned is not None:
            self.pin(pick, pinned)
        if not stays:
            self.leave(len(self.clients) - 1)

    def let_files_answer(self) -> None:
        while self.measuring or self.loading or self.ending:
            if self.measuring:
                self.measure(0, fails=False, error=0)
            elif self.loading:
                self.load(0, problem=None)
            else:
                self.end(0)

    @precondition(lambda self: self.clients)
    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        client = self.clients.pop(pick % len(self.clients))
        row = client.row
        was_last = row.waits == [client.wait]
        self.table.leave(row, client.wait, self.now)
        assert not was_last or row.state not in ("queued", "measuring", "waiting")
        self.settle()

    @rule(pick=picks)
    def request(self, pick: int) -> None:
        self.table.request(self.row(pick), self.now)
        self.settle()

    @rule(pick=picks, away_as=st.sampled_from(AWAY), force=st.booleans())
    def unload(self, pick: int, away_as: Away, force: bool) -> None:
        row = self.row(pick)
        if row.state in COMING:
            return
        before = row.state
        if before == "ready" and row.pinned and not force:
            with pytest.raises(RequestFailed, match="pinned"):
                self.table.unload(row, away_as, self.now)
            assert row.state == before
            return
        self.table.unload(row, away_as, self.now, force=force)
        if before not in AWAY:
            self.ordered_at.setdefault(row, self.now)
            self.ordered[row] = (away_as, force or self.ordered.get(row, (away_as, False))[1])
        elif away_as == "unloaded":
            assert row.state == "unloaded"
        self.settle()

    @rule(pick=picks, pinned=st.booleans())
    def pin(self, pick: int, pinned: bool) -> None:
        self.row(pick).pinned = pinned
        self.settle()

    @rule(pick=picks, ttl_s=st.sampled_from([0.0, 1.0, 40.0]))
    def keep_for(self, pick: int, ttl_s: float) -> None:
        self.row(pick).ttl_s = ttl_s
        self.settle()

    @rule(pick=picks, nbytes=sizes)
    def grow(self, pick: int, nbytes: int) -> None:
        row = self.row(pick)
        if self.leases(row) and row in self.running and row not in self.ending:
            self.growths.append(self.table.grow(row, nbytes, self.now))
            self.settle()

    # -- graphs, files and the clock -------------------------------------------------------------

    @precondition(lambda self: self.measuring)
    @rule(pick=picks, fails=st.sampled_from([False, False, True]), error=st.sampled_from([0, 0, 3]))
    def measure(self, pick: int, fails: bool, error: int) -> None:
        row = self.measuring.pop(pick % len(self.measuring))
        if not fails:
            self.table.measured(row, self.sizes[row] + error)
        elif row.state == "measuring":
            self.table.ended(row, self.now, FAULT)
            after: str = row.state
            assert after == "unloaded" and not row.waits
        self.settle()

    @precondition(lambda self: self.loading)
    @rule(pick=picks, problem=st.sampled_from([None, None, None, FAULT, SHORTAGE]))
    def load(self, pick: int, problem: Problem | None) -> None:
        row = self.loading.pop(pick % len(self.loading))
        waiting = [client for client in self.clients if client.row is row]
        if problem is None:
            self.table.loaded(row, self.sizes[row], self.now)
            self.running.append(row)
            assert row.state == "ready"
        else:
            self.table.ended(row, self.now, problem)
            assert row.state == "unloaded"
            assert (row.unusable_until >= self.now + RETRY_S) == (problem is FAULT)
        assert all(client.wait.is_over for client in waiting)
        self.settle()

    @precondition(lambda self: self.loading)
    @rule(pick=picks)
    def progress(self, pick: int) -> None:
        row = self.loading[pick % len(self.loading)]
        if row.heard_at < inf:
            self.table.heard(row, self.now)
            assert row.problem is None
            self.settle()

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def crash(self, pick: int) -> None:
        row = self.running[pick % len(self.running)]
        self.end_graph(row)
        self.table.ended(row, self.now, FAULT)
        assert row.state == "unloaded" and not row.waits
        self.settle()

    @precondition(lambda self: self.ending)
    @rule(pick=picks)
    def end(self, pick: int) -> None:
        row = [*self.ending][pick % len(self.ending)]
        away_as = self.ordered[row][0] if row in self.ordered else self.ending[row].away_as
        self.end_graph(row)
        has_waits = bool(row.waits)
        self.table.ended(row, self.now)
        assert row.state in (COMING if has_waits else (away_as,))
        assert not row.is_forced, "the next end is another"
        self.settle()

    def end_graph(self, row: ModelRow) -> None:
        self.running.remove(row)
        self.ending.pop(row, None)
        self.ordered.pop(row, None)
        self.ordered_at.pop(row, None)

    @rule(seconds=st.sampled_from([0.5, 5.0, SILENT_S, STALLED_S]))
    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.wake_at <= until:
            self.wake()
        self.now = until
        self.settle()

    @precondition(lambda self: self.wake_at < inf)
    @rule()
    def wake(self) -> None:
        """The manager wakes when it was told to, in vain or not."""
        self.now = self.wake_at
        self.settle()

    @rule(pick=picks, size=sizes)
    def scan(self, pick: int, size: int) -> None:
        """A model is added, or one that is not in use vanishes."""
        row = self.row(pick)
        if len(self.table.rows) < 4:
            row = ModelRow((f"m{len(self.sizes)}",), weights_bytes=size)
            self.table.rows.append(row)
            self.sizes[row] = size
        elif row is not self.table.rows[0] and row.state in AWAY and not row.leases:
            self.table.rows.remove(row)
        self.settle()

    # -- promises --------------------------------------------------------------------------------

    @invariant()
    def leases_are_counted(self) -> None:
        for row in self.sizes:
            assert row.leases == self.leases(row)

    @invariant()
    def states_are_those_of_the_graphs(self) -> None:
        for row in self.table.rows:
            assert (row.state in ("loading", "silent")) == (row in self.loading)
            assert (row.state in ("ready", "unloading", "ending")) == (row in self.running)
            assert (row.state == "ending") == (row in self.ending)
            if row.state == "measuring":
                assert row in self.measuring

    @invariant()
    def each_wait_has_something_to_wait_for(self) -> None:
        for client in self.clients:
            if client.wait.is_over:
                continue
            row = client.row
            assert client.wait in row.waits
            assert row.state in COMING or row.state in ("unloading", "ending")
            assert row.state != "silent" or row.problem is None
            if row.state == "unloading":
                assert self.leases(row), "else it would end"
                assert self.now < max(client.since, self.ordered_at[row]) + client.limit_s
            if row in self.blocked_since:
                since = max(client.since, self.blocked_since[row])
                assert self.now < since + client.limit_s, "it would have waited too long"

    @invariant()
    def at_rest_nothing_is_left_to_do(self) -> None:
        rows = self.table.rows
        assert not any(row.state == "queued" for row in rows)
        if any(row.state == "loading" for row in rows):
            return
        for row in rows:
            if row.state == "waiting":
                held = [*self.running, *self.loading]
                assert not naive_room(row, held, self.limits), "no end is needed for it"
        if self.ending:
            return
        assert all(growth.is_over for growth in self.growths)
        assert all(self.now < row.sleeps_at and self.wake_at <= row.sleeps_at for row in rows)
        for row in rows:
            if row.state == "waiting":
                assert row.waits, "one that nobody waits for is loaded at once, or not at all"
                assert not naive_room(row, self.in_use(), self.limits), "it could be loaded"
                pinned = [other for other in self.running if other.pinned]
                pinned = [other for other in pinned if other.state == "ready"]
                assert naive_room(row, pinned, self.limits), "waiting will not help"

    def teardown(self) -> None:
        """Once clients, graphs and files have done what they do, all waits are over."""
        if not hasattr(self, "table"):
            return
        if self.drains:
            self.table.drain()
            assert self.table.ask(self.row(0), self.now, inf).problem == DRAINING
            assert self.table.next(self.now) == WaitUntil(inf)
        for _ in range(STEPS):
            for client in [client for client in self.clients if client.wait.is_over]:
                self.clients.remove(client)
                self.table.leave(client.row, client.wait, self.now)
            self.settle()
            self.let_files_answer()
            if not self.clients:
                break
        assert not self.clients
        assert all(growth.is_over for growth in self.growths)
