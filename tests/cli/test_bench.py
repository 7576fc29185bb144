"""`trouper bench`: the figures are those of the streams, and the page needs nothing else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import httpx2
import pytest
import trio
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeEngine
from tests.web.serving import pace, serving
from trouper import cli
from trouper.cli.exits import USAGE_ERROR
from trouper.protocol.plans import Plan
from trouper_lab import load
from trouper_lab.bench import COLUMNS, Report, as_html, as_json, prefix_line
from trouper_lab.load import PrefixFigures, Question, Stream, load_of, percentiles
from trouper_lab.reports import draw_bars, draw_lines, from_zero


def stream(sent: float, *times: float, tokens: int | None = None) -> Stream:
    return Stream(sent, list(times), tokens or len(times), 10)


ROUNDS = [
    [stream(0.0, 1.0, 2.0, 3.0), stream(0.5, 2.0, 3.0, 5.0)],
    [stream(10.0, 11.0, 12.0, 13.0), stream(10.0, 11.0, 12.0, 13.0)],
    [stream(20.0, 22.0, 23.0, 24.0), stream(20.0, 22.0, 23.0, 24.0)],
]


def test_figures_of_streams_whose_figures_are_known() -> None:
    found = load_of(ROUNDS)
    assert (found.streams, found.rounds, found.tokens, found.prompt_tokens) == (2, 3, 18, 10)
    assert found.tokens_per_s == 1.5, "of 6 tokens in 5, 3 and 4 seconds"
    assert found.decode_tokens_per_s == 2.0, "all decode from 2 to 3, 11 to 13, 22 to 24"
    assert found.per_stream_tokens_per_s == 1.0
    assert (found.ttft_s[0], found.ttft_s[50], found.ttft_s[100]) == (1.0, 1.0, 2.0)
    assert (found.gap_s[0], found.gap_s[50], found.gap_s[100]) == (1.0, 1.0, 2.0)


def test_pieces_of_several_tokens_and_streams_that_never_overlap() -> None:
    assert load_of([[stream(0.0, 1.0, 2.0, tokens=8)]]).decode_tokens_per_s == 4.0
    apart = load_of([[stream(0.0, 1.0, 2.0), stream(0.0, 3.0, 4.0)]])
    assert apart.decode_tokens_per_s == 0.0
    assert load_of([[stream(0.0, 1.0, tokens=1)]]).gap_s == {}


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_values_that_occurred(values: list[float]) -> None:
    found = percentiles(values)
    assert set(found.values()) <= set(values)
    assert (found[0], found[100]) == (min(values), max(values))
    assert list(found.values()) == sorted(found.values())


@given(st.floats(1e-9, 1e12))
def test_an_axis_holds_the_highest_value_at_round_marks(highest: float) -> None:
    axis = from_zero(highest, "")
    assert 2 <= len(axis.marks) <= 7
    assert axis.high / highest >= 0.99 and axis.marks[-2] <= highest * 1.01
    assert re.fullmatch(r"[125]e[+-]\d+", f"{axis.marks[1]:.0e}")


def report(prefix: bool = True) -> Report:
    loads = [
        load_of([[stream(0.0, *(1.0 + k / n for k in range(5))) for _ in range(n)]])
        for n in (1, 2, 4)
    ]
    known = PrefixFigures(
        prompt_tokens=500, cold_s=2.0, again_s=0.1, extended_s=0.2, short_s=0.05, cached_tokens=499
    )
    return Report(
        about={"model": "<script>alert(1)</script>"}, loads=loads, prefix=known if prefix else None
    )


def test_the_page_is_whole_and_asks_nobody_for_anything() -> None:
    text = as_html(report())
    assert not re.search(r"(src|href|url\(|@import|<link|<script)", text)
    assert "&lt;script&gt;alert(1)" in text
    figures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(figures) == 4
    for figure in figures:
        assert figure.get("role") == "img" and figure.get("aria-label")
    assert len(figures[0].findall("polyline")) == 3
    assert text.count("<tr>") == 4 and all(f"<th>{column}</th>" in text for column in COLUMNS)
    assert len(re.findall("<svg", as_html(report(prefix=False)))) == 3


def test_higher_is_further_up() -> None:
    svg = ET.fromstring(
        re.findall(r"<svg.*?</svg>", draw_lines("t", {"a": [(1, 1), (2, 4)]}, "x", "y"), re.DOTALL)[
            0
        ]
    )
    [line] = svg.findall("polyline")
    (x1, y1), (x2, y2) = (
        [float(part) for part in place.split(",")] for place in str(line.get("points")).split()
    )
    assert x1 < x2 and y1 > y2
    svg = ET.fromstring(
        re.findall(r"<svg.*?</svg>", draw_bars("t", {"a": 1, "b": 2}, "y"), re.DOTALL)[0]
    )
    low, high = (float(str(bar.get("height"))) for bar in svg.findall("rect"))
    assert high == pytest.approx(2 * low, abs=0.2)


def test_json_has_every_figure() -> None:
    kept = json.loads(as_json(report()))
    assert [load["streams"] for load in kept["loads"]] == [1, 2, 4]
    assert kept["loads"][0]["ttft_s"]["50"] == 1.0
    assert kept["prefix"]["again_s"] == 0.1
    assert "499 tokens cached" in prefix_line(report().prefix)  # type: ignore[arg-type]


async def bench(*arguments: str) -> Result:
    return await trio.to_thread.run_sync(
        lambda: CliRunner().invoke(cli.main, ["bench", *arguments])
    )


async def test_what_comes_at_once_is_one_moment() -> None:
    """As with drafts that were right: a reader sees one pause, not three of which two last no
    time."""
    events = [{"choices": [{"text": "a"}]}] * 3 + [
        {"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9}}
    ]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)

    async def sent() -> AsyncIterator[bytes]:
        yield body.encode()

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert json.loads(request.content)["speculation"] == "off"
        return httpx2.Response(200, content=sent())

    stream = Stream()
    async with httpx2.AsyncClient(
        transport=httpx2.MockTransport(answer), base_url="http://x"
    ) as client:
        await load._ask(client, Question("hm?", 3), stream)
    assert (len(stream.times), stream.tokens, stream.gaps_s) == (1, 3, [])


async def test_a_server_is_measured_and_nothing_that_was_cached_helps(tmp_path: Path) -> None:
    widths: list[int] = []

    async def seen(plan: Plan) -> None:
        widths.append(len(plan.decode))
        await pace(plan)

    flags = (
        "--streams",
        "3,1",
        "--tokens",
        "12",
        "--rounds",
        "2",
        "--long-words",
        "40",
        "--prompt-words",
        "3",
    )
    async with serving(FakeEngine(before_step=seen)) as served:
        for run in range(2):
            outcome = await bench(
                "--url", served.base_url, *flags, "--out", str(tmp_path / f"run{run}")
            )
            assert outcome.exit_code == 0, outcome.output
        facts = served.runtime.health().scheduler
        url = served.base_url.removesuffix("/v1")
    assert max(widths) == 3
    each = 2 * (3 + 1) + (3 + 1) + 2 * 4
    assert (facts.total_requests, facts.requests_completed) == (2 * each, 2 * each)
    kept: dict[str, Any] = json.loads((tmp_path / "run1.json").read_text())
    assert kept["about"]["model"] == "fake" and kept["about"]["server"].endswith(url)
    assert [(load["streams"], load["tokens"]) for load in kept["loads"]] == [(1, 24), (3, 72)]
    prefix = kept["prefix"]
    assert 0 <= prefix["prompt_tokens"] - prefix["cached_tokens"] <= 2, (
        "all but the last, each median rounded"
    )
    both = [
        json.loads((tmp_path / f"run{run}.json").read_text())["prefix"]["prompt_tokens"]
        for run in range(2)
    ]
    assert facts.total_cached_tokens <= 2 * 2 * sum(both) + 8, (
        "only what was asked again and extended, twice each"
    )
    assert "</html>" in (tmp_path / "run1.html").read_text()
    assert [line.split()[0] for line in outcome.stdout.splitlines()[:3]] == ["streams", "1", "3"]


def test_what_was_measured_before_stays_until_there_is_more(tmp_path: Path) -> None:
    arguments = ["bench", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "x")]
    (tmp_path / "x.json").write_text("before")
    (tmp_path / "x.html").mkdir()
    outcome = CliRunner().invoke(cli.main, arguments)
    assert (outcome.exit_code, "x.html: Is a directory" in outcome.stderr) == (USAGE_ERROR, True)
    (tmp_path / "x.html").rmdir()
    outcome = CliRunner().invoke(cli.main, arguments)
    assert "no server answers" in outcome.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", "before")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--long-words", "8000"), "maximum context length is 32768 tokens (--max-prompt-tokens)"),
        (("--streams", "1,x"), "no list of numbers"),
        (("--streams", "0"), "fewer than one"),
        (("--out", "/none/at/all"), "there is no directory /none/at"),
        (("--out", ""), "it is empty"),
        (("--out", "/none/"), "there is no directory /none"),
        (("--out", "/proc/"), "/proc/trouper-bench.json: "),
        (("--out", "/proc/x"), "/proc/x.json: "),
        (("--out", "x" * 300), "x.json: File name too long"),
    ],
)
async def test_what_cannot_be_measured_is_said(
    flags: Sequence[str], said: str, tmp_path: Path
) -> None:
    async with serving(settings={"max_prompt_tokens": 32768}) as served:
        options = (
            "--url",
            served.base_url,
            "--streams",
            "1",
            "--rounds",
            "1",
            "--out",
            str(tmp_path / "x"),
            *flags,
        )
        outcome = await bench(*options)
    assert outcome.exit_code == USAGE_ERROR
    assert "--out" not in flags or not served.engine.plans_seen, "before it measures"
    assert said in outcome.stderr
    # Its other name is one that async functions must not use
    assert os.listdir(tmp_path) == []  # noqa: PTH208
