"""The part of docs/architectures.md on mlx-vlm's text modules, made of what was played."""

from __future__ import annotations

from collections.abc import Sequence

from tests.zoo.vlm_playing import Played
from trouper.engine.architectures import vlm_models

HEADING = "## Text modules of mlx-vlm"
ALL, ALONE, REFUSED = "everything", "one by one", "refused"
WITHOUT = {
    "prefill_together": "prompts one by one",
    "restore": "nothing restored",
    "drafts": "no drafts",
    "banks": "no banks",
}


def section(played: Sequence[Played]) -> str:
    """Names in groups, those with most features first."""
    groups = dict[str, list[Played]]()
    for one in played:
        groups.setdefault(group_of(one), []).append(one)
    titles = sorted(groups, key=lambda title: (title in (ALONE, REFUSED), title != ALL, title))
    return TEXT.format(
        version=vlm_models.version(),
        modules=len(played),
        ran=sum(not one.refused for one in played),
        batched=sum(one.is_batched for one in played),
        worst=max(error for one in played for error in one.errors),
        rows="\n".join(f"| {title} | {_names(groups[title])} |" for title in titles),
    )


def group_of(played: Played) -> str:
    """Its group's title: what the self-check leaves of a module's features."""
    if not played.is_batched:
        return REFUSED if played.refused else ALONE
    return ", ".join(WITHOUT[feature] for feature in played.capabilities.off) or ALL


def _names(played: Sequence[Played]) -> str:
    """Modules, and the reason behind those that share it."""
    by_reason = dict[str, list[str]]()
    for one in sorted(played, key=lambda one: one.name):
        by_reason.setdefault(one.reason, []).append(f"`{one.name}`")
    cells = [
        f"{', '.join(names)}: {reason}" if reason else ", ".join(names)
        for reason, names in by_reason.items()
    ]
    return "; ".join(cells)


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
