"""Choosing tokens: filters, distribution, noise, penalties and log-probabilities, against naive
float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.arithmetic import cpu_only
from tests.engine.naive import Floats, choose, kept, shaped, softmax
from tests.families import build
from tests.family_configs import VOCABULARY
from tests.long_tests import examples
from trouper.engine.sampling import sampler
from trouper.engine.sampling.logprobs import logprobs_of
from trouper.engine.sampling.penalties import Bias, History, Penalties
from trouper.engine.sampling.sampler import (
    CANDIDATES,
    SMALLEST,
    BatchSampler,
    Columns,
    choose_narrow,
    choose_nucleus,
    choose_wide,
    gumbel,
    gumbel_of,
    hashed,
    mixed_seeds,
    stream_keys,
    top_candidates,
)
from trouper.engine.spec_decode.verification_spans import Spans
from trouper.engine.step import StepEngine
from trouper.protocol.plans import Admit, Chunk, Plan, RowId
from trouper.protocol.sampling import Sampling

SIZES = (40, 64, 512, 1000, 8193, 49152, 50257)
"""Below and above where candidates are sought in groups of 32; two are no multiple of 32."""
FILTERS = {
    "none": Sampling(),
    "top_k": Sampling(top_k=5),
    "top_k 1": Sampling(top_k=1),
    "top_k of all candidates": Sampling(top_k=CANDIDATES),
    "large top_k": Sampling(top_k=CANDIDATES + 1),
    "top_k beyond the vocabulary": Sampling(top_k=10**6),
    "top_p": Sampling(top_p=0.7),
    "tiny top_p": Sampling(top_p=1e-6),
    "top_p 0": Sampling(top_p=0.0),
    "min_p": Sampling(min_p=0.05),
    "min_p 1": Sampling(min_p=1.0),
    "top_k, top_p": Sampling(top_k=30, top_p=0.6),
    "large top_k, top_p": Sampling(top_k=300, top_p=0.9),
    "top_k, min_p": Sampling(top_k=30, min_p=0.1),
    "top_p, min_p": Sampling(top_p=0.8, min_p=0.02),
    "all three": Sampling(top_k=40, top_p=0.9, min_p=0.03),
    "all three, large top_k": Sampling(top_k=100, top_p=0.95, min_p=0.001),
    "top_n_sigma": Sampling(top_n_sigma=0.7),
    "top_n_sigma of the best": Sampling(top_n_sigma=1e-6),
    "top_n_sigma, top_k, min_p": Sampling(top_n_sigma=1.2, top_k=30, min_p=0.02),
    "top_n_sigma, hot, top_p": Sampling(top_n_sigma=1.0, temperature=4.0, top_p=0.9),
    "typical_p": Sampling(typical_p=0.6),
    "small typical_p": Sampling(typical_p=0.2),
    "typical_p, top_k": Sampling(typical_p=0.8, top_k=30),
    "typical_p, top_p, min_p": Sampling(typical_p=0.9, top_p=0.7, min_p=0.02),
    "xtc": Sampling(xtc_probability=0.5, xtc_threshold=0.02),
    "xtc, always": Sampling(xtc_probability=1.0, xtc_threshold=0.05),
    "xtc, top_k, min_p": Sampling(xtc_probability=0.7, xtc_threshold=0.05, top_k=20, min_p=0.01),
    "xtc beyond any weight": Sampling(xtc_probability=1.0, xtc_threshold=1.0),
    "xtc, typical_p, large top_k, top_p": Sampling(
        xtc_probability=0.4, xtc_threshold=0.02, typical_p=0.95, top_k=300, top_p=0.9
    ),
    "hot": Sampling(temperature=3.0, top_k=50),
    "cold": Sampling(temperature=0.2, top_p=0.99),
    "freezing": Sampling(temperature=1e-4),
}
filters = pytest.mark.parametrize("sampling", FILTERS.values(), ids=FILTERS)


def logits_of(vocabulary: int, rows: int, seed: int = 0, scale: float = 2.5) -> NDArray[np.float32]:
    return (np.random.RandomState(seed).standard_normal((rows, vocabulary)) * scale).astype(
        np.float32
    )


def seeded(sampling: Sampling, seeds: Sequence[int]) -> list[Sampling]:
    import attrs

    return [attrs.evolve(sampling, seed=seed) for seed in seeds]


def at(position: int, rows: int) -> NDArray[np.uint64]:
    return np.full(rows, position, np.uint64)


class TestFilters:
    @filters
    @pytest.mark.parametrize("vocabulary", SIZES)
    @pytest.mark.long(but=("40-*", "1000-*", "8193-*"))
    def test_equals_the_naive_sampler(self, sampling: Sampling, vocabulary: int) -> None:
        rows = 24 if vocabulary < 8000 else 8 if vocabulary < 10000 else 4
        logits = logits_of(vocabulary, rows)
        samplings = seeded(sampling, range(rows))
        got = BatchSampler(samplings, vocabulary)(mx.array(logits), at(3, rows)).tolist()
        wanted = [
            choose(row.astype(np.float64), own, 3)
            for row, own in zip(logits, samplings, strict=True)
        ]
        certain = [place for place, (_, sure) in enumerate(wanted) if sure]
        assert len(certain) > rows / 2, "else this compares nothing"
        assert [got[place] for place in certain] == [wanted[place][0] for place in certain]  # type: ignore[index]

    def test_d1_all_kinds_in_one_batch(self) -> None:
        """Rows of every tier in turn; each equals itself alone."""
        vocabulary = 9001
        samplings = [*FILTERS.values(), Sampling(temperature=0)] * 2
        logits = mx.array(logits_of(vocabulary, len(samplings)))
        together = BatchSampler(samplings, vocabulary)(logits, at(0, len(samplings))).tolist()
        alone = [
            BatchSampler([own], vocabulary)(logits[place : place + 1], at(0, 1)).item()
            for place, own in enumerate(samplings)
        ]
        assert together == alone

    @filters
    def test_bfloat16_ties(self, sampling: Sampling) -> None:
        """Many equal logits: what is drawn is always among the kept, or equal to the least of
        them."""
        logits = mx.array(logits_of(512, 1)).astype(mx.bfloat16)
        exact = np.array(logits[0].astype(mx.float32), np.float64) / sampling.temperature
        assert len(set(exact.tolist())) < 500, "there are ties"
        least = exact[kept(exact, sampling)].min()
        rows = 400
        drawn = BatchSampler(seeded(sampling, range(rows)), 512)(
            mx.repeat(logits, rows, 0), at(0, rows)
        )
        assert exact[np.array(drawn)].min() >= least - 1e-9

    @pytest.mark.parametrize("top_k", [1, 3, 64, 65, 200, 256, 257, 1000, 2500, 7999, 8000, 9000])
    @pytest.mark.parametrize("equal", ["all", "those at the boundary"])
    def test_top_k_keeps_as_many_where_logits_are_equal(self, top_k: int, equal: str) -> None:
        """From 65 on it kept all that equal the last one, which may be thousands: logits in
        bfloat16 have few values."""
        vocabulary, rows = 8000, 500 * min(8, 1 + top_k // 32) if top_k < 500 else 300
        logits = np.zeros((1, vocabulary), np.float32)
        if equal != "all":
            logits[0, 5 : 5 + top_k // 2] = 0.5
        own = Sampling(top_k=top_k, seed=7)
        sampler = BatchSampler([own], vocabulary)
        drawn = set[int]()
        for start in range(0, rows, 500):
            positions = np.arange(start, start + 500, dtype=np.uint64)
            spread = sampler(
                mx.broadcast_to(mx.array(logits), (500, vocabulary)),
                positions,
                np.zeros(500, np.int64),
            )
            drawn |= {int(token) for token in np.array(spread)}
        assert len(drawn) <= top_k
        if top_k < 500:
            assert len(drawn) == min(top_k, vocabulary)

    @example(top_k=70, vocabulary=80, values=1, seed=0)
    @example(top_k=250, vocabulary=3000, values=2, seed=0)
    @given(st.integers(1, 300), st.integers(2, 600), st.integers(1, 6), st.integers(0, 2**31))
    @settings(max_examples=examples(40), deadline=None)
    def test_any_top_k_over_few_values(
        self, top_k: int, vocabulary: int, values: int, seed: int
    ) -> None:
        """What is drawn is among so many tokens, whatever is equal; all of those above the boundary
        may be."""
        exact = np.random.RandomState(seed).randint(0, values, vocabulary).astype(np.float32)
        sampler = BatchSampler([Sampling(top_k=top_k, temperature=5.0, seed=seed)], vocabulary)
        rows = mx.broadcast_to(mx.array(exact), (400, vocabulary))
        drawn = np.array(sampler(rows, np.arange(400, dtype=np.uint64), np.zeros(400, np.int64)))
        least = np.sort(exact)[::-1][min(top_k, vocabulary) - 1]
        assert exact[drawn].min() >= least
        assert len(set(drawn[exact[drawn] == least].tolist())) <= top_k - int((exact > least).sum())

    @pytest.mark.parametrize(
        "sampling", [Sampling(top_k=3), Sampling(top_k=100), Sampling(top_p=0.5), Sampling()]
    )
    def test_all_logits_equal(self, sampling: Sampling) -> None:
        rows = 300
        drawn = BatchSampler(seeded(sampling, range(rows)), 200)(mx.zeros((rows, 200)), at(0, rows))
        assert (
            len(set(drawn.tolist())) > 1 if sampling.top_k != 3 else len(set(drawn.tolist())) == 3  # type: ignore[arg-type]
        )

    @filters
    def test_forbidden_tokens_are_not_drawn(self, sampling: Sampling) -> None:
        """-inf, as masks make it; also when less is left than there are candidates, at a size with
        padded groups."""
        vocabulary = 8200
        logits = np.full((50, vocabulary), -np.inf, np.float32)
        logits[:, [5, 4000, vocabulary - 1]] = [1.0, 1.5, 0.5]
        drawn = BatchSampler(seeded(sampling, range(50)), vocabulary)(mx.array(logits), at(0, 50))
        assert set(drawn.tolist()) <= {5, 4000, vocabulary - 1}  # type: ignore[arg-type]


@pytest.mark.parametrize("vocabulary", SIZES)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
def test_top_candidates_are_the_best(vocabulary: int, dtype: mx.Dtype) -> None:
    logits = mx.array(logits_of(vocabulary, 3)).astype(dtype)
    ids, values = top_candidates(logits)
    exact = np.array(logits.astype(mx.float32))
    k = min(CANDIDATES, vocabulary)
    assert np.array_equal(np.array(values), -np.sort(-exact)[:, :k])
    assert np.array_equal(np.take_along_axis(exact, np.array(ids), 1), np.array(values))
    assert all(len(set(row)) == k for row in ids.tolist())  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("vocabulary", [8201, 9001, 16001])
def test_the_last_token_is_a_candidate_once_where_most_are_masked(vocabulary: int) -> None:
    """Padding behind a vocabulary that is no multiple of the group's size was taken for its last
    token, which then stood in the places of others."""
    dice, allowed = np.random.RandomState(5), []
    logits = np.full((60, vocabulary), -np.inf, np.float32)
    for row in logits:
        tokens = {
            vocabulary - 1,
            *dice.choice(vocabulary, dice.randint(1, CANDIDATES - 1), replace=False).tolist(),
        }
        row[[*tokens]] = dice.randn(len(tokens))
        allowed.append(sorted(tokens))
    ids, values = top_candidates(mx.array(logits))
    found = [
        np.sort(own[np.isfinite(its)]).tolist()
        for own, its in zip(np.array(ids), np.array(values), strict=True)
    ]
    assert found == allowed


def chi_square(drawn: NDArray[np.int64], weights: Floats) -> float:
    """How many standard deviations above its mean Pearson's statistic is (rare tokens counted as
    one)."""
    counts = np.bincount(drawn, minlength=len(weights)).astype(np.float64)
    assert counts[weights == 0].sum() == 0, "drawn although filtered out"
    expected = weights * len(drawn)
    often = expected >= 10
    counts, expected = (np.append(each[often], each[~often].sum()) for each in (counts, expected))
    there = expected > 0
    statistic = (((counts - expected) ** 2)[there] / expected[there]).sum()
    freedom = max(int(there.sum()) - 1, 1)
    return float((statistic - freedom) / np.sqrt(2 * freedom))


TIERS: dict[str, tuple[Sampling, Callable[[mx.array, Columns, mx.array], mx.array]]] = {
    "wide": (Sampling(temperature=0.8), lambda *args: choose_wide(*args, ordered=False)),
    "wide, min_p": (Sampling(min_p=0.02), lambda *args: choose_wide(*args, ordered=False)),
    "ordered": (
        Sampling(temperature=1.2, top_p=0.85),
        lambda *args: choose_wide(*args, ordered=True),
    ),
    "ordered, top_k": (Sampling(top_k=100), lambda *args: choose_wide(*args, ordered=True)),
    "narrow": (Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01), choose_narrow),
}


class TestDistribution:
    """Many positions of one row over the same logits."""

    DRAWS = 20000

    @pytest.mark.parametrize("tier", TIERS)
    def test_follows_the_softmax(self, tier: str) -> None:
        sampling, chooser = TIERS[tier]
        drawn = self._draw(sampling, chooser, logits_of(200, 1))
        assert chi_square(drawn, self._weights(sampling)) < 4

    def test_the_comparison_can_fail(self) -> None:
        sampling, chooser = TIERS["wide"]
        drawn = self._draw(sampling, chooser, logits_of(200, 1))
        assert chi_square(drawn, self._weights(Sampling(temperature=0.9))) > 8

    def test_noise_never_beats_what_is_hopeless(self) -> None:
        """A uniform that rounds to 1 made infinite noise: of a vocabulary of 49152, one draw in 340
        was arbitrary."""
        vocabulary, draws = 49152, 400
        logits = mx.zeros((1, vocabulary)).at[0, 11].add(40.0)
        columns = Columns.of([Sampling()], vocabulary)
        for seed in range(3):
            keys = stream_keys(
                at(int(mixed_seeds([seed])[0]), draws), np.arange(draws, dtype=np.uint64)
            )
            drawn = choose_wide(
                mx.broadcast_to(logits, (draws, vocabulary)), columns, keys, ordered=False
            )
            assert set(drawn.tolist()) == {11}  # type: ignore[arg-type]

    def _draw(
        self, sampling: Sampling, chooser: Callable[..., mx.array], logits: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        keys = stream_keys(
            at(int(mixed_seeds([5])[0]), self.DRAWS), np.arange(self.DRAWS, dtype=np.uint64)
        )
        rows = mx.broadcast_to(mx.array(logits), (self.DRAWS, logits.shape[1]))
        return np.array(chooser(rows, Columns.of([sampling], logits.shape[1]), keys), np.int64)

    def _weights(self, sampling: Sampling) -> Floats:
        scaled = logits_of(200, 1)[0].astype(np.float64) / sampling.temperature
        return softmax(np.where(kept(scaled, sampling), scaled, -np.inf))


@pytest.mark.parametrize("vocabulary", [200, 9000])
@pytest.mark.parametrize(
    "sampling", [FILTERS["top_k"], FILTERS["all three"], FILTERS["top_k, min_p"]]
)
def test_narrow_and_wide_draw_the_same(sampling: Sampling, vocabulary: int) -> None:
    """The noise is of a token, not of a place among candidates."""
    rows = 200
    logits = mx.array(logits_of(vocabulary, rows))
    columns = Columns.of([sampling] * rows, vocabulary)
    keys = stream_keys(at(int(mixed_seeds([9])[0]), rows), np.arange(rows, dtype=np.uint64))
    narrow = choose_narrow(logits, columns, keys)
    assert narrow.tolist() == choose_wide(logits, columns, keys, ordered=True).tolist()


@pytest.mark.parametrize("vocabulary", [200, 1500, 9000])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
def test_candidates_and_the_sorted_vocabulary_hold_the_same_nucleus(
    vocabulary: int, top_p: float
) -> None:
    """Of peaked logits, of flat ones beyond the candidates, of forbidden tokens, and of equal
    ones."""
    sampling = Sampling(temperature=0.8, top_p=top_p, min_p=0.001)
    kinds = [logits_of(vocabulary, 20, 1, scale) for scale in (0.01, 1.0, 4.0)]
    kinds.append(np.where(np.arange(vocabulary) % 7, -np.inf, kinds[1]).astype(np.float32))
    kinds.append(np.round(kinds[1]))
    logits = mx.array(np.concatenate(kinds))
    rows = len(logits)
    columns = Columns.of([sampling] * rows, vocabulary)
    keys = stream_keys(at(int(mixed_seeds([9])[0]), rows), np.arange(rows, dtype=np.uint64))
    got = choose_nucleus(logits, columns, keys).tolist()
    assert got == choose_wide(logits, columns, keys, ordered=True).tolist()
    one = Columns.of([sampling], vocabulary)
    alone = [
        choose_nucleus(logits[row : row + 1], one, keys[row : row + 1]).item()
        for row in range(rows)
    ]
    assert alone == got


@cpu_only
def test_the_step_before_is_read_before_sampling_waits_for_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokens would come a step late."""
    events = list[str]()

    def sampled(*args: Any) -> mx.array:
        events.append("sampled")
        return choose_nucleus(*args)

    monkeypatch.setattr(sampler, "choose_nucleus", sampled)
    engine, row = StepEngine(build("llama"), VOCABULARY), RowId(0)
    engine.starting = lambda: events.append("read")
    prompt = np.arange(1, 6, dtype="<i4").tobytes()
    admit = Admit(row, prompt, Sampling(temperature=0.8, top_p=0.9))
    for plan in (Plan(0, admit=(admit,), prefill=(Chunk(row, 5),)), Plan(1, decode=(row,))):
        launched = engine.launch(plan)
        assert launched.sampled is not None and not launched.sampled.is_lazy
        engine.collect(launched)
    assert events == ["read", "sampled"] * 2


