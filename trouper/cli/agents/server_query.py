"""What a running server has: its models, their context, and whether it wants a key."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import attrs
import httpx2

from trouper.cli.agents.agent import ServedModel
from trouper.cli.client import Where, read_as_trouper, refused_in_one_line
from trouper.cli.exits import refuse
from trouper.cli.terminal_text import data_shown, line_shown

SIGNS = "{}$"
"""Signs by which clients refer to variables and files in their settings."""


@attrs.frozen
class FoundModel:
    """The model for the client, and what a person should know of the server."""

    served: ServedModel
    warnings: tuple[str, ...] = ()


def find_model(where: Where, name: str | None) -> FoundModel:
    """Ask the server for a model by its name, or for its default. Ends the command with one line if
    no server answers, if it wants another key, or has no such model."""
    with refused_in_one_line(where):
        where.say(", if it wants one")
        where = _with_key_if_needed(where)
        with where.client() as client:
            listed = _listed(client)
            model = next(iter(listed)) if name is None else _named(client, name, listed)
            context = listed.get(model) or _context_by_loading(client, model)
            warnings = _warnings(client, name, listed)
    now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return FoundModel(ServedModel(where.url, model, context, where.key, now), warnings)


def _with_key_if_needed(where: Where) -> Where:
    """Return the server with its key, or without one if it wants none, since a key that is not
    needed should stand in no file."""
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


def _listed(client: httpx2.Client) -> dict[str, int | None]:
    """Return the context of each model by name, the default first; None: it is not loaded."""
    answer = client.get("/v1/models").raise_for_status()
    with read_as_trouper(client):
        found = answer.json()["data"]
        models = {_name(model["id"]): _count(model.get("max_model_len")) for model in found}
        if not models:
            raise LookupError("no model is listed")
    return models


def _name(value: Any) -> str:
    """Return a model's name. Refuses one that clients would take for something else: a flag, or a
    variable or file that they put in its place, as opencode does with {file:PATH}."""
    name = str(value)
    if name.startswith("-") or name != line_shown(name) or any(sign in name for sign in SIGNS):
        rule = f"a name has no {SIGNS}, and begins with no -"
        refuse(f"the server has a model {name!r}, which no client gets: {rule}")
    return name


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _named(client: httpx2.Client, name: str, listed: dict[str, int | None]) -> str:
    """Return the id of a model by any of its names."""
    if name in listed:
        return name
    answer = client.get(f"/v1/models/{name}")
    if answer.status_code == httpx2.codes.NOT_FOUND:
        refuse(f"--name {name}: this server has {', '.join(listed)}")
    with read_as_trouper(client):
        return _name(answer.raise_for_status().json()["id"])


def _context_by_loading(client: httpx2.Client, model: str) -> int:
    """Return the context of a model that is not loaded: the server loads it to answer."""
    answer = client.post("/tokenize", json={"model": model, "prompt": "?"}).raise_for_status()
    with read_as_trouper(client):
        return int(answer.json()["max_model_len"])


def _warnings(
    client: httpx2.Client, name: str | None, listed: dict[str, int | None]
) -> tuple[str, ...]:
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
