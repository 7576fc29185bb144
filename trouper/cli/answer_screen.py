"""An answer in a terminal: Markdown, words wrapped, drawn again while it arrives."""

from __future__ import annotations

import time
from itertools import pairwise
from types import TracebackType
from typing import ClassVar, Self

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Heading, Markdown
from rich.segment import Segment
from rich.text import Text

from trouper.cli.streamed_answer import StreamedText

REDRAW_S = 0.08  # Text arrives more often than anybody sees.
# HTML is text: rich would leave it out.
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


class LeftHeading(Heading):
    """A heading at the left, without rich's box."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class AnswerMarkdown(Markdown):
    """Markdown as models write it: a line's end is one, and addresses of links are shown."""

    elements: ClassVar = {**Markdown.elements, "heading_open": LeftHeading}

    def __init__(self, text: str) -> None:
        super().__init__(text, code_theme="ansi_dark", hyperlinks=False)
        self.parsed = PARSER.parse(text)
        for token in self.parsed:
            for inline in token.children or ():
                if inline.type == "softbreak":
                    inline.type = "hardbreak"


class Lines:
    """Lines without blanks at the ends, nor empty ones around. `are_few`: only the last ones, as
    many as a terminal has."""

    def __init__(self, content: RenderableType, *, are_few: bool = False) -> None:
        self._content = content
        self._are_few = are_few

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [*map(_stripped, console.render_lines(self._content, options, pad=False))]
        filled = [index for index, line in enumerate(lines) if line]
        if not filled:
            return
        lines = lines[filled[0] : filled[-1] + 1]
        for line in lines[-max(1, options.size.height - 1) :] if self._are_few else lines:
            yield from line
            yield Segment.line()


def _stripped(line: list[Segment]) -> list[Segment]:
    """Without blanks at the end, which would be copied along."""
    kept = [*line]
    while kept and not kept[-1].text.strip():
        kept.pop()
    if kept:
        text, style, control = kept[-1]
        kept[-1] = Segment(text.rstrip(), style, control)
    return kept


class AnswerScreen:
    """Shows the pieces of one answer. Blocks that have ended are printed once; the last one is
    drawn again as it grows. Leaving the context prints all that has come."""

    def __init__(self, console: Console | None = None, redraw_s: float = REDRAW_S) -> None:
        self._console = console or Console(highlight=False)
        self._redraw_s = redraw_s
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._kind = ""
        self._open = ""  # Text of the block that has not ended
        self._is_first = True
        self._drawn_at = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.update(Group(), refresh=True)
        self._live.stop()
        self._print(self._open)

    def write(self, piece: StreamedText) -> None:
        if piece.kind != self._kind:
            self._finish(self._open)
            self._open, self._kind = "", piece.kind
        self._open += piece.text
        if (now := time.perf_counter()) - self._drawn_at >= self._redraw_s:
            self._drawn_at = now
            self._draw()

    def _draw(self) -> None:
        if finished := _finished(self._open):
            self._finish(finished)
            self._open = self._open.removeprefix(finished)
        self._live.update(Lines(self._rendered(self._open), are_few=True), refresh=True)

    def _finish(self, text: str) -> None:
        self._live.update(Group(), refresh=True)  # Else it would stand below what is printed.
        self._print(text)

    def _print(self, text: str) -> None:
        for block in [text] if self._kind == "thinking" else _blocks(text):
            if block.strip():
                if not self._is_first:
                    self._console.print()
                self._is_first = False
                self._console.print(Lines(self._rendered(block)), end="")

    def _rendered(self, text: str) -> RenderableType:
        if self._kind == "thinking":
            return Text(text.strip("\n"), style="dim")
        return AnswerMarkdown(text)


def _blocks(text: str) -> list[str]:
    """The text of each block: a paragraph, a list, some code."""
    lines = text.splitlines(keepends=True)
    starts = [token.map[0] for token in PARSER.parse(text) if token.level == 0 and token.map]
    return ["".join(lines[start:end]) for start, end in pairwise([0, *starts[1:], len(lines)])]


def _finished(text: str) -> str:
    """The text of all blocks but the last, which may go on."""
    # The last line may become another block: `2` a list's item, by a dot.
    complete = text[: text.rfind("\n") + 1]
    blocks = _blocks(complete)
    return complete.removesuffix(blocks[-1]) if len(blocks) > 1 else ""