def uniforms(keys: mx.array, ids: mx.array) -> Floats:
    """Noise back to [0, 1)."""
    return np.exp(-np.exp(-np.array(gumbel(keys, ids), np.float64)))


class TestNoise:
    IDS = mx.arange(1000, dtype=mx.uint32)

    def of(self, seeds: Sequence[int], positions: Sequence[int]) -> Floats:
        keys = stream_keys(mixed_seeds(seeds), np.array(positions, np.uint64))
        return uniforms(keys, self.IDS)

    @pytest.mark.parametrize("what", ["positions", "seeds", "large seeds"])
    def test_uniform(self, what: str) -> None:
        many = range(300)
        drawn = {
            "positions": lambda: self.of([0] * 300, many),
            "seeds": lambda: self.of(many, [0] * 300),
            "large seeds": lambda: self.of([2**63 + 2**32 * seed for seed in many], [7] * 300),
        }[what]()
        assert drawn.min() >= 0 and drawn.max() <= 1
        for bins in (2, 100, 256):
            assert (
                abs(chi_square((drawn * bins).astype(np.int64).ravel(), np.full(bins, 1 / bins)))
                < 4
            )
        means = drawn.mean(axis=1)
        assert np.abs(means - 0.5).max() < 5 * np.sqrt(1 / 12 / 1000), "each position by itself"
        assert np.abs(drawn.mean(axis=0) - 0.5).max() < 5 * np.sqrt(1 / 12 / 300), (
            "each token by itself"
        )

    @pytest.mark.parametrize("neighbours", ["ids", "positions", "seeds"])
    def test_d2_independent(self, neighbours: str) -> None:
        """Pairs of neighbours fill a 16 x 16 grid evenly."""
        here = self.of([3] * 200, range(200))
        there = {
            "ids": np.roll(here, 1, axis=1),
            "positions": self.of([3] * 200, range(1, 201)),
            "seeds": self.of([4] * 200, range(200)),
        }[neighbours]
        cells = (here * 16).astype(np.int64) * 16 + (there * 16).astype(np.int64)
        assert abs(chi_square(cells.ravel(), np.full(256, 1 / 256))) < 4
        assert abs(np.corrcoef(here.ravel(), there.ravel())[0, 1]) < 4 / np.sqrt(here.size)

    def test_every_number_of_bits_is_finite_noise(self) -> None:
        edges = [
            0,
            1,
            2,
            2**16,
            2**22 - 1,
            2**22,
            2**22 + 1,
            2**31,
            2**32 - 2**9,
            2**32 - 2,
            2**32 - 1,
        ]
        values = np.array(gumbel_of(mx.array(edges, mx.uint32)), np.float64)
        exact = -np.log(-np.log1p(-(np.array(edges) + 0.5) * 2.0**-32))
        assert np.isfinite(values).all()
        assert np.all(np.diff(values) <= 0)
        np.testing.assert_allclose(values[:-3], exact[:-3], rtol=2e-5, atol=2e-5)
        assert values.max() == pytest.approx(22.87, abs=0.01)
        assert values.min() > -3

    def test_golden(self) -> None:
        """A seeded request gives the same text with every release: these numbers may not change."""
        keys = stream_keys(mixed_seeds([0, 42, -1]), np.array([0, 5, 10**6], np.uint64))
        assert keys.tolist() == GOLDEN_KEYS
        assert hashed(keys, mx.array([0, 1, 49151], mx.uint32)).tolist() == GOLDEN_BITS

    @given(st.integers(-(2**80), 2**80), st.integers(0, 2**40))
    @settings(max_examples=examples(50))
    def test_any_seed_and_position(self, seed: int, position: int) -> None:
        keys = stream_keys(mixed_seeds([seed]), np.array([position], np.uint64))
        assert np.isfinite(np.array(gumbel(keys, self.IDS))).all()

    def test_seeds_differ(self) -> None:
        seeds = [0, 1, -1, 2**31, 2**32, 2**63 - 1, 2**64 - 2, 12345678901234567890]
        assert len({tuple(self.of([seed], [0])[0][:3].tolist()) for seed in seeds}) == len(seeds)


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-40, 1e-30, 1e-12, 1e-6])
@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 100, "min_p": 0.1}]
)
def test_the_smallest_temperatures_take_the_best(
    temperature: float, filters: dict[str, Any]
) -> None:
    """A float32 of 1e-46 is 0, and what is divided by 1e-40 is infinite: then any token could
    come."""
    logits = mx.array(logits_of(512, 8, seed=5))
    rows = [Sampling(temperature=temperature, seed=seed, **filters) for seed in range(8)]
    assert mx.array_equal(BatchSampler(rows, 512)(logits, at(0, 8)), mx.argmax(logits, axis=-1))


