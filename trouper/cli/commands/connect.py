"""`trouper connect`: set up a client so that it uses a running server."""

from __future__ import annotations

import difflib
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, NoReturn
from urllib.parse import quote

import attrs
import click
import httpx2

from trouper.cli.agents.agent import (
    Agent,
    RunFile,
    ServedModel,
    Setup,
    first_prompts,
    instructions,
)
from trouper.cli.agents.clients import OTHER_CLIENTS
from trouper.cli.agents.coding_agents import CODING_AGENTS
from trouper.cli.agents.config_files import Change, ConfigFile, change_of, short
from trouper.cli.agents.merging import ConfigInvalid, Secret, plain
from trouper.cli.agents.undo import undo, write_with_backup
from trouper.cli.client import (
    NotTrouper,
    Where,
    client_of,
    read_as_trouper,
    refused_in_one_line,
)
from trouper.cli.exits import refuse
from trouper.cli.terminal_text import data_shown, line_shown, text_of, text_shown
from trouper.protocol.paths import absolute_only
from trouper.protocol.suggested_models import AGENT_TOKENS, SUGGESTED

AGENTS = {agent.name: agent for agent in (*CODING_AGENTS, *OTHER_CLIENTS)}
WITHOUT_CALLS = ("aider",)  # It reads changes out of the text.
SYNONYMS = {
    "cursor": "generic",
    "claude-code": "claude",
    "openwebui": "open-webui",
    "qwen-code": "qwen",
    "copilot-cli": "copilot",
    "mistral-vibe": "vibe",
    "kilocode": "kilo",
}


class AgentName(click.Choice[str]):
    """A name of an agent. The error names the nearest, or the recipe for any other client."""

    def __init__(self) -> None:
        super().__init__([*AGENTS, *SYNONYMS])

    def get_invalid_choice_message(
        self,
        value: Any,
        ctx: click.Context | None,  # noqa: ARG002
    ) -> str:
        near = difflib.get_close_matches(str(value), self.choices, 1)
        remedy = "`trouper connect` lists them, `trouper connect generic` is for any other client"
        if near:
            remedy = f"did you mean {near[0]}?"
        return f"{value!r} is not one of the agents that are known here; {remedy}"


