"""The part of docs/architectures.md on mlx-vlm's text modules, made of what was played."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.zoo.vlm_playing import Played
from trouper.engine.architectures import vlm_models

HEADING = "## Text modules of mlx-vlm"
Chosen = Callable[[Played], bool]


def section(played: Sequence[Played]) -> str:
    """Names in groups, in the order of the alphabet."""
    rows = [
        f"| {title} | {names} |"
        for title, chosen in GROUPS.items()
        if (names := _names(filter(chosen, played)))
    ]
    return TEXT.format(
        version=vlm_models.version(),
        modules=len(played),
        ran=sum(not one.refused for one in played),
        batched=sum(one.is_batched for one in played),
        worst=max(error for one in played for error in one.errors),
        rows="\n".join(rows),
    )


def _names(played: Iterable[Played]) -> str:
    """Modules, and the reason behind those that share it."""
    by_reason = dict[str, list[str]]()
    for one in sorted(played, key=lambda one: one.name):
        by_reason.setdefault(one.reason, []).append(f"`{one.name}`")
    cells = [
        f"{', '.join(names)}: {reason}" if reason else ", ".join(names)
        for reason, names in by_reason.items()
    ]
    return "; ".join(cells)


def group_of(played: Played) -> str:
    """Its group's title."""
    return next(title for title, chosen in GROUPS.items() if chosen(played))


def _all_but(*features: str) -> Chosen:
    def chosen(played: Played) -> bool:
        return not played.refused and {*played.capabilities.off} == {*features}

    return chosen


GROUPS: dict[str, Chosen] = {
    "everything": _all_but(),
    "prompts one by one: recurrent state": _all_but("prefill_together"),
    "no banks: they compute with keys": _all_but("banks"),
    "prompts one by one, and no banks": _all_but("prefill_together", "banks"),
    "other features off": lambda played: played.is_batched,
    "one by one": lambda played: not played.refused,
    "refused": lambda played: bool(played.refused),
}
"""By what the self-check leaves of a module's features; the first that holds."""

TEXT = (
    HEADING
    + """

{modules} modules of mlx-vlm {version} are not in mlx-lm. Each is played in tiny form with what
[the self-check](self-check.md) leaves of it: {ran} run, all of them right
(off by at most {worst:.0e}), and {batched} of these are batched. Real weights were not tried.

| rows | modules |
|---|---|
{rows}
"""
)