def test_d2_each_row_draws_with_its_own_seed_in_any_company() -> None:
    """Rows of all kinds, with seeds that differ in their high or in their low half only: as each
    alone."""
    seeds = [3, 3 + 2**32, 3 + 2**63, 4, 3, 2**40]
    kinds = [
        Sampling(top_k=40),
        Sampling(),
        Sampling(top_p=0.99),
        Sampling(top_k=200),
        Sampling(temperature=0),
    ]
    rows = [
        seeded(kinds[place % 5], [seed])[0] for place, seed in enumerate([*seeds, *seeds, *seeds])
    ]
    logits = mx.array(logits_of(512, 1, scale=0.5).repeat(len(rows), axis=0))
    together = np.array(
        [BatchSampler(rows, 512)(logits, at(step, len(rows))).tolist() for step in range(8)]
    )
    for place, row in enumerate(rows):
        alone = [BatchSampler([row], 512)(logits[:1], at(step, 1)).item() for step in range(8)]
        assert together[:, place].tolist() == alone
    wide = [seeded(Sampling(), [seed])[0] for seed in seeds]
    drawn = np.array(
        [
            BatchSampler(wide, 512)(logits[: len(seeds)], at(step, len(seeds))).tolist()
            for step in range(8)
        ]
    )
    assert len({tuple(column) for column in drawn.T.tolist()}) == len({*seeds}), (
        "seeds that differ draw differently"
    )


