"""The soak itself, for a few seconds with tiny models, and that its verdicts can be either."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.soak.__main__ import Shape, soak
from tests.soak.client import CHAT, Ask, Heard, answer_of, equal
from tests.soak.judging import Kind, increments, judge
from tests.soak.load import Tally
from tests.soak.slopes import theil_sen


@pytest.mark.long
def test_a_few_seconds_of_soak_on_real_servers(tmp_path: Path) -> None:
    shape = Shape(
        1.0, 0.7, 0.5, pause_s=0.02, prompts=1, churn=1, sample_s=0.2, fewest=40, tiny=True
    )
    soaked = soak(shape, tmp_path, lambda part, text: None)
    assert not soaked.report.faults and not soaked.report.told
    assert {"reads", "/v1/responses"} <= soaked.tally.asked.keys()
    names = {series.name for series in soaked.report.judged}
    assert {
        "one.anonymous",
        "one.tasks",
        "ranks.descriptors of rank 1",
        "one.hit rate",
        "first text, p99",
    } <= names
    assert "<svg" in (tmp_path / "soak.html").read_text()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert all(sample["one.descriptors"] > 5 and sample["one.tasks"] > 5 for sample in samples)
    assert samples[-1]["one.hit"] > 0


def noisy(slope: float, count: int, seed: int, level: float = 500.0) -> list[tuple[float, float]]:
    chance = Random(seed)
    return [
        (x / count, level + slope * x / count + chance.gauss(0, 1) + (50 if x % 9 == 4 else 0))
        for x in range(count)
    ]


class TestSlopes:
    @pytest.mark.parametrize("seed", range(20))
    def test_a_series_that_grows_is_told_from_one_that_does_not(self, seed: int) -> None:
        """Outliers, which move least squares, among them."""
        grows = theil_sen(noisy(20.0, 28, seed))
        assert grows.low < 20 < grows.high
        assert grows.verdict(0.01) == "grows"
        assert theil_sen(noisy(-20.0, 28, seed)).verdict(0.01) == "falls"
        assert theil_sen(noisy(0.0, 28, seed)).verdict(0.0) == "flat"

    def test_a_slope_below_the_tolerance_is_negligible(self) -> None:
        points = [(x / 10, 500 + x / 100) for x in range(30)]
        assert theil_sen(points).value == pytest.approx(0.1)
        assert theil_sen(points).verdict(0.01) == "negligible"
        assert theil_sen(points).verdict(0.0001) == "grows"

    def test_a_step_early_or_neighbours_that_resemble_each_other_are_less_certain(self) -> None:
        walk = [(float(x), float(x // 7 % 2) * 10) for x in range(28)]
        assert theil_sen(walk).verdict(0) in ("flat", "unknown")
        wide, narrow = (
            theil_sen(walk),
            theil_sen([(x, 10.0 * (i % 2)) for i, (x, _) in enumerate(walk)]),
        )
        assert wide.high - wide.low >= narrow.high - narrow.low

    def test_constant_and_short_series(self) -> None:
        assert theil_sen([(float(x), 7.0) for x in range(10)]).verdict(0) == "flat"
        assert theil_sen([(float(x), 7.0 * x) for x in range(7)]).verdict(0) == "unknown"
        assert theil_sen([]).verdict(0) == "unknown"


class TestJudging:
    @staticmethod
    def samples(growth: float) -> list[dict[str, float]]:
        return [
            {
                "at": 10.0 * n,
                "one.anonymous": 5e8 + growth * n + 1e6 * (n % 3),
                "one.hit": 5.0 * n,
                "one.queried": 10.0 * n,
            }
            for n in range(300)
        ]

    def test_memory_that_grows_fails_and_memory_that_does_not_holds(self) -> None:
        assert judge(self.samples(1e5), Tally(), 60).failed
        report = judge(self.samples(0), Tally(), 60)
        assert report.told and not report.failed
        rate = next(series for series in report.judged if series.name == "one.hit rate")
        assert rate.slope.level == pytest.approx(0.5) and rate.verdict == "flat"

    def test_a_rise_in_the_first_part_alone_is_no_growth(self) -> None:
        samples = self.samples(0)
        for sample in samples:
            sample["one.anonymous"] += 1e5 * min(sample["at"], 900.0)
        assert not judge(samples, Tally(), 60).failed

    def test_a_wrong_answer_an_error_a_restart_and_a_full_directory_fail_whatever_the_slopes_are(
        self,
    ) -> None:
        assert judge(self.samples(0), Tally(wrong=["x"]), 60).failed
        assert judge(self.samples(0), Tally(errors=["x"]), 60).failed
        for name, value in (("one.restarts", 1.0), ("one.disk_bytes", 1e8)):
            samples = self.samples(0)
            samples[7][name] = value
            assert judge(samples, Tally(), 60).faults

    def test_a_falling_hit_rate_fails(self) -> None:
        samples = self.samples(0)
        hits = 0.0
        for n, sample in enumerate(samples):
            hits += 9 - n / 100
            sample["one.hit"] = hits
        [failed] = [series for series in judge(samples, Tally(), 60).judged if series.failed]
        assert failed.name == "one.hit rate" and failed.kind == Kind("of 1", bad="falls")

    def test_counters_of_a_model_that_was_loaded_again(self) -> None:
        samples = [{"at": float(n), "x": value} for n, value in enumerate((3.0, 5.0, 1.0, 4.0))]
        assert [more for _, more in increments(samples, "x")] == [2, 1, 3]


class TestAnswers:
    def test_a_stream_and_a_whole_answer_are_one(self) -> None:
        whole: dict[str, Any] = {
            "choices": [{"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"}]
        }
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
            for text in "ab"
        ]
        events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        streamed = answer_of(Ask(CHAT, {"stream": True}), Heard(200, body))
        assert (
            streamed
            == answer_of(Ask(CHAT, {}), Heard(200, json.dumps(whole).encode()))
            == [["ab", "stop"]]
        )
        broken = body + b'data: {"error": {"code": "engine_stopped"}}\n\n'
        assert not equal(streamed, answer_of(Ask(CHAT, {"stream": True}), Heard(200, broken)))

    def test_numbers_may_differ_by_their_rounding_and_nothing_else_may(self) -> None:
        assert equal({"a": [1.0, "x"]}, {"a": [1.0004, "x"]})
        for other in ({"a": [1.01, "x"]}, {"a": [1.0, "y"]}, {"a": [1.0]}, {"b": [1.0, "x"]}):
            assert not equal({"a": [1.0, "x"]}, other)
