"""`trouper connect --undo`: a client's files are as they were, byte for byte, and what was changed
since stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.agent_homes import KEYED, SERVED, WITH_FILES, files_in, fill, home, read
from trouper import cli
from trouper.cli.agents import jsonc
from trouper.cli.agents.agent import ServedModel
from trouper.cli.agents.config_files import ConfigFile, change_of
from trouper.cli.agents.config_formats import YAML
from trouper.cli.agents.merging import reverted
from trouper.cli.agents.undo import undo, write_with_backup
from trouper.cli.commands.connect import AGENTS, _merge

__all__ = ["home"]
OTHER = ServedModel("http://127.0.0.1:9000", "other/model", 32768, now="2026-02-02T03:04:05.678Z")


def write(agent: str, *served: ServedModel) -> None:
    for one in served:
        known = AGENTS[agent]
        _merge(known, known.setup(one).files, write=True)


def undone(agent: str, code: int = 0) -> str:
    outcome = CliRunner().invoke(cli.main, ["connect", agent, "--undo"])
    assert outcome.exit_code == code, outcome.output
    return outcome.output


def own_files(home: Path) -> dict[str, str]:
    """All but Trouper's own."""
    return {
        name: text
        for name, text in files_in(home).items()
        if not name.startswith(".cache/trouper/")
    }


@pytest.mark.parametrize("agent", WITH_FILES)
@pytest.mark.parametrize("served", [(SERVED,), (SERVED, SERVED), (SERVED, OTHER, KEYED)])
def test_files_are_as_they_were(agent: str, served: tuple[ServedModel, ...], home: Path) -> None:
    fill(home)
    before = own_files(home)
    write(agent, *served)
    assert own_files(home) != before
    [log] = (home / ".cache/trouper").rglob("undo.json")
    assert log.stat().st_mode & 0o777 == 0o600
    assert "as it was" in undone(agent)
    assert files_in(home) == before, "nothing is left of ours either"
    assert "no file of" in undone(agent)


@pytest.mark.parametrize("agent", WITH_FILES)
def test_files_that_there_were_not_are_removed(agent: str, home: Path) -> None:
    write(agent, SERVED, OTHER)
    assert own_files(home)
    undone(agent)
    assert files_in(home) == {}


@pytest.mark.parametrize("agent", WITH_FILES)
def test_what_was_changed_since_stays(agent: str, home: Path) -> None:
    fill(home)
    before = {name: read(home / name) for name in own_files(home)}
    write(agent, SERVED)
    changed = [name for name in before if read(home / name) != before[name]]
    for name in changed:
        path = home / name
        match path.suffix:
            case ".json" | ".jsonc":
                path.write_text(jsonc.with_value(path.read_text(), ("mine",), [1]))
            case ".toml":
                path.write_text(f"mine = [1]\n{path.read_text()}")
            case _:
                path.write_text(f"{path.read_text()}mine: [1]\n")
    assert "what was changed since stays" in undone(agent)
    for name, data in before.items():
        assert read(home / name) == data | ({"mine": [1]} if name in changed else {}), name


def test_each_file_is_copied_once_with_its_mode(home: Path) -> None:
    path = home / "config.yml"
    copies = [home / f"config.yml.trouper-backup{number}" for number in ("", "-2")]
    odd = "a:    1\nb:\n      - x   # far\n"
    copies[0].write_text("of somebody else\n")
    path.write_text(odd)
    path.chmod(0o640)
    for value in (1, 2):
        change = change_of(ConfigFile(path, YAML, {"c": value}))
        assert write_with_backup("claude", change) == copies[1]
        assert YAML.parse(path.read_text()) == {"a": 1, "b": ["x"], "c": value}
        assert copies[1].read_text() == odd
        assert copies[1].stat().st_mode & 0o777 == 0o640
    assert list(undo("claude")) == ["~/config.yml: as it was"]
    assert files_in(home) == {"config.yml": odd, copies[0].name: "of somebody else\n"}


def test_a_link_stays_one_and_its_file_is_as_it_was(home: Path) -> None:
    fill(home)
    path, real = home / ".claude/settings.json", home / "dotfiles.json"
    before = path.read_text()
    path.rename(real)
    path.symlink_to(real)
    write("claude", SERVED)
    assert path.is_symlink()
    assert (home / ".claude/settings.json.trouper-backup").read_text() == before
    undone("claude")
    assert path.is_symlink()
    assert real.read_text() == before