def test_d2_greedy_has_no_use_for_a_seed() -> None:
    logits = mx.array(logits_of(512, 8))
    samplings = seeded(Sampling(temperature=0, top_k=3, top_p=0.1), range(8))
    for position in range(3):
        got = BatchSampler(samplings, 512)(logits, at(position, 8))
        assert got.tolist() == mx.argmax(logits, axis=-1).tolist()


PENALIZED = (
    Sampling(),
    Sampling(repetition_penalty=1.5),
    Sampling(presence_penalty=0.7),
    Sampling(frequency_penalty=0.4, logit_bias=((3, 2.5), (4, -100.0))),
    Sampling(logit_bias=((0, -1.0),)),
    Sampling(
        repetition_penalty=0.8, presence_penalty=-1.0, frequency_penalty=2.0, logit_bias=((7, 1.0),)
    ),
)


@settings(max_examples=30)
@given(st.data())
def test_d1_penalties_equal_the_naive_ones(data: st.DataObject) -> None:
    """Over several steps, with rows that leave and come back into a new membership in between."""
    vocabulary = 16
    rows = data.draw(st.lists(st.sampled_from(PENALIZED), min_size=1, max_size=5))
    token = st.integers(0, vocabulary - 1)
    prompts = [data.draw(st.lists(token, min_size=1, max_size=6)) for _ in rows]
    histories = [
        History(np.array(prompt, np.int32), vocabulary) if row.penalized else None
        for row, prompt in zip(rows, prompts, strict=True)
    ]
    said: list[list[int]] = [[] for _ in rows]
    for _ in range(data.draw(st.integers(1, 3))):
        here = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True))
        bias = Bias([rows[place] for place in here])
        penalties = Penalties([rows[place] for place in here], [histories[place] for place in here])
        for step in range(data.draw(st.integers(0, 3))):
            logits = logits_of(vocabulary, len(here), seed=step)
            got = np.array(penalties(bias(mx.array(logits))))
            for mine, raw, place in zip(got, logits, here, strict=True):
                wanted = shaped(raw.astype(np.float64), rows[place], prompts[place], said[place])
                np.testing.assert_allclose(mine, wanted, atol=1e-4)
            drawn = [data.draw(token) for _ in here]
            penalties.count(mx.array(drawn, mx.uint32))
            for place, taken in zip(here, drawn, strict=True):
                said[place].append(taken)
        penalties.unstack()


