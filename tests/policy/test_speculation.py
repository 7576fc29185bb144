"""It pays or it parks: on simulated devices, whatever a step with drafts costs there and however
many drafts are right."""

from __future__ import annotations

import os
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trouper.actors.scheduling.draft_estimates import Record, round_rows, round_size
from trouper.actors.scheduling.speculation_policy import (
    WATCH_EVERY,
    Allowed,
    Speculation,
    by_position,
)
from trouper.protocol.health import SpeculationStats
from trouper.protocol.plans import Chunk, Plan, ProposerName, RowId, Stepped

MOST = 16
LONG = bool(os.environ.get("TROUPER_LONG_TESTS"))
Cost = Callable[[int, int], float]
"""Of a step with so many rows, the longest draft so many tokens, in seconds."""


def device(per_row: float, per_token: float, fixed: float = 0.2) -> Cost:
    """A pass costs something for itself, for each row, and for each token that is verified, padding
    among them."""
    return lambda rows, drafted: (
        1 + per_row * rows + (fixed + per_token * rows * drafted if drafted else 0)
    )


Load = Callable[[], float]
"""How many times as long as on a quiet machine the next step takes."""


def steady() -> float:
    return 1.0


@attrs.define
class Busy:
    """A machine that now and then does something else, for so many steps on the average."""

    dice: random.Random
    factor: float
    quiet: float
    busy: float
    now: float = 1.0

    def __call__(self) -> float:
        if self.dice.random() < 1 / (self.quiet if self.now == 1 else self.busy):
            self.now = self.factor if self.now == 1 else 1.0
        return self.now


@attrs.define(eq=False)
class SimRow:
    """`repeats`: how often it has something to draft; `right`: how often the next drafted token is,
    and how often that of a draft model and of a head."""

    records: dict[ProposerName, Record]
    repeats: float
    right: float
    model_right: float = 0.0
    head_right: float = 0.0
    room: int = 10**6


@attrs.define
class Simulated:
    """A batch on such a device."""

    cost: Cost
    rows: list[SimRow]
    policy: Speculation
    dice: random.Random
    noise: float = 0.0
    draft_pass: Callable[[int], float] = lambda _: 0.0
    """Seconds that a pass of the draft model takes over so many rows."""
    head_pass: Callable[[int], float] = lambda _: 0.0
    """And one of a head."""
    load: Load = steady
    prepares: bool = False
    """Whether the device prepares kernels and a graph in the first two steps of each size, which
    take longer then: on an H100 from twice as long to 80 times."""
    prepared: Counter[tuple[int, int]] = attrs.field(factory=Counter)
    step: int = 0
    tokens: int = 0
    plain: float = 0.0
    """Tokens that plain steps would have brought in the same time."""
    drafting: int = 0
    passes: int = 0
    """Passes of the draft model or the head."""
    watched: int = 0

    @classmethod
    def of(
        cls, cost: Cost, kinds: Sequence[tuple[float, float]], noise: float = 0.0, seed: int = 7
    ) -> Simulated:
        policy = Speculation(MOST, 3, SpeculationStats())
        rows = [SimRow(policy.records(["ngram"]), repeats, right) for repeats, right in kinds]
        return cls(cost, rows, policy, random.Random(seed), noise)

    @classmethod
    def with_model(
        cls, cost: Cost, kinds: Sequence[tuple[float, float, float]], part: float
    ) -> Simulated:
        """With a draft model besides, a pass of which takes `part` of a plain step."""
        batch = cls.of(cost, [kind[:2] for kind in kinds])
        batch.draft_pass = lambda rows: part * cost(rows, 0)
        for row, (_, _, model_right) in zip(batch.rows, kinds, strict=True):
            row.records, row.model_right = (
                batch.policy.records(["ngram", "draft_model"]),
                model_right,
            )
        return batch

    @classmethod
    def with_head(
        cls, cost: Cost, kinds: Sequence[tuple[float, float]], part: float, model_part: float
    ) -> Simulated:
        """With a head, a pass of which takes `part` of a plain step, and a draft model besides.
        Rows never repeat themselves."""
        batch = cls.with_model(cost, [(0, 0, model_right) for _, model_right in kinds], model_part)
        batch.head_pass = lambda rows: part * cost(rows, 0)
        for row, (head_right, _) in zip(batch.rows, kinds, strict=True):
            row.records, row.head_right = (
                batch.policy.records(["ngram", "draft_model", "mtp"]),
                head_right,
            )
        return batch

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def _step(self) -> None:
        allowed = self.policy.allow(self.rows)
        drafts, watch = allowed.drafts, allowed.watch
        ids = tuple(RowId(place) for place in range(len(self.rows)))
        plan = Plan(self.step, decode=ids, drafts=drafts, proposers=allowed.proposers, watch=watch)
        names = plan.proposer_of
        drafted = tuple(
            (row, *self._drafted(self.rows[row], most, names[row]))
            for row, most in zip(ids, drafts, strict=False)
            if most
        )
        drafted = tuple(each for each in drafted if each[1])
        longest = max((tokens for _, tokens, _ in drafted), default=0)
        draft_s, took = 0.0, {"draft_model": self.draft_pass, "mtp": self.head_pass}
        assert len({*names.values()} - {"ngram"}) < 2, "one proposer at most runs passes"
        for name, pass_s in took.items():
            passes = max((tokens for row, tokens, _ in drafted if names[row] == name), default=0)
            self.passes += passes
            draft_s += passes * pass_s(len(ids))
        seconds = self.cost(len(ids), longest) + draft_s
        self.prepared[len(ids), longest] += 1
        preparing = self.prepares and self.prepared[len(ids), longest] <= 2
        seconds *= 20 if preparing else 1
        self.step += 1
        self.tokens += len(ids) + sum(right for _, _, right in drafted)
        self.plain += len(ids) * seconds / self.cost(len(ids), 0)
        self.drafting += bool(drafts)
        self.watched += watch
        matched = (
            tuple((row, 20) for row in ids if self.dice.random() < self.rows[row].repeats)
            if watch
            else ()
        )
        slower = self.load() * (1 + self.noise * self.dice.random() ** 4)
        stepped = Stepped(
            plan.step,
            ids,
            (1,) * len(ids),
            seconds=seconds * slower,
            drafted=drafted,
            matched=matched,
            draft_s=draft_s * slower,
            preparing=preparing,
        )
        self.policy.answered(plan, stepped, {row: self.rows[row] for row in ids})

    def _drafted(self, row: SimRow, most: int, name: ProposerName) -> tuple[int, int]:
        if name == "ngram" and self.dice.random() >= row.repeats:
            return 0, 0
        right = {"ngram": row.right, "draft_model": row.model_right, "mtp": row.head_right}[name]
        return most, next((n for n in range(most) if self.dice.random() >= right), most)

    def gain(self) -> float:
        """Against plain steps."""
        return self.tokens / self.plain


