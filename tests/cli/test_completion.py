"""`trouper completion`: the shell's own script, asked as the shell asks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner

from trouper import cli

PROGRAM = Path(sys.executable).parent / "trouper"


def test_neither_help_nor_a_completion_imports_the_server() -> None:
    """A shell asks at each Tab. Found by use: a name that one check needs had the HTTP server
    imported, which took most of a second."""
    code = "import sys, trouper.cli; print(*{name.partition('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", code]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "click" in loaded
    assert loaded.isdisjoint(
        {"quart", "flask", "hypercorn", "numpy", "mlx", "mlx_lm", "transformers", "huggingface_hub"}
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_it_can_read(shell: str) -> None:
    script = CliRunner().invoke(cli.main, ["completion", shell]).stdout
    assert "_TROUPER_COMPLETE" in script
    if program := shutil.which(shell):
        assert subprocess.run([program, "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.skipif(
    not PROGRAM.exists() or not shutil.which("bash"), reason="needs bash and the installed command"
)
@pytest.mark.parametrize(
    ("words", "expected"),
    [(("ser",), {"serve"}), (("serve", "--kv-"), {"--kv-bits", "--kv-group-size", "--kv-memory"})],
)
def test_bash_completes(words: tuple[str, ...], expected: set[str], tmp_path: Path) -> None:
    """Also where a settings file is wrong: a completion says nothing about it."""
    (tmp_path / "trouper.toml").write_text("wrong =")
    script = (
        f'eval "$(trouper completion bash)"; COMP_WORDS=(trouper {" ".join(words)}); '
        f"COMP_CWORD={len(words)}; "
        '_trouper_completion trouper; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    run = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PATH": f"{PROGRAM.parent}:/usr/bin:/bin"},
    )
    assert set(run.stdout.split()) == expected, run.stderr


@pytest.mark.parametrize(
    ("flag", "begun", "offered"),
    [
        (
            "--speculation",
            "",
            [("plain", choice) for choice in ("auto", "ngram", "draft_model", "mtp", "off")],
        ),
        ("--speculation", "n", [("plain", "ngram")]),
        ("--kv-bits", "", [("plain", "8"), ("plain", "4"), ("plain", "0")]),
        ("--tp-reduce-dtype", "f", [("plain", "float32")]),
        ("--log-level", "d", [("plain", "debug")]),
        ("--model", "/mod", [("dir", "/mod")]),
        ("--adapter-path", "x", [("dir", "x")]),
        ("--ssd-cache-dir", "x", [("dir", "x")]),
        ("--api-key-file", "x", [("file", "x")]),
        ("--port", "8", []),
    ],
)
def test_what_a_shell_is_offered_for_a_value(
    flag: str, begun: str, offered: list[tuple[str, str]]
) -> None:
    found = BashComplete(cli.main, {}, "trouper", "_TROUPER_COMPLETE").get_completions(
        ["serve", flag], begun
    )
    assert [(one.type, one.value) for one in found] == offered
