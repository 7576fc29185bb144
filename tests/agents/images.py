"""`just agents-images [NAME ...]`: pictures that coding agents send.

A scripted model calls the tool by which each agent reads a picture; then the picture is in the
first prompt. The engine must get the pixels of the file. With `--trained` the model of
examples/shapes is asked what the picture in the first prompt shows. `--save` keeps the rows of
docs/agents.md. The exit status is 1 if a client sends a picture no more that it sent by those rows.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CalledProcessError

import attrs
import cattrs

from tests.agents import open_webui, trained_model
from tests.agents.image_sessions import ImageSession, Way, run
from tests.agents.image_task import READS
from tests.agents.install import install, install_program, program_version
from tests.agents.programs import AGENTS, Program
from tests.scripted.families import SEEING_FAMILIES

ROWS = Path(__file__).parent / "images.json"
CLIENTS: Mapping[str, Program] = {**AGENTS, open_webui.NAME: open_webui.PROGRAM}


@attrs.define(kw_only=True)
class ImageRow:
    """How an agent sends a picture. "" in `by_tool` and `in_prompt`: it did not."""

    version: str
    date: str
    tool: str
    by_tool: str = ""
    in_prompt: str = ""
    right: int = 0
    answers: int = 0
    """Pictures that the trained model was shown; `right`: those that it named."""


def rows() -> dict[str, ImageRow]:
    """Of the latest runs, by the agent's name."""
    if not ROWS.exists():
        return {}
    return cattrs.structure(json.loads(ROWS.read_text("utf-8")), dict[str, ImageRow])


def ways_of(client: str) -> Iterator[Way]:
    if client in READS:
        yield "tool"
    if client == open_webui.NAME or AGENTS[client].with_picture:
        yield "prompt"


def report(session: ImageSession) -> str:
    cells = (
        session.agent,
        program_version(session.agent, CLIENTS[session.agent]),
        session.family,
        session.way,
        "yes" if session.ok else "**no**",
        session.places,
    )
    row = "| " + " | ".join(cells) + " |"
    if session.ok:
        return row
    notes = (*session.refused, f"exit code {session.exit_code}", session.output[-1500:])
    return "\n".join([row, *(f"<!-- {note} -->" for note in notes)])


def play_client(client: str, families: list[str], *, trained: bool) -> ImageRow:
    is_page = client == open_webui.NAME
    row = ImageRow(
        version=program_version(client, CLIENTS[client]),
        date=datetime.now(UTC).date().isoformat(),
        tool=READS[client][0] if client in READS else "",
    )
    for way in ways_of(client):
        sessions = [
            open_webui.run(family) if is_page else run(client, family, way) for family in families
        ]
        print(*map(report, sessions), sep="\n", flush=True)
        places = sessions[0].places if all(session.ok for session in sessions) else ""
        if way == "tool":
            row.by_tool = places
        else:
            row.in_prompt = places
    if trained and row.in_prompt:
        answers = open_webui.answers() if is_page else trained_model.answers(client)
        row.right, row.answers = sum(answer.is_right for answer in answers), len(answers)
        print(f"<!-- {client}: {row.right} of {row.answers} right -->", flush=True)
        for answer in answers:
            if not answer.is_right:
                print(f"<!-- {answer.shape}: {answer.output[-500:]} -->", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(prog="just agents-images")
    parser.add_argument("clients", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    parser.add_argument("--family", action="append", choices=sorted(SEEING_FAMILIES))
    parser.add_argument("--trained", action="store_true", help="ask the trained model, too")
    parser.add_argument("--save", action="store_true", help="keep the rows for docs/agents.md")
    flags = parser.parse_args()
    if unknown := set(flags.clients) - set(CLIENTS):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    print("| client | version | family | way | the picture arrived | as |")
    print("|---|---|---|---|---|---|")
    ended_well = True
    for client in flags.clients or [name for name in CLIENTS if [*ways_of(name)]]:
        try:
            install_client(client)
        except CalledProcessError as error:
            print(f"<!-- {client} cannot be installed here: {error} -->", flush=True)
            ended_well = False
            continue
        families = flags.family or [*SEEING_FAMILIES]
        row = play_client(client, families, trained=flags.trained)
        if sends_less(row, rows().get(client)):
            print(f"<!-- {client} sent the picture before -->", flush=True)
            ended_well = False
        if flags.save:
            save_row(client, row)
    return int(not ended_well)


def sends_less(row: ImageRow, before: ImageRow | None) -> bool:
    if before is None:
        return False
    by_tool = bool(before.by_tool) and not row.by_tool
    return by_tool or (bool(before.in_prompt) and not row.in_prompt)


def install_client(client: str) -> None:
    if client in AGENTS:
        install(client)
    else:
        install_program(client, CLIENTS[client])


def save_row(client: str, row: ImageRow) -> None:
    """Replace the client's row; without a trained model's answers those of the same version
    stay."""
    kept = rows()
    before = kept.get(client)
    if before is not None and not row.answers and before.version == row.version:
        row.right, row.answers = before.right, before.answers
    kept[client] = row
    ordered = {name: attrs.asdict(kept[name]) for name in CLIENTS if name in kept}
    ROWS.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