devices = st.builds(device, st.floats(0, 0.2), st.floats(0.0, 0.12), st.floats(0, 1))
"""Up to four times as dear as a CPU: there 16 rows with 16 drafted tokens each cost ten steps."""
kinds = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20)


@settings(max_examples=300 if LONG else 3)
@given(devices, kinds, st.sampled_from([0.0, 0.5]))
def test_it_never_costs_much(cost: Cost, kinds: list[tuple[float, float]], noise: float) -> None:
    batch = Simulated.of(cost, kinds, noise)
    batch.run(1500)
    assert batch.gain() > 0.95


@settings(max_examples=300 if LONG else 3)
@given(devices, st.integers(1, 16), st.floats(0.6, 1), st.floats(0.5, 1))
def test_it_pays_where_it_can(cost: Cost, rows: int, right: float, repeats: float) -> None:
    """Near the best size that whoever knew all costs and chances would take, if that is worth
    anything. On the average of some dice: by the luck of the first drafts one of 600 devices had
    0.79 of the best with one of them, and 0.93 over eight."""
    batches = [Simulated.of(cost, [(repeats, right)] * rows, seed=seed) for seed in (7, 8, 9)]
    for batch in batches:
        batch.run(1500)
    gain = statistics.mean(batch.gain() for batch in batches)

    def known(drafted: int) -> float:
        expected = repeats * sum(right**place for place in range(1, drafted + 1))
        somebody = 1 - (1 - repeats) ** rows
        seconds = somebody * cost(rows, drafted) + (1 - somebody) * cost(rows, 0)
        return (1 + expected) * cost(rows, 0) / seconds

    best = max(known(size) for size in (1, 2, 4, 8, 16))
    assert gain > (0.8 * best if best > 1.2 else 0.95)


spells = st.sampled_from([1.5, 5, 50, 500])


@settings(max_examples=300 if LONG else 3)
@given(devices, kinds, st.floats(1.2, 4), st.tuples(spells, spells), st.booleans())
def test_nor_on_a_busy_machine(
    cost: Cost,
    kinds: list[tuple[float, float]],
    factor: float,
    spell: tuple[float, float],
    leave: bool,
) -> None:
    """Whatever else it does, and whoever leaves and comes again."""
    batch = Simulated.of(cost, kinds, 0.5)
    batch.load = Busy(random.Random(3), factor, *spell)
    everybody = batch.rows
    for _ in range(150):
        batch.run(10)
        if leave:
            batch.rows = everybody[: batch.dice.randint(1, len(everybody))]
    assert batch.gain() > 0.94


