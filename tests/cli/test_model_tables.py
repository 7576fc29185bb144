"""Tables of models in the settings file: what holds for one model, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from trouper import ServerSettings, Settings, cli
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.flags import all_from, flags_of
from trouper.cli.settings_file import configured, model_tables
from trouper.protocol.model_options import ModelOptions
from trouper.protocol.names import aliased, names_of
from trouper.protocol.problems import SettingsInvalid

TWO = """
completion-batch-size = 16
block-size = 32
[models.small]
aliases = ["gpt-4o-mini", "claude-*"]
path = "org/small"
pinned = true
ttl-s = 600
kv_bits = 8
[models."org/large"]
completion-batch-size = 4
draft-model = "org/draft"
speculation = "draft_model"
adapter = ["legal=/adapters/legal"]
ssd-cache-dir = "~/blocks"
cache-memory = "1GB"
no-ssd = true
"""
OWN_CACHE = ModelOptions(own_memory=frozenset({"cache_memory"}))
Collected = tuple[list[Settings], ServerSettings, dict[str, ModelOptions]]


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def collected(content: str, *arguments: str, **variables: str) -> Collected:
    taken: list[Collected] = []

    @click.command()
    @configured
    @flags_of(Settings)
    @flags_of(ServerSettings)
    @click.pass_context
    def collect(context: click.Context, /, **given: Any) -> None:
        tables = model_tables(context)
        models, server = all_from(given, tables)
        taken.append((models, server, tables.options([model.model for model in models])))

    Path("trouper.toml").write_text(content)
    outcome = CliRunner().invoke(collect, ["--config", "trouper.toml", *arguments], env=variables)
    if outcome.exception is not None and not isinstance(outcome.exception, SystemExit):
        raise outcome.exception
    assert outcome.exit_code == 0, outcome.output
    return taken[0]


def serve(content: str, *arguments: str) -> Result:
    Path("trouper.toml").write_text(content)
    return CliRunner().invoke(cli.main, ["serve", "--config", "trouper.toml", *arguments])


def test_each_model_has_the_settings_of_its_table() -> None:
    (small, large), server, options = collected(TWO)
    assert (small.model, small.completion_batch_size, small.block_size, small.kv_bits) == (
        "org/small",
        16,
        32,
        8,
    )
    assert (large.model, large.completion_batch_size, large.block_size, large.kv_bits) == (
        "org/large",
        4,
        32,
        0,
    )
    assert (large.draft_model, large.speculation, small.draft_model) == (
        "org/draft",
        "draft_model",
        None,
    )
    assert (large.adapter, small.adapter, large.no_ssd, small.no_ssd) == (
        ("legal=/adapters/legal",),
        (),
        True,
        False,
    )
    assert (large.ssd_cache_dir, large.cache_memory) == (Path("~/blocks").expanduser(), 10**9)
    assert options == {"org/small": ModelOptions(pinned=True, ttl_s=600.0), "org/large": OWN_CACHE}
    names = [
        names_of(model.model or "", server.served_model_name, default=model is small)
        for model in (small, large)
    ]
    assert names == [("small", "gpt-4o-mini", "org/small"), ("org/large",)]
    assert (
        aliased("claude-opus", server.model_alias, names) == 0
        and aliased("x", server.model_alias, names) is None
    )


def test_flag_then_variable_then_table_then_file() -> None:
    (small, large), _, _ = collected(TWO, "--completion-batch-size", "5", TROUPER_KV_BITS="4")
    assert (small.completion_batch_size, large.completion_batch_size, small.kv_bits) == (5, 5, 4)
    (_, large), _, options = collected(TWO, "--cache-memory", "2GB")
    assert (large.cache_memory, options["org/large"]) == (2 * 10**9, ModelOptions()), (
        "a flag's is for all"
    )


def test_model_says_which_tables_are_served() -> None:
    (large, other), server, options = collected(TWO, "--model", "org/large", "--model", "org/other")
    assert (large.model, large.completion_batch_size) == ("org/large", 4)
    assert (other.model, other.completion_batch_size, other.adapter) == ("org/other", 16, ())
    assert (server.served_model_name, server.model_alias, set(options)) == ((), (), {"org/large"})
    [small], server, _ = collected(TWO, "--model", "small", "--served-model-name", "mine=small")
    assert (small.model, small.kv_bits) == ("org/small", 8)
    assert server.served_model_name == (
        "mine=org/small",
        "small=org/small",
        "gpt-4o-mini=org/small",
    )
    assert [model.model for model in collected("model = 'x'\n" + TWO)[0]] == ["x"]


def test_a_draft_model_of_a_flag_counts_more() -> None:
    assert [each.draft_model for each in collected(TWO, "--draft-model", "org/large=d")[0]] == [
        None,
        "d",
    ]
    assert [each.draft_model for each in collected(TWO, "--draft-model", "d")[0]] == [
        "d",
        "org/draft",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("models = ['a']", 'models must be tables, as [models."NAME"]'),
        ("[models]\na = 'b'", "[models.\"a\"] must be a table of keys, not 'b'"),
        ("[models.' ']", '[models." "] has no name; give the name that requests send'),
        (
            "[models.a]\npth = 'b'",
            '[models."a"]: pth: no model has this setting; did you mean path?',
        ),
        (
            "[models.a]\nport = 81",
            '[models."a"]: port: no model has this setting; docs/flags.md lists',
        ),
        (
            "[models.a]\nmodel = 'b'",
            '[models."a"]: model: cannot differ between models; write path',
        ),
        (
            "[models.a]\nssd-max-bytes = 1",
            "ssd-max-bytes: cannot differ between models; write it above all tables",
        ),
        ("[models.a]\nttl-s = 1\nttl_s = 2", "ttl-s is there twice; leave one out"),
        ("[models.a]\nkv-bits = 4\nkv_bits = 8", "kv-bits is there twice; leave one out"),
        ("[models.a]\nttl-s = -1", "ttl-s: must be a number of seconds, 0 for never, not -1"),
        ("[models.a]\nttl-s = true", "ttl-s: must be a number of seconds, 0 for never, not True"),
        (f"[models.a]\nttl-s = 1{'0' * 400}", "ttl-s: must be a number of seconds, 0 for never"),
        ("[models.a]\nttl-s = inf", "ttl-s: must be a number of seconds, 0 for never, not inf"),
        ("[models.a]\npinned = 1", "pinned: must be true or false, not 1"),
        ("[models.a]\naliases = [1]", "aliases: must be a name or a list of names, not [1]"),
        ("[models.a]\naliases = ''", "aliases: must be a name or a list of names, not ''"),
        ("[models.a]\npath = ' '", "path: must be a directory or a hub id, not ' '"),
        ("[models.a]\nkv-bits = 'x'", "--kv-bits must be 8, 4 or 0, not x"),
        ("[models.a]\nkv-bits = 3", '[models."a"]: --kv-bits must be 8, 4 or 0, not 3'),
        ("[models.a]\ndraft-model = ['b']", "draft-model: must be one text, not ['b']"),
        (
            "[models.a]\nspeculation = 'draft_model'",
            '[models."a"]: --speculation draft_model needs --draft-model',
        ),
        (
            "[models.a]\npath = 'c'\n[models.b]\npath = 'c'",
            "'c' stands for a already; give each model a path and names",
        ),
        ("[models.a]\n[models.b]\naliases = 'a'", "[models.\"b\"]: 'a' stands for a already"),
        (
            "adapter = 'x=y'\n[models.a]\n[models.b]",
            "--adapter is for one model: give one --model with it, or write it",
        ),
        ("[models.a]\nadapter = 'a=y'", "--adapter a has the name of the model; give it another"),
    ],
)
def test_what_a_table_cannot_say_is_one_line_with_file_table_key_and_remedy(
    content: str, message: str
) -> None:
    outcome = serve(content)
    assert (outcome.exit_code, len(outcome.stderr.splitlines())) == (USAGE_ERROR, 1)
    assert message in outcome.stderr and "trouper: " in outcome.stderr


def test_an_error_that_is_not_the_tables_does_not_blame_it() -> None:
    with pytest.raises(SettingsInvalid, match=r"^--block-size must be"):
        collected("[models.a]\nkv-bits = 8", "--block-size", "0")


def test_print_config_shows_the_tables_and_can_be_read_again() -> None:
    printed = serve(TWO, "--print-config").stdout
    assert '[models."small"]  # trouper.toml' in printed.splitlines()
    assert 'model = ["org/small", "org/large"]  # trouper.toml: [models]' in printed.splitlines()
    assert collected(printed) == collected(TWO)
    assert "[models" not in serve(TWO, "--model", "x", "--print-config").stdout


def test_a_home_directory_is_expanded() -> None:
    assert collected("[models.a]\npath = '~/a'")[0][0].model == str(Path("~/a").expanduser())