@click.command
@client_of
@click.option(
    "--write", is_flag=True, help="Merge it into the client's own files; what else they hold stays."
)
@click.option("--dry-run", is_flag=True, help="Show what --write would change.")
@click.option(
    "--undo", is_flag=True, help="Take back what --write has changed; what was changed since stays."
)
@click.option(
    "--run", is_flag=True, help="Start the client so, once, with the arguments behind `--`."
)
@click.option("--name", help="Which of the server's models. Default: its first.")
@click.argument("agent", type=AgentName(), metavar="[AGENT]", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def connect(
    where: Where,
    /,
    *,
    agent: str | None,
    arguments: tuple[str, ...],
    name: str | None,
    **mode: bool,
) -> None:
    """Print what a client needs to use a running server: URL, model, context and output lengths, as
    the server says.

    Without AGENT, list the clients that are known.
    """
    if agent is None:
        _list(mode)
        return
    if sum(mode.values()) > 1:
        refuse("give one of --write, --dry-run, --undo and --run")
    if arguments and not mode["run"]:
        refuse(f"{arguments[0]!r} would be an argument of the client: give --run, which starts it")
    known = AGENTS[SYNONYMS.get(agent, agent)]
    if mode["undo"]:
        _undo(known)
        return
    _refuse_impossible(known, mode, arguments)
    found = find_model(where, name)
    served = found.served
    short = _short_context(known, served)
    if short and (mode["run"] or mode["write"]):
        refuse(short[0])  # A client that fills the screen would hide a warning.
    for warning in (*found.warnings, *_without_tools(known, found), *short):
        click.secho(f"trouper: {warning}", fg="yellow", err=True)
    setup = known.setup(served)
    if mode["write"] or mode["dry_run"]:
        _merge(known, setup.files, write=mode["write"])
        _remind(setup)
    elif mode["run"]:
        _run(known, setup, arguments)
    else:
        click.echo(instructions(known, served, setup), nl=False)


def _list(mode: Mapping[str, bool]) -> None:
    if flag := next((f"--{name.replace('_', '-')}" for name, given in mode.items() if given), None):
        refuse(f"{flag} is for one client: name it, as in `trouper connect claude {flag}`")
    for agent in AGENTS.values():
        click.echo(f"{agent.name:<12}{agent.title}")


def _refuse_impossible(agent: Agent, mode: Mapping[str, bool], arguments: tuple[str, ...]) -> None:
    if agent.why_no_write and (mode["write"] or mode["dry_run"]):
        refuse(agent.why_no_write)
    if mode["run"] and agent.why_no_run and not (agent.name == "generic" and arguments):
        refuse(agent.why_no_run)


def _without_tools(agent: Agent, found: FoundModel) -> tuple[str, ...]:
    if found.served.calls_tools or agent not in CODING_AGENTS or agent.name in WITHOUT_CALLS:
        return ()
    message = (
        f"{found.served.model} was not trained to call tools, so {agent.title} can change no file "
        f"with it: serve one that was, as `trouper serve {SUGGESTED[0].name}`"
    )
    return (message,)


def _short_context(agent: Agent, served: ServedModel) -> tuple[str, ...]:
    first, context = agent.first_prompt, served.context
    if first is None or first.needed <= context:
        return ()
    prompts = first_prompts()
    fitting = [name for name in AGENTS if name in prompts and prompts[name].needed <= context]
    message = (
        f"{agent.title}'s first prompt has about {first.tokens:,} tokens ({first.version}), and "
        f"this model holds {context:,} with files and answers: agents need {AGENT_TOKENS:,}, as "
        f"`trouper serve {SUGGESTED[0].name}` has; or raise --max-kv-size or --context-length if "
        "one of them is the limit"
    )
    return (f"{message}; agents that fit: {', '.join(fitting)}" if fitting else message,)


def _undo(agent: Agent) -> None:
    lines = 0
    try:
        for line in undo(agent.name):
            click.echo(line)
            lines += 1
    except (ConfigInvalid, OSError) as error:
        refuse(f"{error}; it was not changed")
    if not lines:
        click.echo(f"no file of {agent.title} was changed")


def _merge(agent: Agent, files: tuple[ConfigFile, ...], *, write: bool) -> None:
    # All files are read before the first is written.
    try:
        changes = [change_of(file) for file in files]
    except ConfigInvalid as invalid:
        refuse(f"{invalid}; nothing was changed")
    for change in changes:
        if not change.edits:
            click.echo(f"{short(change.path)}: nothing to change")
        elif write:
            _write(agent, change)
        else:
            click.echo(text_shown(change.diff()), nl=False)


def _write(agent: Agent, change: Change) -> None:
    try:
        backup = write_with_backup(agent.name, change)
    except OSError as error:
        refuse(f"{short(change.path)}: {error.strerror or error}; it was not changed")
    except ConfigInvalid as invalid:
        refuse(f"{invalid}; {short(change.path)} was not changed")
    click.echo(f"{short(change.path)}: {'written' if change.before is None else 'changed'}")
    for line in change.described():
        click.echo(f"  {line}")
    if backup is not None:
        click.echo(f"  as it was: {short(backup)}")


def _remind(setup: Setup) -> None:
    for name, value in setup.exports.items():
        if name not in os.environ:
            shown = "the server's key" if isinstance(value, Secret) else value
            click.echo(f"set {name} where the client starts: {shown}")
    for name in setup.keys_of_its_own:
        if not os.environ.get(name):
            click.echo(f"set {name} where it starts: a long random key, which its own clients send")


def _run(agent: Agent, setup: Setup, arguments: tuple[str, ...]) -> NoReturn:
    program, *more = (agent.program, *arguments) if agent.program else arguments
    path = shutil.which(program, path=absolute_only(os.environ.get("PATH", os.defpath)))
    if path is None:
        refuse(f"{program} is not installed{f': {agent.install}' if agent.install else ''}")
    _merge(agent, setup.merged_to_run, write=True)
    for file in setup.run_files:
        _rewrite(agent, file)
    environment = {name: value for name, value in os.environ.items() if name not in setup.unset}
    environment |= {name: plain(value) for name, value in setup.variables.items()}
    environment |= _new_keys(setup.keys_of_its_own)
    try:
        # The client that was named
        os.execve(path, [program, *setup.arguments, *more], environment)  # noqa: S606
    except OSError as error:
        refuse(f"{path} cannot be started: {error.strerror}")


def _new_keys(names: Iterable[str]) -> dict[str, str]:
    made = {name: f"sk-{secrets.token_urlsafe(24)}" for name in names if not os.environ.get(name)}
    for name, key in made.items():
        click.echo(f"{name}={key}    # made for this run; its clients send it")
    return made


def _rewrite(agent: Agent, file: RunFile) -> None:
    path = file.path(agent.name)
    try:
        path.unlink(missing_ok=True)
        change_of(ConfigFile(path, file.format, file.values)).write()
    except (ConfigInvalid, OSError) as error:
        refuse(f"{short(path)}: {error}")


NO_MODEL = '"model_not_found"'  # Trouper's own code of a 404: a model that has just gone.
SIGNS = "{}$"  # Clients refer to variables and files by these signs.


@attrs.frozen
class FoundModel:
    served: ServedModel
    warnings: tuple[str, ...] = ()


def find_model(where: Where, name: str | None) -> FoundModel:
    """Ask the server for a model, by default the first. An error ends the command."""
    with refused_in_one_line(where):
        where.say(", if it wants one")
        where = _with_key_if_needed(where)
        with where.client() as client:
            listed = _listed(client)
            model = _default(listed) if name is None else _named(client, name, listed)
            context = _context_of(client, model, listed)
            entry = _entry(client, model)  # Loaded by now: what it reads and calls is known.
            images = "image" in (entry.get("input_modalities") or ())
            warnings = _warnings(client, name, listed)
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    embedder = next((each for each in listed if listed[each].kind == "embedder"), "")
    served = ServedModel(
        where.url,
        model,
        context,
        where.key,
        now=now,
        images=images,
        calls_tools=entry.get("tool_calls") is not False,
        embedder=embedder,
    )
    return FoundModel(served, warnings)


def _with_key_if_needed(where: Where) -> Where:
    # No file should hold a needless key.
    keyless = attrs.evolve(where, key=None)
    with keyless.client() as client:
        if client.get("/v1/models").status_code != httpx2.codes.UNAUTHORIZED:
            return keyless
    if where.key is None:
        refuse(f"{where.url} wants an API key: give --api-key, or set TROUPER_API_KEY")
    with where.client() as client:
        if client.get("/v1/models").status_code == httpx2.codes.UNAUTHORIZED:
            refuse(
                f"{where.url} does not accept this API key: give another by --api-key, or "
                "TROUPER_API_KEY"
            )
    return where


@attrs.frozen
class ListedModel:
    context: int | None
    kind: str


Listed = Mapping[str, ListedModel]


def _default(listed: Listed) -> str:
    """The first that generates; without any, the first."""
    generators = (name for name, model in listed.items() if model.kind == "generator")
    return next(generators, next(iter(listed)))


def _listed(client: httpx2.Client) -> Listed:
    """The default comes first."""
    answer = client.get("/v1/models").raise_for_status()
    with read_as_trouper(client):
        found = answer.json()["data"]
        models = {
            _name(model["id"]): ListedModel(
                _count(model.get("max_model_len")), str(model.get("kind", "generator"))
            )
            for model in found
        }
        if not models:
            raise LookupError("no model is listed")
    return models


def _name(value: Any) -> str:
    """Refuse a name that clients read as a flag, a variable or a file ({file:PATH})."""
    name = str(value)
    if (
        name.startswith("-")
        or name != text_of(line_shown(name))
        or any(sign in name for sign in SIGNS)
    ):
        rule = f"a name has no {SIGNS}, and begins with no -"
        refuse(f"the server has a model {name!r}, which no client gets: {rule}")
    return name


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _named(client: httpx2.Client, name: str, listed: Listed) -> str:
    if name in listed:
        return name
    answer = client.get(f"/v1/models/{quote(name)}")
    if answer.status_code == httpx2.codes.NOT_FOUND:
        refuse(f"--name {name}: this server has {', '.join(listed)}")
    with read_as_trouper(client):
        return _name(answer.raise_for_status().json()["id"])


def _context_of(client: httpx2.Client, model: str, listed: Listed) -> int:
    """A model that is not loaded is loaded."""
    if model in listed and (context := listed[model].context):
        return context
    answer = client.post("/tokenize", json={"model": model, "prompt": "?"})
    if answer.status_code == httpx2.codes.NOT_FOUND and NO_MODEL not in answer.text:
        where = str(client.base_url).rstrip("/")
        raise NotTrouper(
            f"{where} is a router that does not say how many tokens {model} holds, or no Trouper: "
            "give --url of HAProxy before it, or of a server behind it; smg alone refuses Codex "
            "and Claude Code's tool search (docs/replicas.md)"
        )
    answer.raise_for_status()
    with read_as_trouper(client):
        return int(answer.json()["max_model_len"])


def _entry(client: httpx2.Client, model: str) -> Mapping[str, Any]:
    answer = client.get(f"/v1/models/{quote(model)}").raise_for_status()
    with read_as_trouper(client):
        return dict(answer.json())


def _warnings(client: httpx2.Client, name: str | None, listed: Listed) -> tuple[str, ...]:
    health = client.get("/health")
    with read_as_trouper(client):
        body = data_shown(health.json())
        status, detail = str(body["status"]), str(body.get("detail") or "")
    found = []
    if status != "ok":
        found.append(f"the server is {status}{f': {detail}' if detail else ''}")
    if name is None and len(listed) > 1:
        found.append(f"the server has {', '.join(listed)}; --name takes another than the first")
    return tuple(found)