def test_what_plain_steps_took_in_a_busy_moment_is_not_believed_for_long() -> None:
    """Drafts look cheap beside them. It cost a quarter of all tokens, for hundreds of steps."""
    batch = Simulated.of(device(0, 0.06, 0.5), [(0, 0.45)] * 4)
    batch.load = lambda: 3.0
    batch.run(20)
    batch.load = steady
    for row in batch.rows:
        row.repeats = 1
    batch.tokens, batch.plain = 0, 0
    batch.run(200)
    assert batch.gain() > 0.94


def test_steps_for_which_the_device_prepares_do_not_count() -> None:
    """Eight rows, then 32, copy a text in short answers, on a device where drafts cost next to
    nothing."""
    cost = device(0, 0.0005, 0.07)
    batch = Simulated.of(cost, [(1, 1)] * 8)
    batch.prepares = True
    for rows in (8, 32):
        for _ in range(3):
            batch.rows = [SimRow(batch.policy.records(["ngram"]), 1, 1) for _ in range(rows)]
            batch.tokens, batch.plain = 0, 0
            while batch.tokens < 120 * rows:
                batch.run(1)
        assert batch.gain() > 4, f"{rows} rows"


def test_who_repeats_nothing_is_never_asked_for_drafts() -> None:
    """So the engine never waits for the step before."""
    batch = Simulated.of(device(0.1, 0.1), [(0, 1)] * 8)
    batch.run(1000)
    assert batch.drafting == 0
    assert batch.watched == 1000 // WATCH_EVERY
    assert batch.policy.stats.parked_s > 900


def test_one_row_that_copies_among_many_does_not_slow_them() -> None:
    """Sixteen rows at a CPU's prices: nine positions cost 5.3 steps."""
    batch = Simulated.of(device(0, 0.034, 0.5), [(1, 1)] + [(0, 0)] * 15)
    batch.run(4000)
    assert batch.gain() > 0.98


def test_wrong_drafts_end_by_themselves_and_evidence_begins_them_again() -> None:
    batch = Simulated.of(device(0, 0.05), [(1, 0)])
    batch.run(300)
    assert batch.drafting < 60
    assert batch.rows[0].records["ngram"].caution > 1
    batch.rows[0].right = 1
    before = batch.drafting
    batch.rows[0].records["ngram"].repeats(64, batch.policy._step)
    batch.run(100)
    assert batch.drafting - before > 60


def test_a_slow_moment_is_not_for_ever() -> None:
    batch = Simulated.of(device(0, 0.02), [(1, 0.95)])
    batch.run(20)
    cheap, batch.cost = batch.cost, device(0, 0.02, 50)
    batch.run(200)
    assert batch.policy.stats.parked_s > 100
    batch.cost = cheap
    batch.run(20_000)
    before = batch.drafting
    batch.run(100)
    assert batch.drafting - before > 80


def test_rows_near_their_end_draft_less() -> None:
    batch = Simulated.of(device(0, 0.01), [(1, 1)])
    batch.run(30)
    for room in (5, 1, 0, -1):
        batch.rows[0].room = room
        drafts = batch.policy.allow(batch.rows).drafts
        assert all(most <= max(room, 0) for most in drafts)


def test_a_draft_model_rests_where_rows_are_longer_than_its_context() -> None:
    """The last tokens of an answer are not its; another proposer still has them."""
    batch = Simulated.with_model(device(0, 0.01), [(0, 0, 1)] * 2, 0.01)
    batch.run(60)
    long, short = (row.records["draft_model"] for row in batch.rows)
    long.undrafted, short.undrafted = 100, 0
    for room, most in ((200, 16), (103, 3), (100, 0), (5, 0)):
        batch.rows[0].room = room
        allowed = batch.policy.allow(batch.rows)
        assert allowed.drafts[0] <= most < allowed.drafts[1] + 1, (room, allowed)
        assert bool(allowed.drafts[0]) == bool(most)
        assert allowed.drafts[1] and allowed.proposers[1] == "draft_model"


def test_rows_that_may_not_draft_are_left_alone() -> None:
    batch = Simulated.of(device(0, 0.01), [(1, 1), (1, 1)])
    batch.rows[0].records = {}
    batch.run(30)
    allowed = batch.policy.allow(batch.rows)
    assert allowed.drafts[0] == 0 < allowed.drafts[1] and allowed.watch
    batch.rows[1].records = {}
    assert batch.policy.allow(batch.rows) == Allowed()


