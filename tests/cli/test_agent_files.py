"""Clients' own files: what is merged into them, what stays, and what becomes of a file that is
wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.agent_homes import (
    FILES,
    KEY,
    KEYED,
    READERS,
    SERVED,
    WITH_FILES,
    files_in,
    fill,
    home,
    read,
)
from trouper.cli.agents.config_files import Change, ConfigFile, change_of
from trouper.cli.agents.config_formats import JSON, TOML, YAML
from trouper.cli.agents.merging import ConfigInvalid, Default, Entries
from trouper.cli.commands.connect import AGENTS

__all__ = ["home"]
COMMENT = re.compile(r"(?:#|//)[^\n\"]*$", re.MULTILINE)
WRONG = {
    ".json": '{"a": 1,\n "b" 2\n}',
    ".jsonc": '{"a": 1,\n "b" 2\n}',
    ".toml": "a = 1\na = 2\n",
    ".yml": "a: [1\n",
    ".yaml": "a: [1\n",
}


def write(agent: str, served: Any = SERVED) -> list[Change]:
    changes = [change_of(file) for file in AGENTS[agent].setup(served).files]
    for change in changes:
        if change.edits:
            change.write()
    return changes


def leaves(data: Any) -> Iterator[Any]:
    match data:
        case dict():
            for value in data.values():
                yield from leaves(value)
        case list():
            for value in data:
                yield from leaves(value)
        case _:
            yield data


def test_every_client_with_files_has_one_here() -> None:
    assert set(WITH_FILES) == {
        "claude",
        "codex",
        "opencode",
        "qwen",
        "cline",
        "pi",
        "aider",
        "openclaw",
        "vibe",
        "nanocoder",
        "kilo",
        "continue",
        "zed",
        "litellm",
    }


@pytest.mark.parametrize("agent", WITH_FILES)
def test_new_files_hold_url_model_and_lengths(agent: str, home: Path) -> None:
    for change in write(agent):
        assert change.before is None
        assert change.path.stat().st_mode & 0o777 == 0o600
    text = "".join(files_in(home).values())
    for part in ("http://127.0.0.1:8000", "Qwen/Qwen3-Coder", "16384"):
        assert part in text or (agent in {"codex", "nanocoder"} and part == "16384"), part
    assert "65536" in text or "49152" in text, "the context, or what an answer leaves of it"
    for name in files_in(home):
        assert read(home / name)


@pytest.mark.parametrize("agent", WITH_FILES)
def test_what_else_is_in_the_files_stays(agent: str, home: Path) -> None:
    fill(home)
    before = files_in(home)
    changes = write(agent)
    changed = {str(change.path.relative_to(home)) for change in changes}
    assert changed <= set(FILES), "the files that a person has are the ones that are changed"
    for name, text in before.items():
        after = (home / name).read_text()
        if name not in changed:
            assert after == text
            continue
        kept = [leaf for leaf in leaves(read_text(name, text)) if leaf not in REPLACED]
        assert [leaf for leaf in kept if leaf not in set(leaves(read(home / name)))] == []
        assert [comment for comment in COMMENT.findall(text) if comment.strip() not in after] == []
        assert "127.0.0.1:8000" in after or name.endswith(("metadata.json", "agent/settings.json"))
    assert set(files_in(home)) == set(before)


REPLACED = {"sk-ant-of-a-person", "gpt-5", "other"}
"""Values that clients have once: the model, the token, the default."""


def read_text(name: str, text: str) -> Any:
    return READERS[Path(name).suffix](text)


@pytest.mark.parametrize("agent", WITH_FILES)
@pytest.mark.parametrize("filled", [False, True])
def test_done_twice_is_done_once(agent: str, filled: bool, home: Path) -> None:
    if filled:
        fill(home)
    write(agent)
    once = files_in(home)
    for change in write(agent):
        assert (change.edits, change.diff()) == ((), "")
    assert files_in(home) == once


@pytest.mark.parametrize("agent", WITH_FILES)
def test_another_server_takes_the_room_of_the_first(agent: str, home: Path) -> None:
    write(agent)
    moved = type(SERVED)("http://10.0.0.7:9000", SERVED.model, 32768)
    write(agent, moved)
    text = "".join(files_in(home).values())
    assert "10.0.0.7:9000" in text
    assert "127.0.0.1:8000" not in text or agent == "qwen", (
        "Qwen Code tells models apart by their address"
    )


@pytest.mark.parametrize("agent", WITH_FILES)
def test_a_file_that_is_wrong_is_named_and_stays(agent: str, home: Path) -> None:
    [*_, file] = AGENTS[agent].setup(SERVED).files
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.write_text(WRONG[file.path.suffix])
    before = files_in(home)
    with pytest.raises(
        ConfigInvalid, match=rf"{re.escape(file.path.name)}: it is not (JSON|TOML|YAML): .*line 2"
    ):
        write(agent)
    assert files_in(home) == before


@pytest.mark.parametrize(
    ("format", "text", "said"),
    [
        (JSON, "[]", "the file holds a list, where a table of keys is expected"),
        (JSON, '{"a": "x"}', "a holds a text, where a table of keys is expected"),
        (TOML, "a = 3", "a holds a number, where a table of keys is expected"),
        (YAML, "a: [1]", "a holds a list, where a table of keys is expected"),
        (YAML, "a: {list: true}", "a.list holds true or false, where a list is expected"),
    ],
)
def test_a_value_of_another_kind_is_not_overwritten(
    format: Any, text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match=re.escape(said)):
        change_of(
            ConfigFile(path, format, {"a": {"b": 1, "list": Entries(("name",), ({"name": "x"},))}})
        )
    assert path.read_text() == text


@pytest.mark.parametrize("bad", [b"\xff\xfe{", b"{\xc3}"])
def test_bytes_that_are_no_text(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(bad)
    with pytest.raises(ConfigInvalid, match="it is not UTF-8"):
        change_of(ConfigFile(path, JSON, {"a": 1}))
    assert path.read_bytes() == bad


@pytest.mark.parametrize("format", [JSON, TOML, YAML])
@pytest.mark.parametrize("text", ["", "\n", "  \n\n"])
def test_an_empty_file_is_as_good_as_none(format: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    change_of(ConfigFile(path, format, {"a": {"b": [1, "x"]}})).write()
    assert format.parse(path.read_text()) == {"a": {"b": [1, "x"]}}


def test_a_yaml_file_of_comments_keeps_them(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("# everything is commented out\n# model: x\n")
    change_of(ConfigFile(path, YAML, {"a": 1})).write()
    assert path.read_text() == "# everything is commented out\n# model: x\na: 1\n"


def test_line_ends_a_mark_a_link_and_rights_stay(tmp_path: Path) -> None:
    real, path = tmp_path / "dotfiles.json", tmp_path / "settings.json"
    real.write_bytes(b'\xef\xbb\xbf{\r\n\t"a": 1\r\n}\r\n')
    real.chmod(0o640)
    path.symlink_to(real)
    change_of(ConfigFile(path, JSON, {"b": {"c": 2}})).write()
    assert path.is_symlink()
    assert (
        real.read_bytes() == b'\xef\xbb\xbf{\r\n\t"a": 1,\r\n\t"b": {\r\n\t\t"c": 2\r\n\t}\r\n}\r\n'
    )
    assert real.stat().st_mode & 0o777 == 0o640
    assert sorted(tmp_path.iterdir()) == [real, path]


@pytest.mark.parametrize("format", [JSON, TOML, YAML])
def test_a_default_is_written_where_nothing_is(format: Any, tmp_path: Path) -> None:
    path = tmp_path / "config"
    for default in (1, 2):
        change_of(ConfigFile(path, format, {"a": {"b": Default(default)}})).write()
        assert format.parse(path.read_text()) == {"a": {"b": 1}}


def test_a_failed_write_leaves_the_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config"
    path.write_text("{}")
    change = change_of(ConfigFile(path, JSON, {"a": 1}))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        change.write()
    assert files_in(tmp_path) == {"config": "{}"}


# -- keys ----------------------------------------------------------------------------------------

WITH_THE_KEY = {"cline", "aider"}
"""Clients that read a key from their file only."""


@pytest.mark.parametrize("agent", WITH_FILES)
def test_the_key_stands_only_in_files_of_clients_that_know_no_variables(
    agent: str, home: Path
) -> None:
    fill(home)
    for change in write(agent, KEYED):
        assert KEY not in change.diff()
        assert KEY not in "\n".join(change.described())
        assert KEY not in repr(change.edits)
    written = "".join((home / name).read_text() for name in files_in(home))
    assert (KEY in written) == (agent in WITH_THE_KEY)
    assert "TROUPER_API_KEY" in written or agent in WITH_THE_KEY | {"zed"}


@pytest.mark.parametrize("agent", WITH_FILES)
def test_keys_of_a_person_are_not_shown(agent: str, home: Path) -> None:
    fill(home)
    for change in write(agent):
        shown = change.diff() + "\n".join(change.described())
        assert "sk-ant-of-a-person" not in shown
        assert "sk-other" not in shown
        if agent == "claude":
            assert '"ANTHROPIC_AUTH_TOKEN": "***"' in shown, "the line is there, and masked"
            assert "env.ANTHROPIC_AUTH_TOKEN = 'none' (was ***)" in shown


def test_a_price_of_a_token_is_shown(home: Path) -> None:
    [_, metadata] = [change_of(file) for file in AGENTS["aider"].setup(SERVED).files]
    assert '"input_cost_per_token": 0' in metadata.diff(), "a token that is counted is no secret"


def test_a_key_that_is_wanted_from_now_on_and_no_longer(home: Path) -> None:
    """Claude Code heeds a token more than what asks for one; Codex refuses to start without a
    variable that is named."""
    for served, token, named in (
        (SERVED, "none", False),
        (KEYED, "", True),
        (SERVED, "none", False),
    ):
        write("claude", served)
        lines = [line for change in write("codex", served) for line in change.described()]
        assert read(home / ".claude/settings.json")["env"]["ANTHROPIC_AUTH_TOKEN"] == token
        assert (
            "env_key" in read(home / ".codex/config.toml")["model_providers"]["trouper"]
        ) == named
    assert lines == ["model_providers.trouper.env_key removed"]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (TOML, f"a = {'1' * 5000}"),
        (YAML, f"a: {'1' * 5000}"),
        (YAML, "a: 2024-13-45"),
        (YAML, "a: !!bool maybe"),
    ],
)
def test_a_value_that_no_reader_takes_is_named(form: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match=f"it is not {form.name}"):
        change_of(ConfigFile(path, form, {"b": 1}))
