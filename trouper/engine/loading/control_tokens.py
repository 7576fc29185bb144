"""Control tokens in the texts of clients."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import attrs
from mlx_lm.tokenizer_utils import TokenizerWrapper

from trouper.engine.loading.message_adaptation import Message
from trouper.engine.loading.output_format_detection import OutputFormat
from trouper.protocol.output_formats import ANSWERING, HARMONY, THINKING

BREAK = "\ud800"
ESCAPED_BREAK = r"\ud800"  # As `tojson(ensure_ascii=True)` and Python's `repr` write it.
LONGEST = 80  # Characters of a control token; the expressions nest as deeply.
EDGE = re.compile(r"[^\w\s]")
CORE = re.compile(r"\w.*\w|\w", re.DOTALL)
MARKER_BEGINNINGS = ("<|", "<｜")

# Punctuation that a template joins with a value.
JOINED = re.compile(r"""([^\w\s'"{]{1,4})(?:['"]\s*[~+]|\{\{)""")
NAMED = re.compile(r"""['".](\w++)""")  # A word that a template compares or looks up.
OPEN = r"\Z"
Trie = dict[str, Any]


# A break (`BREAK`) goes behind the first character of a control token's text in a message, and
# nobody else writes one: clients' texts hold no surrogates. A control token that covers a break in
# the rendered prompt is the client's, and is encoded as text. Without a break, nothing changes.
@attrs.frozen(eq=False)
class ControlTokens:
    """Special tokens, and added tokens that the chat template or the output format writes."""

    _flags: Mapping[str, Any]
    """Texts with their `AddedToken`."""
    _complete: re.Pattern[str]
    _begun: re.Pattern[str]
    """A control token, or the beginning of one at the end of a text."""
    _continued: re.Pattern[str] | None
    """The end of a control token at the beginning of a text. None unless the template writes
    beginnings, as in `<{{ name }}>`."""
    _kept: re.Pattern[str] | None
    """Markers of reasoning, for which templates search earlier answers."""

    @classmethod
    def of(cls, wrapped: TokenizerWrapper, formats: Iterable[OutputFormat]) -> ControlTokens | None:
        formats = [*formats]
        source = _source(wrapped)
        markers = frozenset().union(*(each.markers for each in formats))
        flags = {
            str(token): token
            for token in wrapped.added_tokens_decoder.values()
            if 2 <= len(str(token)) <= LONGEST
            and not str(token).isspace()
            and (token.special or _is_marker(str(token), source, markers))
        }
        if not flags:
            return None
        return cls(
            flags,
            compiled(flags),
            compiled(flags, {text: 1 for text in flags if _has_edges(text)}),
            _continuing(flags, source),
            _kept(formats, source),
        )

    @property
    def texts(self) -> frozenset[str]:
        return frozenset(self._flags)

    def break_message(self, message: Message) -> Message:
        answer = message["role"] == "assistant"
        return {
            name: value if name == "role" else self.break_up(value, answer and name == "content")
            for name, value in message.items()
        }

    def break_up(self, value: Any, answer: bool = False) -> Any:
        """Break control tokens in all texts of `value`, in names too. `answer`: reasoning markers
        stay."""
        if isinstance(value, str):
            return self._answer_broken(value) if answer else self._broken(value)
        if isinstance(value, Mapping):
            broken = {}
            for name, inner in value.items():
                broken[self.break_up(name)] = self.break_up(inner, answer)
            return broken
        if isinstance(value, list | tuple):
            return [self.break_up(inner, answer) for inner in value]
        return value

    def _answer_broken(self, text: str) -> str:
        if self._kept is None:
            return self._broken(text)
        pieces = self._kept.split(text)
        pieces[::2] = map(self._broken, pieces[::2])
        return "".join(pieces)

    def _broken(self, text: str) -> str:
        if self._begun.search(text) is not None:
            text = "".join(self._with_breaks(text))
        continued = self._continued is not None and self._continued.match(text) is not None
        return BREAK + text if continued else text

    def _with_breaks(self, text: str) -> Iterator[str]:
        at = 0
        while match := self._begun.search(text, at):
            behind = match.start() + 1
            yield text[at:behind] + BREAK
            at = behind
        yield text[at:]

    def spans(self, text: str) -> tuple[str, list[tuple[int, int]], list[int]]:
        """Return the text without breaks, the extents of the template's control tokens in it, and
        where the clients' begin."""
        pieces = text.split(BREAK)
        plain = "".join(pieces)
        breaks = [*accumulate(map(len, pieces[:-1]))]
        own: list[tuple[int, int]] = []
        clients: list[int] = []
        at = 0
        while match := self._complete.search(plain, at):
            start, end = match.span()
            following = bisect_right(breaks, start)
            if following < len(breaks) and breaks[following] < end:
                clients.append(start)
                at = start + 1
            else:
                start, at = self._widened(plain, match[0], start, end)
                own.append((start, at))
        return plain, own, clients

    def _widened(self, text: str, token: str, start: int, end: int) -> tuple[int, int]:
        """With the blanks that the tokenizer drops around the token."""
        flags = self._flags[token]
        while flags.lstrip and start and text[start - 1].isspace():
            start -= 1
        while flags.rstrip and end < len(text) and text[end].isspace():
            end += 1
        return start, end


def unescaped(rendered: str, inputs: object) -> str:
    """`rendered` with its escaped breaks, if the template's `inputs` hold any."""
    if ESCAPED_BREAK in rendered and _holds_break(inputs):
        return rendered.replace(ESCAPED_BREAK, BREAK)
    return rendered


def _holds_break(value: object) -> bool:
    inside = [value]
    while inside:
        value = inside.pop()
        if isinstance(value, str) and BREAK in value:
            return True
        if isinstance(value, Mapping):
            inside += (*value.keys(), *value.values())
        elif isinstance(value, list | tuple):
            inside += value
    return False


def _source(wrapped: TokenizerWrapper) -> str:
    templates = getattr(wrapped, "chat_template", None)
    return "\0".join(map(str, templates.values() if isinstance(templates, dict) else [templates]))


def _has_edges(text: str) -> bool:
    """Whether a text begins and ends with punctuation, as markers do."""
    return EDGE.match(text[0]) is not None and EDGE.match(text[-1]) is not None


def _is_marker(text: str, source: str, markers: frozenset[str]) -> bool:
    # Added tokens may be ordinary text, such as HTML's tags, which stay tokens.
    return _has_edges(text) and (
        text in source
        or text.startswith(MARKER_BEGINNINGS)
        or any(text in marker for marker in markers)
    )


def _kept(formats: Iterable[OutputFormat], source: str) -> re.Pattern[str] | None:
    """Markers of the formats, and those of others that the template's source has. `<|end|>` ends a
    message, too."""
    names = {each.reasoning_parser or "" for each in formats}
    kept = {text for name, texts in ANSWERING.items() if name in names for text in texts}
    for name, pair in THINKING.items():
        markers = {*pair} - {*THINKING[HARMONY]}
        if name in names or any(text in source for text in markers):
            kept |= markers
    return compiled(kept, frame="({})") if kept else None


def _continuing(texts: Iterable[str], source: str) -> re.Pattern[str] | None:
    # A word that the template itself knows, such as `function`, is none.
    begun, named = set(JOINED.findall(source)), set(NAMED.findall(source))
    endings: dict[str, int] = {}
    for text in filter(_has_edges, texts):
        core = CORE.search(text)
        if core is None or core[0] in named:
            continue
        if any(_meet(written, text[: core.start()]) for written in begun):
            endings[text[core.start() :]] = len(core[0])
    return compiled(endings, endings, r"[^\w\s]*+{}") if endings else None


def _meet(written: str, beginning: str) -> bool:
    return any(written.endswith(beginning[:length]) for length in range(1, len(beginning) + 1))


def compiled(
    texts: Iterable[str], open_from: Mapping[str, int] | None = None, frame: str = "{}"
) -> re.Pattern[str]:
    return re.compile(frame.format(_expression(texts, open_from) or "(?!)"))


def _expression(texts: Iterable[str], open_from: Mapping[str, int] | None) -> str:
    """Match the longest of some texts; of those in `open_from`, so many first characters at the end
    suffice."""
    # As a tree: an alternation of thousands of texts would be tried one after another.
    tree: Trie = {}
    for text in texts:
        node = tree
        for length, character in enumerate(text, 1):
            node = node.setdefault(character, {})
            if open_from is not None and open_from.get(text, LONGEST) <= length < len(text):
                node[OPEN] = {}
        node[""] = {}
    return _written(tree)


def _written(node: Trie) -> str:
    branches = [
        (name if name == OPEN else re.escape(name)) + _written(inner)
        for name, inner in sorted(node.items(), reverse=True)
    ]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