def test_steps_that_prefill_too_are_no_measure() -> None:
    """Nobody drafts until a plain step was measured."""
    policy = Speculation(MOST, 3, SpeculationStats())
    row = SimRow(policy.records(["mtp"]), 1, 1)
    for step in range(9):
        plan = Plan(step, decode=(RowId(0),), prefill=(Chunk(RowId(1), 5),))
        policy.answered(plan, Stepped(step, (RowId(0),), (1,), seconds=1.0), {RowId(0): row})
    assert policy.allow([row]).drafts == ()
    policy.answered(
        Plan(9, decode=(RowId(0),)),
        Stepped(9, (RowId(0),), (1,), seconds=1.0),
        {RowId(0): row},
    )
    assert policy.allow([row]).drafts


def test_counters_by_position() -> None:
    assert by_position((), [0, 2, 1]) == (2, 1)
    assert by_position((2, 1), [3]) == (3, 2, 1)
    assert [round_rows(rows) for rows in (1, 4, 5, 8, 9, 33)] == [1, 4, 8, 8, 16, 64]
    assert [round_size(tokens) for tokens in (0, 1, 2, 3, 8, 9)] == [0, 1, 2, 4, 8, 16]


both = st.lists(
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20
)
parts = st.floats(0.02, 1)
"""A pass of a draft model, in plain steps of the target."""


@settings(max_examples=300 if LONG else 3)
@given(devices, both, parts)
def test_a_draft_model_never_costs_much(
    cost: Cost, kinds: list[tuple[float, float, float]], part: float
) -> None:
    batch = Simulated.with_model(cost, kinds, part)
    batch.run(1500)
    assert batch.gain() > 0.95


@settings(max_examples=300 if LONG else 3)
@given(devices, st.integers(1, 16), st.floats(0.6, 1), parts)
def test_a_draft_model_pays_where_it_can(cost: Cost, rows: int, right: float, part: float) -> None:
    batch = Simulated.with_model(cost, [(0, 0, right)] * rows, part)
    batch.run(1500)

    def known(drafted: int) -> float:
        expected = sum(right**place for place in range(1, drafted + 1))
        return (
            (1 + expected) * cost(rows, 0) / (cost(rows, drafted) + drafted * part * cost(rows, 0))
        )

    best = max(known(size) for size in (1, 2, 4, 8, 16))
    assert batch.gain() > (0.8 * best if best > 1.2 else 0.95)


def test_a_wrong_draft_model_is_parked_within_50_steps() -> None:
    """Also where its passes cost next to nothing. Then it costs a hundredth at most, and other rows
    begin with what these showed."""
    batch = Simulated.with_model(device(0, 0.02), [(0, 0, 0)] * 4, 0.1)
    batch.run(50)
    before = batch.passes
    batch.tokens, batch.plain = 0, 0
    batch.run(1000)
    assert batch.gain() > 0.98
    assert batch.passes - before < 100
    fresh = batch.policy.records(["draft_model"])
    assert fresh["draft_model"].acceptance.rate < 0.6


def test_a_wrong_drafter_rests_across_answers() -> None:
    """Each answer's row tried it again, four times in 300 steps: each time a drafter that reads
    taps has to read what came meanwhile."""
    batch = Simulated.with_model(device(0, 0.02), [(0, 0, 0)], 0.1)
    for _ in range(30):
        batch.rows[0].records = batch.policy.records(["ngram", "draft_model"])
        batch.run(100)
    assert batch.drafting < 25
    before, batch.rows[0].model_right = batch.passes, 0.9
    for _ in range(14):
        batch.rows[0].records = batch.policy.records(["ngram", "draft_model"])
        batch.run(100)
    assert batch.passes - before > 300, "it is right now"


def test_drafts_after_a_rest_have_one_token_until_one_is_right() -> None:
    """A wrong drafter costs a fiftieth at most, also where verification costs much."""
    batch = Simulated.with_model(device(0, 0.25), [(0, 0, 0)], 0.25)
    batch.run(1050)
    assert batch.gain() > 0.98
    before, batch.rows[0].model_right = batch.passes, 1.0
    batch.run(600)
    assert batch.passes - before > 600, "longer ones again"


def test_a_draft_model_that_was_wrong_is_tried_again() -> None:
    """After rests that double, and what it showed is forgotten."""
    batch = Simulated.with_model(device(0, 0.02), [(0, 0, 0)], 0.1)
    batch.run(300)
    before, batch.rows[0].model_right = batch.passes, 0.9
    batch.run(600)
    assert batch.passes - before > 300


