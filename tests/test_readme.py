"""README.md says what the flags are."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from trouper.protocol.settings import ServerSettings, Settings

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize(
    "field", [*attrs.fields(Settings), *attrs.fields(ServerSettings)], ids=lambda field: field.name
)
def test_each_flag_has_its_row(field: attrs.Attribute[object]) -> None:
    flag = f"| `--{field.name.replace('_', '-')}` |"
    [line] = [line for line in README.splitlines() if line.startswith(flag)]
    _, _, default, said, _ = (cell.strip() for cell in line.split("|"))
    assert said == field.metadata["help"]
    shown = {None: "", (): "", False: "off"}.get(field.default, f"`{field.default}`")  # type: ignore[call-overload]
    if isinstance(field.default, float):
        shown = f"`{field.default:g}`"
    assert default == shown


def test_the_table_holds_no_other_flag() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `--")]
    assert len(rows) == len(attrs.fields(Settings)) + len(attrs.fields(ServerSettings))
