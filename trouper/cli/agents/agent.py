"""A client, its needs, and their description."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import attrs
import cattrs

from trouper.cli.agents.config_files import ConfigFile, short
from trouper.cli.agents.config_formats import Format
from trouper.cli.agents.merging import KEY_VARIABLE, Secret, plain
from trouper.protocol.paths import expanded, home_directory, xdg_directory
from trouper.protocol.settings import default_cache_dir

PROVIDER = "trouper"
NO_KEY = "none"
"""For a client that insists on a key where the server wants none"""
MAX_OUTPUT = 32768
OUTPUT_SHARE = 4
"""Clients reserve this part of the context for answers."""
WAIT_S = 900
"""Timeout for the next event. Slow machines prefill a long prompt in silence."""


@attrs.frozen
class ServedModel:
    url: str
    """Without /v1"""
    model: str
    context: int
    key: str | None = attrs.field(default=None, repr=False)
    now: str = "1970-01-01T00:00:00.000Z"
    """For clients that note when something was set"""
    images: bool = False
    calls_tools: bool = True
    embedder: str = ""
    """Name of a model for embeddings; "" if none is known."""

    @property
    def modalities(self) -> list[str]:
        return ["text", "image"] if self.images else ["text"]

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
        """Return a client's reference to a variable, if the server wants a key."""
        return NO_KEY if self.key is None else reference

    @property
    def key_variables(self) -> dict[str, str | Secret]:
        """The variable that clients' files refer to, if the server wants a key."""
        return {} if self.key is None else {KEY_VARIABLE: Secret(self.key)}

    @property
    def secret(self) -> str | Secret:
        """For clients that know no variables"""
        return NO_KEY if self.key is None else Secret(self.key)


@attrs.frozen
class RunFile:
    """A file of `--run`, in Trouper's own directory."""

    name: str
    format: Format
    values: Mapping[str, Any]

    def path(self, agent: str) -> Path:
        return run_dir(agent) / self.name


@attrs.frozen(kw_only=True)
class Setup:
    """`files`: the client's own; all else is for one run."""

    files: tuple[ConfigFile, ...] = ()
    variables: Mapping[str, str | Secret] = attrs.field(factory=dict)
    unset: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    run_files: tuple[RunFile, ...] = ()
    merged_to_run: tuple[ConfigFile, ...] = ()
    """Files of the client that `--run` must change, too"""
    notes: tuple[str, ...] = ()
    exports: Mapping[str, str | Secret] = attrs.field(factory=dict)
    """Needed at each start, also with the files written"""
    keys_of_its_own: tuple[str, ...] = ()
    """Variables of keys that a proxy wants of its clients"""


@attrs.frozen(kw_only=True)
class Agent:
    name: str
    title: str
    setup: Callable[[ServedModel], Setup]
    program: str | None = attrs.field(
        default=attrs.Factory(lambda agent: agent.name, takes_self=True)
    )
    install: str = ""
    why_no_write: str = ""
    why_no_run: str = ""

    @property
    def first_prompt(self) -> FirstPrompt | None:
        return first_prompts().get(self.name)


@attrs.frozen(kw_only=True)
class FirstPrompt:
    """A client's first prompt without files of a project, as `just agents` measured it."""

    version: str
    """The client's"""
    date: str
    families: int
    tokens: int
    """With the family that has the most"""

    @property
    def needed(self) -> int:
        """The context with which the client can work: answers take a share, results some."""
        return self.tokens * 3 // 2


@cache
def first_prompts() -> dict[str, FirstPrompt]:
    """By the client's name."""
    text = resources.files(__package__).joinpath("first_prompts.json").read_text("utf-8")
    return cattrs.structure(json.loads(text), dict[str, FirstPrompt])


def run_dir(agent: str) -> Path:
    return default_cache_dir() / "agents" / agent


def home(variable: str, default: str) -> Path:
    """Return the directory of the client. Raises `SettingsInvalid` for a user without a home
    directory."""
    return expanded(os.environ.get(variable) or str(home_directory() / default))


def xdg_config(name: str) -> Path:
    return xdg_directory("XDG_CONFIG_HOME", ".config") / name


def instructions(agent: Agent, served: ServedModel, setup: Setup) -> str:
    """Describe the setup for a person, without the key."""
    return "\n".join(_lines(agent, served, setup)) + "\n"


def _lines(agent: Agent, served: ServedModel, setup: Setup) -> Iterator[str]:
    yield (
        f"# {agent.title}: {served.model} at {served.url}, context {served.context}, output "
        f"{served.output}"
    )
    for file in setup.files:
        if file.summary:
            yield f"\n# {short(file.path)}: {file.summary}"
            continue
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
    for name, value in variables.items():
        if not isinstance(value, Secret):
            yield f"export {name}={shlex.quote(value)}"
        elif name == KEY_VARIABLE:
            yield f"export {name}=...    # the server's key"
        else:
            yield f'export {name}="${KEY_VARIABLE}"'