@pytest.mark.parametrize("spans", [None, Spans([[1]])], ids=["plain", "drafts"])
def test_a_bias_is_not_rounded_to_the_steps_of_bfloat16(spans: Spans | None) -> None:
    """Between 16 and 32 they are an eighth."""
    biased = Bias([Sampling(logit_bias=((3, 0.05),))])(
        mx.full((2 if spans else 1, 8), 24, mx.bfloat16), spans
    )
    assert biased[:, 3].tolist() == pytest.approx([24.05] * biased.shape[0])


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    row = Sampling(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0)
    penalties = Penalties([row], [History(np.array([2], np.int32), 4)])
    assert penalties(mx.array([[1.0, -1.0, 4.0, 3.0]])).tolist() == [[1.0, -1.0, 2.0, 3.0]]
    penalties.count(mx.array([1], mx.uint32))
    assert penalties(mx.array([[1.0, -1.0, 4.0, 3.0]])).tolist() == [[1.0, -4.0, 2.0, 3.0]]


class TestLogprobs:
    @pytest.mark.parametrize("vocabulary", [40, 512, 50257])
    @pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
    def test_equal_the_exact_ones(self, vocabulary: int, dtype: mx.Dtype) -> None:
        logits = mx.array(logits_of(vocabulary, 4)).astype(dtype)
        tokens = mx.array([3, 1, 4, vocabulary - 1], mx.uint32)
        asked = [(0, RowId(10), 0), (2, RowId(12), 5), (3, RowId(13), 20)]
        pending = logprobs_of(logits, tokens, asked)
        assert pending is not None
        read = pending.read()
        assert [row for row, _ in read] == [10, 12, 13]
        for (place, _, wanted), (_, said) in zip(asked, read, strict=True):
            exact = np.log(softmax(np.array(logits[place].astype(mx.float32), np.float64)))
            assert said.token == tokens[place].item()
            assert said.logprob == pytest.approx(exact[said.token], abs=1e-4)
            assert len(said.top) == wanted
            assert [value for _, value in said.top] == sorted(
                (value for _, value in said.top), reverse=True
            )
            np.testing.assert_allclose(
                [value for _, value in said.top], -np.sort(-exact)[:wanted], atol=1e-4
            )
            for token, value in said.top:
                assert value == pytest.approx(exact[token], abs=1e-4)

    def test_sum_to_one(self) -> None:
        pending = logprobs_of(
            mx.array(logits_of(40, 1)), mx.array([0], mx.uint32), [(0, RowId(1), 40)]
        )
        assert pending is not None
        [(_, said)] = pending.read()
        assert sum(np.exp(value) for _, value in said.top) == pytest.approx(1, abs=1e-5)
        assert dict(said.top)[0] == said.logprob

    def test_huge_logits(self) -> None:
        pending = logprobs_of(
            mx.array([[1e4, -1e4, 9990.0]]), mx.array([1], mx.uint32), [(0, RowId(1), 3)]
        )
        assert pending is not None
        [(_, said)] = pending.read()
        assert said.logprob == pytest.approx(-2e4, rel=1e-6)
        assert said.top[0][1] == pytest.approx(0, abs=2e-3)

    def test_nobody_asked(self) -> None:
        assert logprobs_of(mx.zeros((2, 8)), mx.array([0, 1], mx.uint32), []) is None


