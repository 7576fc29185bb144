"""Flags of other servers: the error says what each is here, and docs/coming-from.md has them
all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests import coming_from_page
from tests.coming_from_page import MLX_LM, SERVERS, VLLM_MLX
from tests.flags_page import options
from trouper import cli
from trouper.cli.exits import USAGE_ERROR
from trouper.cli.foreign_flags import FOREIGN_COMMANDS, list_foreign_flags, of_others

OWN = {option.opts[0] for option in options().values()}
NAMES = {
    name for row in list_foreign_flags() for text in row.names.values() for name in text.split()
}
FEWEST = 60


def refusal_of(*arguments: str) -> str:
    outcome = CliRunner().invoke(cli.main, ["serve", *arguments])
    assert outcome.exit_code == USAGE_ERROR, outcome.output
    [line] = outcome.stderr.splitlines()
    return line.removeprefix("trouper: ")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--max-model-len 4096", "--max-model-len is a flag of vLLM; here it is --max-kv-size N"),
        ("--ctx-size 4096", "here it is --max-kv-size N"),
        ("-c 4096", "-c is a flag of llama.cpp and LM Studio; here it is --max-kv-size N"),
        ("-ngl 99", "-ngl is a flag of llama.cpp; the whole model is on the device here"),
        ("-hf ggml-org/x-GGUF", "GGUF is not read"),
        ("--ssl-keyfile=x", "no TLS here: put a proxy before the server"),
        ("--jinja", "on by itself here; leave it out"),
        ("--tp 2", "`trouper launch -n N -- serve ...`"),
        ("--temp 0.7", "requests say it here"),
    ],
)
def test_a_flag_of_another_server_is_refused_with_what_it_is_here(typed: str, message: str) -> None:
    assert message in refusal_of(*typed.split())


def test_a_flag_that_no_server_has_is_refused_with_the_nearest() -> None:
    assert refusal_of("--prot", "1") == "there is no flag --prot; did you mean --port?"


def test_a_key_of_another_server_in_the_settings_file(tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text("max-model-len = 4096\n")
    message = refusal_of("--config", str(tmp_path / "file.toml"))
    assert "max-model-len is a flag of vLLM; here it is --max-kv-size N" in message


def test_a_doctor_says_the_same() -> None:
    outcome = CliRunner().invoke(cli.main, ["doctor", "--max-model-len", "4096"])
    assert "here it is --max-kv-size N" in outcome.stderr


def test_the_table_names_flags_that_exist() -> None:
    named = {row.here.split()[0] for row in list_foreign_flags() if row.here.startswith("--")}
    assert named - OWN == set()
    assert len(NAMES - OWN) >= FEWEST
    assert {server for row in list_foreign_flags() for server in row.names} == set(SERVERS)


@pytest.mark.parametrize("name", sorted(OWN & NAMES))
def test_a_name_that_is_a_flag_here_is_not_called_another(name: str) -> None:
    message = of_others(name)
    assert message is not None and f"here it is {name}" in message


def test_a_meaning_is_printed_once_for_each_server() -> None:
    for server in SERVERS:
        names = [name for row in list_foreign_flags() for name in row.names.get(server, "").split()]
        assert sorted(names) == sorted(set(names)), server


def test_the_page_has_the_table_of_each_server() -> None:
    page = coming_from_page.PAGE.read_text()
    assert page == coming_from_page.rendered(page), "run `python -m tests.coming_from_page`"
    row = "| `--decode-concurrency` | `--completion-batch-size N`"
    assert row in coming_from_page.table_of((MLX_LM,))
    shown = {server for servers in coming_from_page.TABLES for server in servers}
    assert shown == set(SERVERS) - {VLLM_MLX}


@pytest.mark.parametrize(("name", "remedy"), sorted(FOREIGN_COMMANDS.items()))
def test_a_command_of_another_program_is_refused_with_a_remedy(name: str, remedy: str) -> None:
    outcome = CliRunner().invoke(cli.main, [name, "qwen3"])
    assert outcome.exit_code == USAGE_ERROR
    assert outcome.stderr == f"trouper: there is no command {name}; {remedy}\n"
    for here in re.findall(r"`trouper ([a-z ]+)", remedy):
        assert CliRunner().invoke(cli.main, [*here.split(), "--help"]).exit_code == 0
