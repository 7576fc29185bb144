"""docs/architectures.md, made of what was played."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import attrs

from tests.zoo.catalogue import BY_PIECES, CONFIGS, LEFT_OUT, module_of
from tests.zoo.mixes import BOUND
from tests.zoo.playing import Play
from trouper.engine.adaptations.adaptation_registry import adapted

PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
HEAD = "| rows decode | prompts prefill | drafts, blocks | banks | configs |\n|---|---|---|---|---|"


@attrs.frozen
class Line:
    """How the engine runs a config."""

    name: str
    together: bool
    prefill_together: bool
    drafts: bool
    restores: bool
    banks: bool
    notes: tuple[str, ...]

    @classmethod
    def of(cls, name: str, play: Play) -> Line:
        """What the engine says of a model that it was given."""
        found = adapted(play.model)
        return cls(
            name,
            together=play.together,
            prefill_together=play.prefills_together,
            drafts=play.drafts,
            restores=play.can_restore,
            banks=play.banks,
            notes=tuple(found.names) if play.together else (play.reason,),
        )

    @property
    def module(self) -> str:
        return module_of(CONFIGS[self.name])

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(self.ways)}; {'; '.join(self.notes)}"

    @property
    def ways(self) -> tuple[str, ...]:
        """The cells by which configs are grouped."""
        assert self.drafts == self.restores, f"{self.name}: the table has one column for both"
        return (
            _how(together=self.together),
            _how(together=self.prefill_together),
            _yes(self.drafts),
            _yes(self.banks),
        )


def _how(*, together: bool) -> str:
    return "together" if together else "one by one"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _own(name: str) -> list[str]:
    return (
        [f"in mlx-lm the answer depends on the pieces of the prompt: {BY_PIECES[name]}"]
        if name in BY_PIECES
        else []
    )


def figures(lines: Sequence[Line]) -> str:
    """Counts of modules; those that mlx-lm itself runs wrongly are not among those that should be
    batched."""
    ran = {line.module for line in lines}
    alone = {line.module for line in lines if not line.together}
    right = ran - {"phi3small"}
    batched = right - alone
    banked = {line.module for line in lines if line.banks}
    return (
        f"{len(lines)} configs of {len(ran)} modules were played, all of them right. Of the {len(right)} modules that mlx-lm's own "
        f"loop runs right on a CPU, {len(batched)} are batched ({len(batched) / len(right):.1%}), the others run row by row. {len(banked)} keep long "
        f"rows out of short rows' buffers ([banks](long-contexts.md))."
    )


def page(lines: Iterable[Line], vlm: str) -> str:
    """The whole page. `vlm`: the section on mlx-vlm's modules."""
    ordered = sorted(
        lines, key=lambda line: (line.module.lower(), line.name != line.module, line.name)
    )
    left_out = "\n".join(f"| `{name}` | {why} |" for name, why in LEFT_OUT.items())
    return TEXT.format(
        figures=figures(ordered),
        table=grouped(ordered),
        notes=noted(ordered),
        left_out=left_out,
        bound=BOUND,
        vlm=vlm,
    )


def grouped(lines: Sequence[Line]) -> str:
    """One row for each way in which configs run, the commonest first."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for line in lines:
        groups[line.ways].append(line.name)
    rows = (
        f"| {' | '.join(ways)} | {', '.join(map(_code, groups[ways]))} |"
        for ways in sorted(groups, key=lambda ways: -len(groups[ways]))
    )
    return "\n".join([HEAD, *rows])


def noted(lines: Sequence[Line]) -> str:
    """One row for each adaptation or reason, with the configs that have it."""
    groups: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        for note in [*line.notes, *_own(line.name)]:
            groups[note].append(line.name)
    return "\n".join(
        f"| {note} | {', '.join(map(_code, names))} |" for note, names in groups.items()
    )


def states(text: str, line: Line) -> bool:
    """Whether the page has the config among those that run so, and under each of its notes."""
    starts = [" | ".join(line.ways), *line.notes, *_own(line.name)]
    listed = {
        start: name.strip(" |")
        for start in starts
        for row in text.splitlines()
        if row.startswith(f"| {start} | ")
        for name in row.removeprefix(f"| {start} | ").split(", ")
        if name.strip(" |") == _code(line.name)
    }
    return list(listed) == starts


def _code(name: str) -> str:
    """The module as code, what differs from its usual config in words."""
    module, _, variant = name.partition(" ")
    return f"`{module}` {variant}".rstrip()


TEXT = """# Architectures

How rows of each architecture share the engine. `just zoo` makes this page: it builds a tiny random model of every config in `tests/zoo`, plays
rows of different lengths on it, and compares log-probabilities with mlx-lm's own loop over the same tokens in the same pieces.

{figures}

What is played: one row alone; rows of four lengths that prefill in one pass, decode together, join and leave; rows restored from blocks; drafts that
are right, wrong and right in part. A difference of {bound} in a log-probability counts as wrong; right ones differ by at most 3e-4.

## Every module

{table}

A config without further words is the module's usual one. "One by one" under *prompts prefill*: recurrent state would take the padding in. Such rows
draft: what a draft has added to a state is [taken back](speculation.md#recurrent-state).

## Adapted, and why one by one

Some models need something of caches, masks or offsets that others do not (`trouper/engine/adaptations/adaptation_registry.py`). Tests play the
same without it, and each must fail then; only the layout of experts with biases matters on CUDA alone.

| what | configs |
|---|---|
{notes}

{vlm}
## Left out

Modules that mlx-lm itself does not run on a CPU, and those that are no model of their own:

| module | why |
|---|---|
{left_out}
"""