def test_each_row_has_its_better_proposer() -> None:
    """Two rows copy, which costs no passes, and two are served by the draft model alone."""
    batch = Simulated.with_model(
        device(0, 0.01), [(1, 0.99, 0.3), (1, 0.99, 0.3), (0, 0, 0.95), (0, 0, 0.95)], 0.05
    )
    batch.run(300)
    allowed = batch.policy.allow(batch.rows)
    assert allowed.proposers == ("ngram", "ngram", "draft_model", "draft_model")
    assert all(allowed.drafts)


def test_a_draft_model_whose_passes_cost_too_much_is_not_used() -> None:
    batch = Simulated.with_model(device(0, 0.02), [(0, 0, 1)], 1.0)
    batch.run(1000)
    assert batch.passes < 60
    assert batch.gain() > 0.97


def test_counters_are_by_proposer() -> None:
    batch = Simulated.with_model(device(0, 0.01), [(1, 1, 0), (0, 0, 1)], 0.05)
    batch.run(200)
    stats = batch.policy.stats
    assert {*stats.by_proposer} == {"ngram", "draft_model"}
    for field in ("drafts", "drafted", "accepted"):
        assert sum(getattr(one, field) for one in stats.by_proposer.values()) == getattr(
            stats, field
        )
    assert stats.by_proposer["draft_model"].accepted > 0


def test_a_head_is_used_where_a_draft_model_costs_more() -> None:
    """Both are right; what a pass of each costs is measured by its name."""
    batch = Simulated.with_head(device(0, 0.01), [(0.9, 0.95)] * 3, 0.03, 0.6)
    batch.run(400)
    stats = batch.policy.stats.by_proposer
    assert stats["mtp"].drafted > 10 * stats.get("draft_model", stats["mtp"]).drafted
    assert batch.gain() > 1.5


def test_a_draft_model_is_used_where_the_head_is_wrong() -> None:
    batch = Simulated.with_head(device(0, 0.01), [(0.0, 0.95)] * 3, 0.03, 0.1)
    batch.run(400)
    assert batch.policy.stats.by_proposer["draft_model"].accepted > 300
    assert batch.gain() > 1.3


def test_a_random_head_is_parked_within_50_steps() -> None:
    """At a cost of a fiftieth at most, from the first step on."""
    batch = Simulated.with_head(device(0, 0.02), [(0.002, 0)] * 4, 0.1, 0)
    for row in batch.rows:
        row.records = batch.policy.records(["ngram", "mtp"])
    batch.run(50)
    before = batch.passes
    batch.run(1000)
    assert batch.passes - before < 100
    assert batch.gain() > 0.98


def test_names_without_drafts_are_no_measure() -> None:
    """A plan may name a proposer for a row that has no room for a draft."""
    policy = Speculation(MOST, 3, SpeculationStats())
    rows = {RowId(index): SimRow(policy.records(["ngram", "mtp"]), 1, 1) for index in range(2)}
    for step in range(9):
        drafts = step % 3 == 1
        names: tuple[ProposerName, ...] = ("ngram", "mtp") if drafts else ()
        plan = Plan(step, decode=(*rows,), drafts=(2, 0) if drafts else (), proposers=names)
        drafted = ((RowId(0), 2, 0),) if drafts else ()
        seconds = 3.0 if drafts else 1.0
        policy.answered(
            plan, Stepped(step, (*rows,), (1, 1), seconds=seconds, drafted=drafted), rows
        )
    costs = policy._costs
    assert [costs.ratio("ngram", 2, 2), *costs._ratios] == [3.0, ("ngram", 2)]


# -- regret ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("cost", [device(0, 0.01), device(0, 0.1, 0.5)], ids=["cheap", "dear"])
@pytest.mark.parametrize("rows", [1, 4])
def test_after_warm_up_a_tenth_at_most_is_lost_to_the_best_fixed_size(
    right: float, cost: Cost, rows: int
) -> None:
    """The best of plain steps and of drafts of one size, by whoever knows all costs."""
    batch = Simulated.with_model(cost, [(0, 0, right)] * rows, 0.05)
    batch.run(200)
    batch.tokens, batch.plain = 0, 0
    batch.run(600)

    def gain(size: int) -> float:
        tokens = sum(right**index for index in range(size + 1))
        seconds = cost(rows, size) + 0.05 * size * cost(rows, 0) if size else cost(rows, 0)
        return tokens * cost(rows, 0) / seconds

    assert batch.gain() > 0.9 * max(gain(size) for size in (0, 1, 2, 4, 8, 16))
