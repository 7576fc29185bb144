"""`just agents [NAME ...]`: install coding agents, let each edit a file with each family's format,
and write a table.

python -m tests.agents --family qwen3_5 codex claude
python -m tests.agents --words 100000 --prefill-rate 2000 --context 262144 claude pi
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import attrs

from tests.agents.install import version
from tests.agents.programs import AGENTS
from tests.agents.sessions import Session, run
from tests.agents.shapes import save
from tests.scripted.families import FAMILIES

HEADER = """\
| agent | version | family | ended with the file edited | requests | refused | first prompt | later prompts from the cache | of the prompt before | longest silence |
|---|---|---|---|---|---|---|---|---|---|"""


def report(session: Session) -> str:
    """One row of the table, and a comment for what went wrong."""
    later = session.later
    cells = (
        session.agent,
        version(session.agent),
        session.family,
        "yes" if session.ok else "**no**",
        len(session.turns),
        len(session.refused),
        max((turn.prompt for turn in session.turns if not turn.known), default=0),
        f"{100 * min(turn.share for turn in later):.1f} %" if later else "",
        f"{100 * min(turn.kept for turn in later):.1f} %" if later else "",
        f"{session.silence_s:.1f} s",
    )
    notes = list(session.refused)
    if not session.ok:
        notes.append(
            f"edited {session.edited}, exit code {session.exit_code}, answered {session.answered}"
        )
        notes.append(session.output[-1500:])
    row = "| " + " | ".join(map(str, cells)) + " |"
    return "\n".join([row, *(f"<!-- {note} -->" for note in notes)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="just agents")
    parser.add_argument("agents", nargs="*", metavar="NAME", help=", ".join(AGENTS))
    parser.add_argument("--family", action="append", choices=sorted(FAMILIES), help="default: all")
    parser.add_argument("--words", type=int, default=0, help="so many words before the task")
    parser.add_argument(
        "--prefill-rate", type=float, default=0.0, help="prompt tokens a second; 0: at once"
    )
    parser.add_argument("--context", type=int, default=131_072, help="tokens that the model holds")
    parser.add_argument(
        "--save-bodies", action="store_true", help="keep what the agents send for the tests"
    )
    parser.add_argument("--json", type=Path, help="write every session into this file")
    given = parser.parse_args()
    if unknown := set(given.agents) - set(AGENTS):
        parser.error(f"no such agent: {', '.join(sorted(unknown))}; there are {', '.join(AGENTS)}")
    if given.words and (mute := [name for name in given.agents if AGENTS[name].piped is None]):
        parser.error(f"--words goes by stdin, which {', '.join(mute)} does not read a task from")
    sessions = []
    print(HEADER)  # noqa: T201
    for agent in given.agents or [
        name for name, program in AGENTS.items() if program.piped or not given.words
    ]:
        for family in given.family or FAMILIES:
            sessions.append(
                run(
                    agent,
                    family,
                    words=given.words,
                    prefill_rate=given.prefill_rate,
                    context=given.context,
                )
            )
            print(report(sessions[-1]), flush=True)  # noqa: T201
            if given.save_bodies:
                save(agent, sessions[-1].bodies)
    if given.json is not None:
        given.json.write_text(
            json.dumps([attrs.asdict(session) for session in sessions], indent=1) + "\n", "utf-8"
        )
    return int(not all(session.ok for session in sessions))


if __name__ == "__main__":
    sys.exit(main())