def test_without_the_copy_nothing_is_undone(home: Path) -> None:
    fill(home)
    path = home / ".claude/settings.json"
    write("claude", SERVED)
    (home / ".claude/settings.json.trouper-backup").unlink()
    written = path.read_text()
    assert "settings.json.trouper-backup is gone" in undone("claude")
    assert path.read_text() == written
    write("claude", OTHER)
    undone("claude")
    assert path.read_text() == written


def test_a_write_that_fails_does_not_forget_the_one_before(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(home)
    before = own_files(home)
    write("claude", SERVED)
    setup = AGENTS["claude"].setup(OTHER)
    [change] = [change_of(file) for file in setup.files]

    def fail(_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("trouper.cli.agents.config_files.Change.write", fail)
        with pytest.raises(OSError, match="No space"):
            write_with_backup("claude", change)
    undone("claude")
    assert own_files(home) == before


def test_changes_between_two_writes_stay(home: Path) -> None:
    fill(home)
    path = home / ".claude/settings.json"
    before = read(path)
    write("claude", SERVED)
    path.write_text(jsonc.with_value(path.read_text(), ("env", "PAGER"), "cat"))
    write("claude", OTHER)
    undone("claude")
    assert read(path) == before | {"env": before["env"] | {"PAGER": "cat"}}


def test_a_file_that_is_wrong_now_stays_and_can_be_undone_later(home: Path) -> None:
    fill(home)
    path = home / ".claude/settings.json"
    before = path.read_text()
    write("claude", SERVED)
    after = path.read_text()
    path.write_text("{")
    assert "not JSON" in undone("claude", 2)
    assert path.read_text() == "{"
    path.write_text(after)
    undone("claude")
    assert path.read_text() == before


def test_a_damaged_log_is_named(home: Path) -> None:
    fill(home)
    write("claude", SERVED)
    [log] = (home / ".cache/trouper").rglob("undo.json")
    for wrong in ("{", '{"a": 1}', '[{"path": 1}]'):
        log.write_text(wrong)
        assert "undo.json is damaged" in undone("claude", 2)
    log.write_text('{"/a": {"format": "INI", "after": "", "backup": null, "more": 1}}')
    assert "undo.json: this version of Trouper reads no INI" in undone("claude", 2)


def test_undo_is_for_one_client_and_alone(home: Path) -> None:
    outcome = CliRunner().invoke(cli.main, ["connect", "claude", "--undo", "--write"])
    assert outcome.exit_code == 2 and "give one of" in outcome.output
    outcome = CliRunner().invoke(cli.main, ["connect", "--undo"])
    assert outcome.exit_code == 2 and "name it" in outcome.output


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ('{"a": 1}', ("a",), "{}"),
        ('{"a": 1,}', ("a",), "{}"),
        (
            '{\n  "a": 1, // first\n  "b": 2 // second\n}',
            ("b",),
            '{\n  "a": 1 // first // second\n}',
        ),
        ('{\n  "a": 1, // first\n  "b": 2,\n}', ("b",), '{\n  "a": 1, // first\n}'),
        ('{\n  "a": 1,\n  "b": 2\n}', ("a",), '{\n  "b": 2\n}'),
        ('{"a": {"b": [1, 2, 3]}}', ("a", "b", 1), '{"a": {"b": [1, 3]}}'),
        ('{"a": [1, /* , */ 2]}', ("a", 1), '{"a": [1 /* , */]}'),
    ],
)
def test_a_member_is_removed_in_place(
    text: str, path: tuple[str | int, ...], expected: str
) -> None:
    found = jsonc.without(text, path)
    assert found == expected
    data = parent = jsonc.loads(text)
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    assert jsonc.loads(found) == data


def test_what_is_taken_back() -> None:
    before = {"kept": 1, "changed": 1, "list": [1, 2], "object": {"a": 1}}
    after = {
        "kept": 1,
        "changed": 2,
        "list": [1, 2, 3],
        "object": {"a": 1, "b": 2},
        "added": {"x": 1},
        "ours": True,
    }
    cases = (
        (after, before),
        (after | {"mine": 1}, before | {"mine": 1}),
        (after | {"changed": 9}, before | {"changed": 9}),
        (after | {"ours": 1}, before | {"ours": 1}),
        (after | {"list": [0, 3, 1]}, before | {"list": [0, 1]}),
        (after | {"added": {"x": 1, "y": 2}}, before | {"added": {"y": 2}}),
        (before, before),
    )
    for now, expected in cases:
        found = reverted(before, after, now)
        assert json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
