"""Settings from a file: the keys are the flags, and what counts more than what."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from trouper import ServerSettings, Settings, cli
from trouper.cli.commands import serve as serve_command
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.flags import flags_of, models_from, settings_from
from trouper.cli.print_config import _toml
from trouper.cli.settings_file import configured
from trouper.protocol.setting_fields import ByteSize


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def collected(*arguments: str, **variables: str) -> tuple[list[Settings], ServerSettings]:
    taken: list[tuple[list[Settings], ServerSettings]] = []

    @click.command()
    @partial(configured, works_here=True)
    @flags_of(Settings)
    @flags_of(ServerSettings)
    def collect(**given: Any) -> None:
        taken.append((models_from(given), settings_from(ServerSettings, given)))

    outcome = CliRunner().invoke(collect, arguments, env=variables)
    assert outcome.exit_code == 0, outcome.output
    return taken[0]


def serve(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(cli.main, ["serve", *arguments], env=variables)


def test_flag_then_variable_then_file_then_default() -> None:
    Path("trouper.toml").write_text(
        "port = 81\nblock-size = 16\nheartbeat_s = 2\nmodel = ['a b', 'c']\n"
    )
    models, server = collected("--port", "83", TROUPER_PORT="82", TROUPER_BLOCK_SIZE="32")
    assert (server.port, server.heartbeat_s, server.max_connections) == (83, 2.0, 1000)
    assert [(one.model, one.block_size) for one in models] == [("a b", 32), ("c", 32)]
    assert collected(TROUPER_PORT="82")[1].port == 82
    assert collected()[1].port == 81
    assert collected("--model", "d")[0] == [Settings(model="d", block_size=16)]


def test_every_setting_may_stand_in_the_file() -> None:
    """With another value than its default, and each arrives - whether or not the settings would
    take it."""
    changed: dict[str, Any] = {
        field.name: _another(field)
        for cls in (Settings, ServerSettings)
        for field in attrs.fields(cls)
    }
    lines = [f"{name.replace('_', '-')} = {_toml(value)}" for name, value in changed.items()]
    Path("trouper.toml").write_text("\n".join(lines))
    arrived: dict[str, Any] = {}
    collect = click.Command("collect", callback=lambda **given: arrived.update(given))
    outcome = CliRunner().invoke(
        configured(flags_of(Settings)(flags_of(ServerSettings)(collect))),
        ["--config", "trouper.toml"],
    )
    assert outcome.exit_code == 0, outcome.output
    assert arrived == changed | {name: (changed[name],) for name in ("model", "draft_model")}


def _another(field: attrs.Attribute[Any]) -> Any:
    match field.default:
        case bool() | ByteSize() | int() | float() as default:
            return not default if isinstance(default, bool) else type(default)(int(default / 2) + 1)
        case tuple():
            return ("a", 'b"c')
        case _:
            hint = str(field.type)
            return (
                Path("somewhere")
                if "Path" in hint
                else 64
                if "int" in hint or "ByteSize" in hint
                else "text"
            )


def test_the_users_file_holds_where_the_folder_has_none(tmp_path: Path) -> None:
    users = tmp_path / "xdg" / "trouper" / "config.toml"
    users.parent.mkdir(parents=True)
    users.write_text("port = 81")
    assert collected()[1].port == 81
    Path("trouper.toml").write_text("block-size = 16")
    assert collected()[1].port == 8000
    Path("third.toml").write_text("port = 84")
    assert collected("--config", "third.toml")[1].port == 84
    assert collected(TROUPER_CONFIG="third.toml")[1].port == 84


def test_a_file_of_windows() -> None:
    Path("trouper.toml").write_bytes(b"\xef\xbb\xbfport = 81\r\nheartbeat-s = 2\r\n")
    server = collected()[1]
    assert (server.port, server.heartbeat_s) == (81, 2.0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("prot = 81", "there is no key prot; did you mean port?"),
        ("qqq = 81", "there is no key qqq; `trouper serve --help` lists them"),
        ("print-config = true", "there is no key print-config"),
        ("config = 'x'", "there is no key config"),
        ("[serve]\nport = 81", "there is no key serve"),
        ("port = 81\nport = 82", "is not TOML"),
        (f"port = {'1' * 5000}", "is not TOML"),
        ("heartbeat-s = 1\nheartbeat_s = 2", "heartbeat-s is there twice"),
        ("port = 8000.5", "port: '8000.5' is not a valid integer"),
        ("port = true", "port: must be a text or a number, not True"),
        ("port = [81, 82]", "port: must be a text or a number"),
        ("no-ssd = 'false'", "no-ssd: must be true or false, not 'false'"),
        ("cache-memory = '4 elephants'", "cache-memory: '4 elephants' is no size"),
        ("port = 70000", "--port must be between 0 and 65535"),
        ("log-level = 'loud'", "log-level: 'loud' is not one of"),
    ],
)
def test_what_a_file_cannot_say_is_one_line_that_names_the_key(content: str, said: str) -> None:
    Path("trouper.toml").write_text(content)
    outcome = serve()
    assert outcome.exit_code == USAGE_ERROR
    assert said in outcome.stderr
    assert "Traceback" not in outcome.output


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--port", "some"], {}, "--port: 'some' is not a valid integer"),
        ([], {"TROUPER_PORT": "some"}, "--port: 'some' is not a valid integer (from TROUPER_PORT)"),
        (
            [],
            {"TROUPER_PORT": "70000"},
            "--port must be between 0 and 65535, not 70000 (from TROUPER_PORT)",
        ),
        (["--port", "0"], {"TROUPER_API_KEY": "ü"}, "signs of ASCII (from TROUPER_API_KEY)"),
        (
            [],
            {"TROUPER_SERVED_MODEL_NAME": "a=b"},
            "NAME alone for the first (from TROUPER_SERVED_MODEL_NAME)",
        ),
        (
            [],
            {"TROUPER_CACHE_MEMORY": "4 elephants"},
            "unit as in 500MB or 4GB (from TROUPER_CACHE_MEMORY)",
        ),
        (["--kv-bits", "3"], {}, "--kv-bits must be 8, 4 or 0, not 3"),
        (["--kv-bits", "off"], {}, "--kv-bits must be 8, 4 or 0, not off"),
        (
            [],
            {"TROUPER_KV_BITS": "8.5"},
            "--kv-bits must be 8, 4 or 0, not 8.5 (from TROUPER_KV_BITS)",
        ),
        (["--prot", "81"], {}, "there is no flag --prot; did you mean --port?"),
        (["--qqq"], {}, "there is no flag --qqq; `trouper serve --help` lists them"),
        (
            ["--log-level", "loud"],
            {},
            "--log-level: 'loud' is not one of 'debug', 'info', 'warning', 'error'",
        ),
        (["--port"], {}, "requires an argument; see `trouper serve --help`"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_where_it_was_said(
    arguments: list[str], variables: dict[str, str], said: str
) -> None:
    outcome = CliRunner().invoke(
        cli.main, ["serve", *arguments], env=variables, prog_name="trouper"
    )
    assert outcome.exit_code == USAGE_ERROR
    assert outcome.stderr.splitlines()[-1].endswith(said)
    assert len(outcome.stderr.splitlines()) == 1
    assert outcome.stderr.startswith("trouper: ")


def test_a_wrong_setting_of_a_file_names_the_file() -> None:
    Path("trouper.toml").write_text("port = 70000")
    assert (
        serve().stderr
        == "trouper: --port must be between 0 and 65535, not 70000 (from trouper.toml)\n"
    )


def test_a_command_that_is_none_is_one_line() -> None:
    outcome = CliRunner().invoke(cli.main, ["srve"], prog_name="trouper")
    assert (outcome.exit_code, len(outcome.stderr.splitlines())) == (USAGE_ERROR, 1)
    assert "serve" in outcome.stderr
    outcome = CliRunner().invoke(cli.main, ["--prot"], prog_name="trouper")
    assert outcome.stderr == "trouper: there is no flag --prot; `trouper --help` lists them\n"


@pytest.mark.parametrize("command", [[], ["cache"]])
def test_without_a_command_there_is_help(command: list[str]) -> None:
    outcome = CliRunner().invoke(cli.main, command, prog_name="trouper")
    assert "Usage: trouper" in outcome.output


def test_help_cuts_no_line() -> None:
    assert "..." not in CliRunner().invoke(cli.main, ["--help"]).output.split("Commands:")[1]


def test_ctrl_c_while_a_command_still_imports_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_command, "_run", interrupted)
    monkeypatch.setattr(serve_command, "configure_logging", lambda *_: None)
    outcome = serve()
    assert (outcome.exit_code, outcome.stderr) == (130, "")


def test_a_file_that_is_named_must_be_there() -> None:
    outcome = serve("--config", "none.toml")
    assert (outcome.exit_code, outcome.stderr) == (
        USAGE_ERROR,
        (
            "trouper: --config none.toml: No such file or directory; "
            "`trouper serve --print-config` prints one to begin with\n"
        ),
    )


def test_print_config_says_what_holds_and_why() -> None:
    Path("trouper.toml").write_text(
        "kv_bits = 4\napi-key = 'from file'\n[models.small]\npath = 'org/small'"
    )
    printed = serve(
        "--config", "trouper.toml", "--print-config", "--port", "83", TROUPER_SEED="5"
    ).stdout
    lines = printed.splitlines()
    assert "port = 83  # flag" in lines
    assert "seed = 5  # TROUPER_SEED" in lines
    assert "kv-bits = 4  # trouper.toml: kv_bits" in lines
    assert 'model = ["org/small"]  # trouper.toml: [models]' in lines
    assert "# block-size = 64" in lines
    assert "from file" not in printed
    assert "# api-key = (not shown)  # trouper.toml: api-key" in lines
    for field in (*attrs.fields(Settings), *attrs.fields(ServerSettings)):
        assert any(
            line.removeprefix("# ").startswith(f"{field.name.replace('_', '-')} =")
            for line in lines
        )
    keys = re.findall(r"^(?:# )?([\w-]+) =", printed.partition("\n[models")[0], re.MULTILINE)
    flags = re.findall(r"^  --([\w-]+)", serve("--help").stdout, re.MULTILINE)
    assert [key for key in keys if key in flags] == [flag for flag in flags if flag in keys]


@pytest.mark.parametrize(
    ("arguments", "models"),
    [
        (["org/a"], '["org/a"]'),
        (["org/a", "./b"], '["org/a", "./b"]'),
        (["org/a", "--model", "./b", "--port", "83"], '["org/a", "./b"]'),
    ],
)
def test_models_are_arguments_too_and_override_variables_and_files(
    arguments: list[str], models: str
) -> None:
    Path("trouper.toml").write_text("[models.small]\npath = 'org/small'")
    printed = serve(*arguments, "--print-config", TROUPER_MODEL="org/other").stdout
    assert f"model = {models}  # flag" in printed.splitlines()


def test_what_print_config_prints_is_a_file_that_means_the_same() -> None:
    flags = [
        "--port",
        "83",
        "--model",
        'a "b"\\ü',
        "--model",
        "c",
        "--no-ssd",
        "--cache-memory",
        "3GiB",
    ]
    Path("printed.toml").write_text(serve("--print-config", *flags).stdout)
    assert collected("--config", "printed.toml") == collected(*flags)


def test_print_config_names_a_variable_that_is_none() -> None:
    """It is where a person looks who wonders why a variable has no effect."""
    outcome = serve("--print-config", TROUPER_PROT="83")
    assert outcome.stderr == (
        "trouper: TROUPER_PROT is no variable of trouper and has no effect; TROUPER_PORT is one\n"
    )
    assert "TROUPER_PROT" not in outcome.stdout


def test_print_config_refuses_what_serve_would_refuse() -> None:
    outcome = serve("--print-config", "--host", "0.0.0.0")
    assert (outcome.exit_code, outcome.stdout) == (USAGE_ERROR, "")


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_toml(text: str) -> None:
    import tomllib

    assert tomllib.loads(f"a = {_toml(text)}") == {"a": text}


def test_the_cache_commands_find_the_servers_directory(tmp_path: Path) -> None:
    Path("trouper.toml").write_text(f"ssd-cache-dir = '{tmp_path}/here'\nport = 81")
    outcome = CliRunner().invoke(cli.main, ["cache", "ls", "--config", "trouper.toml"])
    assert outcome.stdout == f"nothing is cached in {tmp_path}/here\n"
    assert outcome.stderr == "trouper: settings of trouper.toml: ssd-cache-dir\n"


def test_a_home_directory_is_meant_as_in_a_shell() -> None:
    Path("trouper.toml").write_text("ssd-cache-dir = '~/blocks'")
    [settings], _ = collected("--config", "trouper.toml")
    assert settings.ssd_cache_dir == Path.home() / "blocks"