GOLDEN_KEYS = [[2065550767, 3793791033], [1966850046, 2769799857], [2985314531, 1688137471]]
GOLDEN_BITS = [
    [504478542, 705797266, 588048204],
    [1776925934, 892985928, 1465556622],
    [1478814136, 2982363664, 2186677911],
]


def test_what_typical_p_takes_a_logarithm_of_is_a_normal_number() -> None:
    """Some GPUs take what is smaller for 0, and the weight of a token that is masked times its
    logarithm is then not a number."""
    assert np.float32(SMALLEST) >= np.finfo(np.float32).smallest_normal


def test_top_n_sigma_counts_allowed_tokens_alone() -> None:
    """A grammar's mask is minus infinity, which has no standard deviation."""
    logits = mx.array([[3.0, 2.0, 1.0, 0.0, *[-mx.inf] * 96]])
    sampler = BatchSampler([Sampling(seed=3, top_n_sigma=1.0)], 100)
    drawn = {
        sampler(logits, np.array([position], np.uint64), None).item() for position in range(60)
    }
    assert drawn == {0, 1}


def test_min_p_is_measured_against_what_typical_p_has_left() -> None:
    """One token of 0.4 is less typical than sixty of 0.01."""
    logits = mx.log(mx.array([[0.4, *[0.01] * 60]]))
    sampler = BatchSampler([Sampling(temperature=1.0, seed=3, typical_p=0.3, min_p=0.5)], 61)
    assert 0 not in {
        sampler(logits, np.array([position], np.uint64), None).item() for position in range(20)
    }
