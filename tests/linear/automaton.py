"""Whether a regular expression can backtrack more than a bounded number of times for each
character.

The expression becomes an automaton without empty steps (Glushkov's). A text that is refused makes
`re` try every path of the automaton, and the paths are as many as in proportion to the text if and
only if no two loops can read the same text one after the other, and none reads it in two ways
(Weber and Seidl, "On the degree of ambiguity of finite automata", 1991, criteria IDA and EDA).

Lookarounds count as if they held, so the answer errs on the safe side. Possessive repetitions of
one character are taken as they are. `re._parser` and `re._constants` are private: only this test
reads the structure of expressions, and nothing public gives it.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from itertools import product
from re import _constants as sre
from re import _parser
from typing import Any, Literal

import attrs

Use = Literal["match", "fullmatch", "search"]
Chars = frozenset[str]
ASCII, DOTALL, IGNORECASE, MULTILINE = (
    int(re.ASCII),
    int(re.DOTALL),
    int(re.IGNORECASE),
    int(re.MULTILINE),
)
EXPANDED = 8
"""Repetitions up to this number are written out; more are taken for any number."""
CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
SAMPLES = [
    *map(chr, range(0x80)),
    "\x85",
    "\xa0",
    "\xb2",
    "\xe9",
    "\u017f",
    "\u0660",
    "\u2028",
    "\u3000",
    "\u4e00",
    "\uff5c",
    "\ud800",
    "\udc00",
    "\U0001f600",
]


class TooHard(Exception):
    """The expression has a part that is not judged: a reference to a group, or a loop in a
    lookaround."""


@attrs.frozen
class Way:
    """A way into, out of or through a part. `not_next`: what the next character is not, since a
    possessive repetition would have taken it. `sure`: whether no assertion is on the way."""

    at: int = -1
    not_next: Chars = frozenset()
    sure: bool = True

    def then(self, other: Way, at: int) -> Way:
        return Way(at, self.not_next | other.not_next, self.sure and other.sure)


@attrs.frozen
class Part:
    """A part of an expression: its first and last characters, and ways through it without any."""

    firsts: tuple[Way, ...] = ()
    lasts: tuple[Way, ...] = ()
    empty: tuple[Way, ...] = ()


NOTHING = Part(empty=(Way(),))


class Automaton:
    """The positions of an expression, and the characters with which one follows another."""

    def __init__(self, pattern: str | bytes, flags: int, use: Use) -> None:
        tree = _parser.parse(pattern, flags)
        self._flags = int(tree.state.flags)
        self._singles: dict[tuple[str, str, int], Chars] = {}
        self._alphabet = sorted({*SAMPLES, *(chr(code) for code in _codes(tree))})
        self._numbers = {char: number for number, char in enumerate(self._alphabet)}
        self._chars: list[Chars] = []
        self.edges: dict[int, list[tuple[int, int]]] = defaultdict(list)
        whole = self._sequence([*tree], self._flags)
        self._start = self._position(frozenset())
        if use == "search":
            whole = self._joined(self._anywhere([*tree]), whole)
        for way in whole.firsts:
            self._edge(Way(self._start), way)
        self.accepting = (
            set() if use == "fullmatch" else {way.at for way in whole.lasts if way.sure}
        )
        if use != "fullmatch" and any(way.sure for way in whole.empty):
            self.accepting.add(self._start)

    def _anywhere(self, items: list[Any]) -> Part:
        """Return what may be in front of a match."""
        every = self._loop(self._one(frozenset(self._alphabet)))
        match items[:1]:
            case [(sre.AT, sre.AT_BEGINNING)] if self._flags & MULTILINE:
                return self._either([NOTHING, self._joined(every, self._one(frozenset("\n")))])
            case [(sre.AT, sre.AT_BEGINNING | sre.AT_BEGINNING_STRING)]:
                return NOTHING
            case [(sre.ASSERT_NOT, (-1, inner))] if (
                single := self._single([*inner], self._flags)
            ) is not None:
                before = self._one(frozenset(self._alphabet) - single)
                return self._either([NOTHING, self._joined(every, before)])
        return every

    # -- from the parsed expression to the automaton ----------------------------------------------

    def _position(self, chars: Chars) -> int:
        self._chars.append(chars)
        return len(self._chars) - 1

    def _one(self, chars: Chars) -> Part:
        way = Way(self._position(chars))
        return Part((way,), (way,))

    def _edge(self, last: Way, first: Way) -> None:
        if chars := self._chars[first.at] - last.not_next - first.not_next:
            bits = sum(1 << self._numbers[char] for char in chars)
            self.edges[last.at].append((first.at, bits))

    def _joined(self, left: Part, right: Part) -> Part:
        for last, first in product(left.lasts, right.firsts):
            self._edge(last, first)
        return Part(
            left.firsts
            + tuple(empty.then(first, first.at) for empty in left.empty for first in right.firsts),
            right.lasts
            + tuple(last.then(empty, last.at) for last in left.lasts for empty in right.empty),
            tuple(a.then(b, -1) for a in left.empty for b in right.empty),
        )

    @staticmethod
    def _either(parts: Iterable[Part]) -> Part:
        parts = [*parts]
        return Part(
            *(
                sum((getattr(part, name) for part in parts), ())
                for name in ("firsts", "lasts", "empty")
            )
        )

    def _loop(self, part: Part) -> Part:
        """Any number of repetitions, also none."""
        for last, first in product(part.lasts, part.firsts):
            self._edge(last, first)
        return Part(part.firsts, part.lasts, (Way(), *part.empty))

    def _sequence(self, items: Iterable[Any], flags: int) -> Part:
        return reduce(self._joined, (self._part(op, av, flags) for op, av in items), NOTHING)

    # One for each kind of part.
    def _part(self, op: Any, av: Any, flags: int) -> Part:  # noqa: PLR0911
        if (chars := self._single([(op, av)], flags)) is not None:
            return self._one(chars)
        match op, av:
            case sre.BRANCH, (_, branches):
                return self._either(self._sequence(branch, flags) for branch in branches)
            case sre.SUBPATTERN, (_, added, removed, inner):
                return self._sequence(inner, (flags | added) & ~removed)
            case sre.ATOMIC_GROUP, inner:
                return self._sequence(inner, flags)
            case ((sre.MAX_REPEAT | sre.MIN_REPEAT), (low, high, inner)):
                return self._repeated(lambda: self._sequence(inner, flags), low, high)
            case sre.POSSESSIVE_REPEAT, (low, high, inner):
                return self._possessive([*inner], low, high, flags)
            case sre.AT, _:
                return Part(empty=(Way(sure=False),))
            case sre.FAILURE, _:  # `(?!)` from Python 3.13 on
                return Part()
            case ((sre.ASSERT | sre.ASSERT_NOT), (_, inner)):
                if _loops(inner):
                    raise TooHard("a loop in a lookaround")
                return Part(empty=(Way(sure=False),))
        raise TooHard(str(op))

    def _repeated(self, make: Callable[[], Part], low: int, high: Any) -> Part:
        if high is sre.MAXREPEAT or high > EXPANDED:
            if low > 2 and make().empty:
                raise TooHard("many repetitions of what may be nothing")
            return reduce(
                self._joined, [make() for _ in range(min(low, 2))] + [self._loop(make())], NOTHING
            )
        rest = NOTHING
        for _ in range(high - low):
            rest = self._either([self._joined(make(), rest), NOTHING])
        return reduce(self._joined, [make() for _ in range(low)] + [rest], NOTHING)

    def _possessive(self, inner: list[Any], low: int, high: Any, flags: int) -> Part:
        single = self._single(inner, flags)
        part = self._repeated(lambda: self._sequence(inner, flags), low, high)
        if single is None:
            return part
        unbounded = high is sre.MAXREPEAT
        lasts = tuple(Way(way.at, single) for way in part.lasts) if unbounded else part.lasts
        return Part(part.firsts, lasts, (Way(not_next=single),) if low == 0 else ())

    def _single(self, items: list[Any], flags: int) -> Chars | None:
        """Return the characters of a part that is one character; None for any other."""
        match items:
            case [(sre.SUBPATTERN, (_, added, removed, inner))]:
                return self._single([*inner], (flags | added) & ~removed)
            case [(sre.LITERAL | sre.NOT_LITERAL | sre.ANY | sre.IN as op, av)]:
                key = str(op), str(av), flags
                if key not in self._singles:
                    self._singles[key] = frozenset(
                        char for char in self._alphabet if _reads(op, av, char, flags)
                    )
                return self._singles[key]
        return None

    # -- what makes it more than linear -----------------------------------------------------------

    def faults(self) -> list[str]:
        """Say where the paths are more than in proportion to the text."""
        reached = {p: self._reached(p) for p in range(len(self._chars))}
        cyclic = [p for p in reached if p in reached[p]]
        found = [
            f"{_shown(self._chars[p])} is read in two ways, exponential"
            for p in cyclic
            if self._two_ways(p, reached)
        ]
        for p, q in product(cyclic, cyclic):
            if (
                p != q
                and q not in self.accepting
                and q in reached[p]
                and self._one_after_other(p, q, reached)
            ):
                found.append(
                    f"{_shown(self._chars[p])} and {_shown(self._chars[q])} read the same, "
                    "polynomial"
                )
        return found

    def _reached(self, begin: int) -> set[int]:
        seen, waiting = set[int](), deque([begin])
        while waiting:
            for follower, _ in self.edges[waiting.popleft()]:
                if follower not in seen:
                    seen.add(follower)
                    waiting.append(follower)
        return seen

    def _two_ways(self, q: int, reached: Mapping[int, set[int]]) -> bool:
        """Whether two paths lead from `q` to `q` with the same text, and not both would be accepted
        on the way."""
        back = {p for p in reached[q] if q in reached[p]}
        seen, waiting = set[tuple[int, int, bool]](), deque([(q, q, False)])
        while waiting:
            a, b, apart = waiting.popleft()
            for (i, (c, with_c)), (j, (d, with_d)) in product(
                enumerate(self.edges[a]), enumerate(self.edges[b])
            ):
                further = apart or (a, i) != (b, j)
                state = (c, d, further)
                if (
                    state in seen
                    or not with_c & with_d
                    or c not in back
                    or d not in back
                    or (further and {c, d} <= self.accepting)
                ):
                    continue
                if further and c == d == q:
                    return True
                seen.add(state)
                waiting.append(state)
        return False

    def _one_after_other(self, p: int, q: int, reached: Mapping[int, set[int]]) -> bool:
        """Whether a text leads from `p` to `p`, from `p` to `q`, and from `q` to `q`."""
        barred = self.accepting - {p}
        seen, waiting = set[tuple[int, int, int]](), deque([(p, p, q)])
        while waiting:
            x, y, z = waiting.popleft()
            for (a, with_a), (c, with_c) in product(self.edges[x], self.edges[z]):
                if (
                    not (both := with_a & with_c)
                    or p not in reached[a]
                    or q not in reached[c]
                    or c in barred
                ):
                    continue
                for b, with_b in self.edges[y]:
                    if not both & with_b or q not in reached[b] or b in barred:
                        continue
                    if (a, b, c) == (p, q, q):
                        return True
                    if (a, b, c) not in seen:
                        seen.add((a, b, c))
                        waiting.append((a, b, c))
        return False


def _reads(op: Any, av: Any, char: str, flags: int) -> bool:
    cases = {char, char.lower(), char.upper()} if flags & IGNORECASE else {char}
    codes = {ord(case) for case in cases if len(case) == 1}
    match op:
        case sre.LITERAL:
            return av in codes
        case sre.NOT_LITERAL:
            return av not in codes
        case sre.ANY:
            return char != "\n" or bool(flags & DOTALL)
    negated = av[0][0] is sre.NEGATE
    return negated != any(_in_class(item, codes, flags) for item in av[negated:])


def _in_class(item: Any, codes: set[int], flags: int) -> bool:
    match item:
        case sre.LITERAL, code:
            return code in codes
        case sre.RANGE, (low, high):
            return any(low <= code <= high for code in codes)
        case sre.CATEGORY, category:
            return any(re.match(CATEGORIES[category], chr(code), flags & ASCII) for code in codes)
    raise TooHard(str(item))


def _codes(tree: Any) -> Iterable[int]:
    """Yield the characters that are named, and their neighbours."""
    if isinstance(tree, int) and not isinstance(tree, type(sre.LITERAL)) and 0 <= tree < 0x10FFFF:
        yield from (max(tree - 1, 0), tree, tree + 1)
    elif isinstance(tree, list | tuple | _parser.SubPattern):
        for inner in tree:
            yield from _codes(inner)


def _loops(tree: Any) -> bool:
    if (
        isinstance(tree, tuple)
        and len(tree) == 2
        and tree[0] in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT)
    ):
        return tree[1][1] is sre.MAXREPEAT or _loops(tree[1][2])
    return isinstance(tree, list | tuple | _parser.SubPattern) and any(map(_loops, tree))


def _shown(chars: Chars) -> str:
    return ascii("".join(sorted(chars))[:12])


def faults_of(pattern: str | bytes, flags: int, use: Use) -> list[str]:
    """Return why an expression is not linear; nothing if it is."""
    try:
        return Automaton(pattern, flags, use).faults()
    except TooHard as hard:
        return [f"not judged: {hard}"]
