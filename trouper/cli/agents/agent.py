"""A client, what it needs to use a server, and the server as it sees it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from trouper.cli.agents.config_files import ConfigFile, short
from trouper.cli.agents.config_formats import Format
from trouper.cli.agents.merging import KEY_VARIABLE, Secret, plain
from trouper.protocol.paths import expanded, home_directory, xdg_directory
from trouper.protocol.settings import default_cache_dir

PROVIDER = "trouper"
"""Name of the provider in the clients' files."""
NO_KEY = "none"
"""Stands for a key where a client insists on one and the server wants none."""
MAX_OUTPUT = 32768
OUTPUT_SHARE = 4
"""Part of the context that an answer may take: clients reserve so much of it, and compact when the
rest is full."""
WAIT_S = 900
"""How long a client should wait for the next event. A long prompt is prefilled in silence on slow
machines."""


@attrs.frozen
class ServedModel:
    """A server with one of its models, as it is given to a client."""

    url: str
    """The server's URL without /v1."""
    model: str
    context: int
    key: str | None = attrs.field(default=None, repr=False)
    """The API key, if the server wants one."""
    now: str = "1970-01-01T00:00:00.000Z"
    """The time, for clients that note when something was set."""

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def output(self) -> int:
        """Tokens that an answer may have."""
        return max(1, min(MAX_OUTPUT, self.context // OUTPUT_SHARE))

    @property
    def key_or_none(self) -> str:
        return NO_KEY if self.key is None else self.key

    def key_by(self, reference: str) -> str:
        """Return the client's way to name a variable, if the server wants a key."""
        return NO_KEY if self.key is None else reference

    @property
    def secret(self) -> str | Secret:
        """The key itself, for clients that know no variables."""
        return NO_KEY if self.key is None else Secret(self.key)


@attrs.frozen
class RunFile:
    """A file that `--run` writes into Trouper's own directory, and not into the client's."""

    name: str
    format: Format
    values: Mapping[str, Any]

    def path(self, agent: str) -> Path:
        return run_dir(agent) / self.name


@attrs.frozen(kw_only=True)
class Setup:
    """What a client needs. `files` are its own. The rest is for one run: variables, variables that
    must not be there, arguments, and files."""

    files: tuple[ConfigFile, ...] = ()
    variables: Mapping[str, str | Secret] = attrs.field(factory=dict)
    unset: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    run_files: tuple[RunFile, ...] = ()
    merged_to_run: tuple[ConfigFile, ...] = ()
    """Files of the client that `--run` must change, too, since it reads such values from nowhere
    else."""
    notes: tuple[str, ...] = ()
    exports: Mapping[str, str | Secret] = attrs.field(factory=dict)
    """Variables that must be set whenever the client is started, also with the files written."""
    keys_of_its_own: tuple[str, ...] = ()
    """Variables of the keys that the client wants of its own clients, as a proxy does. `--run`
    makes those that are not set."""


@attrs.frozen(kw_only=True)
class Agent:
    """A client that `trouper connect` knows."""

    name: str
    title: str
    setup: Callable[[ServedModel], Setup]
    program: str | None = None
    """The command that `--run` starts."""
    install: str = ""
    first_prompt: int = 0
    """Tokens of its first prompt, about, where that was measured. With less context the client
    cannot work."""
    why_no_write: str = ""
    why_no_run: str = ""


def run_dir(agent: str) -> Path:
    """Directory for what `--run` writes."""
    return default_cache_dir() / "agents" / agent


def home(variable: str, default: str) -> Path:
    """Return the directory that a client's variable names, else its default. Raises
    `SettingsInvalid` for a user without a home directory."""
    return expanded(os.environ.get(variable) or str(home_directory() / default))


def xdg_config(name: str) -> Path:
    return xdg_directory("XDG_CONFIG_HOME", ".config") / name


def instructions(agent: Agent, served: ServedModel, setup: Setup) -> str:
    """Return the text. It holds no key."""
    return "\n".join(_lines(agent, served, setup)) + "\n"


def _lines(agent: Agent, served: ServedModel, setup: Setup) -> Iterator[str]:
    yield (
        f"# {agent.title}: {served.model} at {served.url}, context {served.context}, output "
        f"{served.output}"
    )
    for file in setup.files:
        yield f"\n# {short(file.path)}"
        yield file.format.dump(plain(file.values, shown=True)).rstrip("\n")
    variables = setup.exports if setup.files else setup.variables
    if variables:
        yield "\n# variables"
        yield from exported(variables)
        yield from (f"unset {name}" for name in setup.unset if not setup.files)
    if setup.notes:
        yield ""
    yield from (f"# {note}" for note in setup.notes)
    yield ""
    if agent.why_no_write:
        yield f"# no --write; {agent.why_no_write}"
    else:
        yield (
            f"# trouper connect {agent.name} --write    merges this into the "
            f"file{'s' * (len(setup.files) > 1)}"
        )
    if agent.why_no_run:
        yield f"# no --run; {agent.why_no_run}"
    else:
        yield f"# trouper connect {agent.name} --run      starts {agent.program} so, once"


def exported(variables: Mapping[str, str | Secret]) -> Iterator[str]:
    """Yield the variables as a shell takes them. Keys are given by a reference to the variable that
    has the server's."""
    for name, value in variables.items():
        if not isinstance(value, Secret):
            yield f"export {name}={shlex.quote(value)}"
        elif name == KEY_VARIABLE:
            yield f"export {name}=...    # the server's key"
        else:
            yield f'export {name}="${KEY_VARIABLE}"'
