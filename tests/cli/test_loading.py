"""What a terminal shows while a model is loaded."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from trouper.cli.loading import shown
from trouper.protocol.loading import Loading


def terminal(**how: bool) -> tuple[Console, StringIO]:
    written = StringIO()
    return Console(file=written, width=120, **how), written  # type: ignore[arg-type]


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


def test_a_file_is_spared_the_bars() -> None:
    console, written = terminal()
    with shown(console) as watch:
        watch(Loading("smollm", "loading the weights", 50_000_000, 200_000_000))
    assert written.getvalue() == ""
