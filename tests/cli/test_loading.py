"""What a terminal shows while a model is loaded."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from trouper.cli.server_process import shown
from trouper.protocol.loading import Loading, StageTimes


def terminal(width: int = 120, **how: bool | str) -> tuple[Console, StringIO]:
    written = StringIO()
    return Console(file=written, width=width, **how), written  # type: ignore[arg-type]


def test_a_terminal_shows_what_is_loaded_and_how_much_of_it() -> None:
    console, written = terminal(force_terminal=True)
    with shown(console) as watch:
        assert written.getvalue() == "", "the model hub may be showing bars of its own"
        watch(Loading("smollm", "loading the weights", 0, 200_000_000))
        watch(Loading("smollm", "loading the weights", 50_000_000, 200_000_000))
    said = written.getvalue()
    assert "smollm: loading the weights" in said
    assert "50.0/200.0 MB" in said
    assert said.endswith("\x1b[2K"), "and it is gone when the server is ready"
    watch(Loading("another", "loading the weights", 0, 1))
    assert written.getvalue() == said, "what is loaded later is nobody's waiting"


def test_a_stage_of_steps_counts_steps() -> None:
    console, written = terminal(force_terminal=True)
    with shown(console) as watch:
        watch(Loading("smollm", "checking what it does right", 3, 11, "steps"))
    assert "3/11" in written.getvalue()
    assert "bytes" not in written.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize(
    "model", ["/a/long/path/" * 9 + "smollm", "owner/smollm", "/models/[bold]smollm", "smollm" * 20]
)
def test_there_is_a_bar_in_any_width(width: int, model: str) -> None:
    """In one line; of a path the last part is shown."""
    console, written = terminal(width, force_terminal=True, color_system="standard")
    with shown(console) as watch:
        watch(Loading(model, "reading again for the cache's sake", 150_000_000, 200_000_000))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", written.getvalue())
    frames = [frame for frame in re.split(r"\x1b\[\S*?[A-Za-z]|[\r\n]", plain) if "MB" in frame]
    assert frames
    for frame in frames:
        assert len(frame) <= width
        assert "smollm" in frame and "/path" not in frame and "owner" not in frame
        assert "/200.0 MB" in frame
        assert frame.count("━") >= 6


def test_a_file_is_spared_the_bars() -> None:
    console, written = terminal()
    with shown(console) as watch:
        watch(Loading("smollm", "loading the weights", 50_000_000, 200_000_000))
    assert written.getvalue() == ""


def test_the_log_names_each_stage_once_where_there_is_no_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A service and a pipe, too, are silent for no minute."""
    caplog.set_level("INFO", "trouper")
    with shown(terminal(force_terminal=False)[0]) as watch:
        for done in (0, 50):
            watch(Loading("/models/smollm", "loading the weights", done, 100))
        watch(Loading("/models/smollm", "self-check, once for each model", 0, 12, "steps"))
    assert caplog.messages == [
        "smollm: loading the weights",
        "smollm: self-check, once for each model",
    ]


def test_the_log_says_what_each_stage_took() -> None:
    ticks, passed_on = iter([0.0, 2.0, 12.5, 20.0, 23.0]), list[Loading]()
    times = StageTimes(passed_on.append, ticks.__next__)
    for name, done in [("weights", 0), ("weights", 1), ("weights", 2), ("check", 0), ("check", 9)]:
        times(Loading("smollm", name, done, 9))
    assert str(times) == "weights 12.5 s, check 3.0 s"
    assert len(passed_on) == 5
