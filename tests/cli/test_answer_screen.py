"""What a terminal shows of an answer that arrives piece by piece."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from trouper.cli.answer_screen import AnswerScreen
from trouper.cli.streamed_answer import StreamedText

WIDTH, HEIGHT = 40, 12
SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\s\S])")


def lines_of(output: str) -> list[str]:
    """The lines of a terminal, which knows the moves that rich makes: up, and erasing a line."""
    lines, row, column = [""], 0, 0
    for match in SEQUENCE.finditer(output):
        number, move, character = match.groups()
        if character == "\n":
            row, column = row + 1, 0
        elif character == "\r":
            column = 0
        elif character:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + character + line[column + 1 :]
            column += 1
        elif move == "A":
            row -= int(number or 1)
        elif move == "K":
            lines[row] = ""
        else:
            assert move in "hlm", match[0]
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


def shown(*pieces: StreamedText) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=WIDTH, height=HEIGHT, highlight=False)
    with AnswerScreen(console, redraw_s=0) as screen:
        for piece in pieces:
            screen.write(piece)
    return file.getvalue()


def letters(text: str, kind: str = "content") -> list[StreamedText]:
    return [StreamedText(kind, letter) for letter in text]  # type: ignore[arg-type]


ANSWER = """Sure! **Bold** and `code`, <b>tags</b> stay,
and a line's end is one. Long lines are wrapped between their words.

## A heading

1. one

2. two
   - below

```python
def half(x):
    return x / 2
```

See [docs](https://example.org/x).
"""
SCREEN = """Sure! Bold and code, <b>tags</b> stay,
and a line's end is one. Long lines are
wrapped between their words.

A heading

 1 one
 2 two
    • below

 def half(x):
     return x / 2

See docs (https://example.org/x).
"""


def test_markdown_is_drawn_as_it_arrives_and_nothing_of_it_stays_twice() -> None:
    assert "\n".join(lines_of(shown(*letters(ANSWER)))) == SCREEN
    assert "\n".join(lines_of(shown(StreamedText("content", ANSWER)))) == SCREEN


def test_bold_text_code_and_headings_have_styles() -> None:
    output = shown(StreamedText("content", ANSWER))
    assert re.search(r"\x1b\[1mBold\x1b\[0m", output)
    assert re.search(r"\x1b\[1;[\d;]+mcode\x1b\[0m", output)
    assert "\x1b]8;" not in output, "an address that is shown, not a link behind other text"


def test_thinking_is_dim_and_apart_from_the_answer() -> None:
    output = shown(*letters("Hm.\nWell, ", "thinking"), *letters("**Yes.**"))
    assert lines_of(output) == ["Hm.", "Well,", "", "Yes.", ""]
    assert "\x1b[2mHm." in output


def test_a_block_that_is_higher_than_the_terminal_is_complete_at_the_end() -> None:
    code = "\n".join(f"line {number}" for number in range(3 * HEIGHT))
    answer = f"```\n{code}\n```\nThat is all.\n"
    lines = lines_of(shown(*letters(answer)))
    assert [line.strip() for line in lines] == [*code.split("\n"), "", "That is all.", ""]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_answer_without_text_prints_nothing(text: str) -> None:
    assert lines_of(shown(*letters(text))) == [""]


def test_what_has_come_is_printed_when_it_is_stopped() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=WIDTH, height=HEIGHT)

    def stop() -> None:
        with AnswerScreen(console, redraw_s=1e9) as screen:
            for piece in letters("# Half\n\nan ans"):
                screen.write(piece)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert lines_of(file.getvalue()) == ["Half", "", "an ans", ""]
