"""Flags and variables of other servers (foreign_flags.toml), and what each is here: for errors and
for docs/coming-from.md."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import attrs
import click


@attrs.frozen(eq=False, kw_only=True)
class ForeignFlag:
    """Names of one thing in other servers, by server, parted by blanks."""

    here: str = ""
    """The flag of `trouper serve`, with its value; empty if there is none."""
    remark: str = ""
    names: Mapping[str, str]

    def meaning(self, quote: str = "") -> str:
        """What the thing is here. `quote`: around the flag."""
        if not self.here:
            return self.remark
        flag = f"{quote}{self.here}{quote}"
        return f"{flag} ({self.remark})" if self.remark else flag


@cache
def list_foreign_flags() -> tuple[ForeignFlag, ...]:
    text = Path(__file__).with_suffix(".toml").read_text("utf-8")
    return tuple(ForeignFlag(**flag) for flag in tomllib.loads(text)["flags"])


HERE = "here it is `trouper {}`"
ENDS = "Ctrl-C ends a server, and the page at / unloads a model"
LOG = "standard error has the log, and the page at / the requests"
UPDATE = "`uv tool`, pipx or pip does that, as it installed trouper (packaging/README.md)"
# Commands of ollama and of LM Studio's `lms`.
FOREIGN_COMMANDS = {
    "pull": HERE.format("models pull"),
    "get": HERE.format("models pull"),
    "list": HERE.format("models ls"),
    "ls": HERE.format("models ls"),
    "show": HERE.format("models info"),
    "rm": HERE.format("models rm"),
    "ps": HERE.format("top"),
    "status": HERE.format("top"),
    "server": HERE.format("serve"),
    "load": HERE.format("serve"),
    "help": HERE.format("--help"),
    "version": HERE.format("--version"),
    "stop": ENDS,
    "unload": ENDS,
    "create": "a settings file has a table for each model, and system prompts are the client's",
    "cp": "`trouper serve --served-model-name NAME` gives a model another name",
    "import": "`trouper serve DIR` takes a directory where it is",
    "push": "nothing is uploaded here",
    "log": LOG,
    "logs": LOG,
    "config": HERE.format("serve --print-config"),
    "update": UPDATE,
    "upgrade": UPDATE,
    "uninstall": UPDATE,
}


def _names() -> Iterator[tuple[str, str, ForeignFlag]]:
    for row in list_foreign_flags():
        for server, names in row.names.items():
            yield from ((name, server, row) for name in names.split())


def of_others(name: str) -> str | None:
    """Return what a name is elsewhere and here; None for a name that no other server has."""
    rows = [(server, row) for each, server, row in _names() if each == name]
    if not rows:
        return None
    owners = " and ".join(dict.fromkeys(server for server, _ in rows))
    meanings = dict.fromkeys(row for _, row in rows)
    meaning = ", or ".join(f"here it is {row.meaning()}" for row in meanings if row.here)
    meaning = meaning or "; ".join(row.remark for row in meanings)
    return f"{name} is a flag of {owners}; {meaning}"


class NameOfAnother(click.UsageError):
    """A flag or a command of another server. The message is one line and names the remedy."""


def require_own(error: click.NoSuchOption, arguments: Sequence[str]) -> None:
    """Raise `NameOfAnother` for a flag of another server. click names only the first letter of a
    word such as -ngl, so the word is looked for in `arguments`."""
    words = (word.partition("=")[0] for word in arguments)
    typed = [word for word in words if word.startswith(error.option_name)]
    for name in (*typed, error.option_name):
        if meaning := of_others(name):
            raise NameOfAnother(meaning, error.ctx) from error
