"""`just agents [NAME ...]`: install coding agents, let each edit a file with each family's format,
and write a table.

python -m tests.agents --family qwen3_5 codex claude
python -m tests.agents --words 100000 --prefill-rate 2000 --context 262144 claude pi
python -m tests.agents --terminal --family qwen3
python -m tests.agents --fill --context 32768 opencode
python -m tests.agents --fill --max-prompt 30000 opencode
python -m tests.agents --router haproxy --kill-after 4 --family qwen3 claude codex opencode
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import median
from subprocess import CalledProcessError

import attrs

from tests.agents.install import install, version
from tests.agents.programs import AGENTS
from tests.agents.sessions import Session, run
from tests.agents.shapes import save
from tests.replicas.scripted_servers import ROUTERS
from tests.scripted.families import FAMILIES
from trouper.cli.agents.agent import FirstPrompt, first_prompts
from trouper.cli.commands.connect import AGENTS as CONNECTED

FIRST_PROMPTS = Path(__file__).parents[2] / "trouper" / "cli" / "agents" / "first_prompts.json"

HEADER = """\
| agent | version | family | ended with the file edited | requests | refused | first prompt | later prompts from the cache | of the prompt before | longest silence |
|---|---|---|---|---|---|---|---|---|---|"""


def report(session: Session, *, behind_router: bool = False) -> str:
    """One row of the table, and a comment for what went wrong."""
    later = session.later
    cells = (
        session.agent,
        version(session.agent),
        session.family,
        "yes" if session.ok else "**no**",
        len(session.turns),
        len(session.refused),
        session.first_prompt,
        f"{100 * min(turn.share for turn in later):.1f} %" if later else "",
        f"{100 * min(turn.kept for turn in later):.1f} %" if later else "",
        f"{session.silence_s:.1f} s",
    )
    notes = [*session.refused, *session.warned]
    if len(session.servers) > 1 or behind_router:
        notes.append(f"requests of each server: {session.servers}")
    if not session.ok:
        notes.append(
            f"edited {session.edited}, exit code {session.exit_code}, answered {session.answered}"
        )
        notes.append(session.output[-1500:])
    row = "| " + " | ".join(map(str, cells)) + " |"
    return "\n".join([row, *(f"<!-- {note} -->" for note in notes)])


FILLED = """\
| agent | version | went on with a shorter conversation | requests | refused | longest prompt |
|---|---|---|---|---|---|"""


def filled(session: Session) -> str:
    """A row of an agent whose context became full; what it wrote, if it did not go on."""
    longest = max((turn.prompt for turn in session.turns), default=0)
    cells = (
        session.agent,
        version(session.agent),
        "yes" if session.shortened else "**no**",
        len(session.turns),
        len(session.refused),
        f"{longest:,}",
    )
    notes = () if session.shortened else (*session.refused, session.output[-1500:])
    row = "| " + " | ".join(map(str, cells)) + " |"
    return "\n".join([row, *(f"<!-- {note} -->" for note in notes)])


SUMMARY = """
| agent | version | ended with the file edited | first prompt | later prompts from the cache: median (least) | tokens that were sent before and came from the cache, at least |
|---|---|---|---|---|---|"""


def summary(agent: str, sessions: Sequence[Session]) -> str:
    """One row of docs/compatibility.md: an agent with all families."""
    first = sorted({session.first_prompt for session in sessions})
    later = [turn for session in sessions for turn in session.later]
    shares = [100 * turn.share for turn in later]
    cells = (
        agent,
        version(agent),
        f"{sum(session.ok for session in sessions)} of {len(sessions)}",
        " to ".join(f"{tokens:,}" for tokens in dict.fromkeys((first[0], first[-1]))),
        f"{median(shares):.1f} % ({min(shares):.1f} %)" if later else "",
        f"{100 * min(turn.kept for turn in later):.1f} %" if later else "",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def save_first_prompts(sessions: Sequence[Session]) -> None:
    """Keep the longest first prompt of each agent that ended well, for `trouper connect`. Families
    that the same version was tried with before count, too."""
    kept = dict(first_prompts())
    for agent, group in groupby(sessions, lambda session: session.agent):
        ended = list(group)
        if agent in CONNECTED and all(session.ok for session in ended):
            tokens, families = max(session.first_prompt for session in ended), len(ended)
            before = kept.get(agent)
            if before is not None and before.version == version(agent):
                tokens = max(tokens, before.tokens)
                families = max(families, before.families)
            kept[agent] = FirstPrompt(
                version=version(agent),
                date=datetime.now(UTC).date().isoformat(),
                families=families,
                tokens=tokens,
            )
    ordered = {name: attrs.asdict(kept[name]) for name in CONNECTED if name in kept}
    FIRST_PROMPTS.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


def refuse_impossible(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    if unknown := set(flags.agents) - set(AGENTS):
        parser.error(f"no such agent: {', '.join(sorted(unknown))}; there are {', '.join(AGENTS)}")
    if flags.save_prompts and (flags.words or flags.fill):
        parser.error("--save-prompts is for prompts without --words and --fill")
    if flags.terminal and (unseen := [name for name in flags.agents if not AGENTS[name].dialogs]):
        parser.error(f"--terminal: the dialogs of {', '.join(unseen)} are not known")
    if flags.words and (mute := [name for name in flags.agents if AGENTS[name].piped is None]):
        parser.error(f"--words goes by stdin, which {', '.join(mute)} does not read a task from")


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
        "--max-prompt", type=int, default=0, help="longer prompts are refused; agents do not know"
    )
    parser.add_argument(
        "--fill",
        action="store_true",
        help="long results until the conversation was made shorter, in place of the task",
    )
    parser.add_argument(
        "--save-bodies", action="store_true", help="keep what the agents send for the tests"
    )
    parser.add_argument(
        "--save-prompts",
        action="store_true",
        help="keep how long the first prompts are, for `trouper connect` and docs/agents.md",
    )
    parser.add_argument(
        "--terminal", action="store_true", help="in a terminal (tmux), as a person uses them"
    )
    parser.add_argument("--router", choices=ROUTERS, default="", help="before two servers")
    parser.add_argument("--policy", default="cache_aware", help="round_robin: in turns")
    parser.add_argument(
        "--kill-after", type=int, default=0, help="kill the server of this request after it"
    )
    parser.add_argument("--json", type=Path, help="write every session into this file")
    flags = parser.parse_args()
    words = flags.words
    refuse_impossible(parser, flags)
    sessions: list[Session] = []
    missing: list[str] = []
    print(FILLED if flags.fill else HEADER)  # noqa: T201
    for agent in flags.agents or [
        name
        for name, program in AGENTS.items()
        if (program.piped or not words) and (program.dialogs or not flags.terminal)
    ]:
        try:
            install(agent)
        except CalledProcessError as error:
            # A version of Python or a registry may be out of reach; the other agents are played.
            missing.append(agent)
            print(f"<!-- {agent} cannot be installed here: {error} -->", flush=True)  # noqa: T201
            continue
        for family in flags.family or FAMILIES:
            sessions.append(
                run(
                    agent,
                    family,
                    words=words,
                    prefill_rate=flags.prefill_rate,
                    context=flags.context,
                    max_prompt=flags.max_prompt,
                    fill=flags.fill,
                    router=flags.router,
                    policy=flags.policy,
                    kill_after=flags.kill_after,
                    terminal=flags.terminal,
                )
            )
            row = (
                filled(sessions[-1])
                if flags.fill
                else report(sessions[-1], behind_router=bool(flags.router))
            )
            print(row, flush=True)  # noqa: T201
            if flags.save_bodies:
                save(agent, sessions[-1].bodies)
        if flags.save_prompts:
            save_first_prompts(sessions)
    if not flags.fill:
        print(SUMMARY)  # noqa: T201
        for agent, group in groupby(sessions, lambda session: session.agent):
            print(summary(agent, list(group)))  # noqa: T201
    if flags.json is not None:
        flags.json.write_text(
            json.dumps([attrs.asdict(session) for session in sessions], indent=1) + "\n", "utf-8"
        )
    ended_well = all(one.shortened if flags.fill else one.ok for one in sessions)
    return int(bool(missing) or not ended_well)


if __name__ == "__main__":
    sys.exit(main())
