"""README.md is short and shows what is measured; docs/flags.md says what the flags are."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from PIL import Image

from tests import flags_page
from trouper.cli.flag_groups import GROUPS, OLDER
from trouper.protocol.settings import ServerSettings, Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FLAGS = (ROOT / "docs" / "flags.md").read_text()
MAX_WORDS = 900
"""Three minutes at 300 words a minute; addresses of links and the bars of tables count as words,
too."""


@pytest.mark.parametrize(
    "field", [*attrs.fields(Settings), *attrs.fields(ServerSettings)], ids=lambda field: field.name
)
def test_each_flag_has_its_row(field: attrs.Attribute[object]) -> None:
    flag = f"| `--{field.name.replace('_', '-')}` |"
    [line] = [line for line in FLAGS.splitlines() if line.startswith(flag)]
    _, _, default, said, _ = (cell.strip() for cell in line.split("|"))
    assert said == field.metadata["help"]
    shown = {None: "", (): ""}.get(field.default, f"`{field.default}`")  # type: ignore[call-overload]
    if field.default is False:  # 0 equals it, and is a value that the flag takes
        shown = "off"
    if isinstance(field.default, float):
        shown = f"`{field.default:g}`"
    assert default == shown


def test_the_tables_hold_the_flags_of_serve_and_no_other() -> None:
    rows = [line.split("`")[1] for line in FLAGS.splitlines() if line.startswith("| `--")]
    settings = (*attrs.fields(Settings), *attrs.fields(ServerSettings))
    others = ("config", "print_config", "log_level", "log_format", "otlp_endpoint")
    names = [*(field.name for field in settings), *others]
    assert sorted(rows) == sorted(f"--{name.replace('_', '-')}" for name in names)


def test_each_flag_is_in_one_group() -> None:
    names = [name for names in (*GROUPS.values(), OLDER) for name in names]
    assert sorted(names) == sorted(flags_page.options())


def test_the_tables_are_those_of_the_help() -> None:
    assert flags_page.rendered(FLAGS) == FLAGS, "run `python -m tests.flags_page`"


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len(README.split()) <= MAX_WORDS


def test_the_picture_of_the_readme_moves_and_comes_to_rest() -> None:
    [picture] = re.findall(r"\]\((docs/[^)]*\.gif)\)", README)
    with Image.open(ROOT / picture) as moving:
        assert moving.n_frames > 20  # type: ignore[attr-defined]
        assert moving.info["loop"]


def test_the_two_commands_stand_in_the_readme() -> None:
    assert "\npip install uv rust-just && just serve " in README
    assert "\npip install uv rust-just && just test " in README


def test_the_plot_shows_the_figures_of_the_comparison() -> None:
    """Each pair of bars of docs/throughput.svg is a row of the table that docs/peers.md has of
    mlx-lm's server."""
    plot = (ROOT / "docs" / "throughput.svg").read_text()
    bars = re.findall(r'fill="(#\w+)"/><text x="[0-9]+" y="[0-9]+">([0-9]+)</text>', plot)
    measured = (
        (ROOT / "docs" / "peers.md")
        .read_text()
        .split("\n## Measured side by side")[1]
        .split("\n## ")[0]
    )
    rows = re.findall(r"^\|.*tok/s \| ([0-9]+) \| ([0-9]+) \|", measured, re.MULTILINE)
    assert [value for _, value in bars] == [value for row in rows for value in row]
    assert [colour for colour, _ in bars] == ["#7e57c2", "#a0a0a0"] * len(rows)
