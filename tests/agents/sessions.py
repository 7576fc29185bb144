"""Starts an agent for one task with a scripted server, and says what became of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from tests.agents import edit_task
from tests.agents.install import install, search_path
from tests.agents.programs import AGENTS, TASK, URL
from tests.agents.shapes import shapes
from tests.agents.terminal import Terminal, converse
from tests.replicas.scripted_servers import scripted_servers
from tests.scripted.process import ROOT, recorded

SCRIPT = "tests.agents.edit_task:script"
FULL_CONTEXT = "tests.agents.full_context:script"
LIMIT_S = 300.0
QUIET = {
    "NO_PROXY": "127.0.0.1",
    "no_proxy": "127.0.0.1",
    "DO_NOT_TRACK": "1",
    "NO_COLOR": "1",
    "CI": "1",
    "ANONYMIZED_TELEMETRY": "false",
    "DISABLE_TELEMETRY": "1",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}
"""No telemetry and no updates; nothing but the loopback interface."""
WARNINGS = (
    "Defaulting to fallback metadata",
    "unrecognized_model",
    "is not in the built-in catalog",
)
"""Of Codex, Claude Code and Copilot CLI, about a model that they do not know"""


@attrs.frozen
class Turn:
    """One request of a session. `known`: how many tokens the prompt before it in the same
    conversation has that were given and not generated; 0 if it begins one."""

    path: str
    prompt: int
    cached: int
    generated: int
    known: int = 0

    @property
    def share(self) -> float:
        """Part of the prompt that came from the cache."""
        return self.cached / max(1, self.prompt)

    @property
    def kept(self) -> float:
        """Part of `known` that came from the cache."""
        return min(self.cached, self.known) / max(1, self.known)


@attrs.frozen(kw_only=True)
class Session:
    """What became of a task."""

    agent: str
    family: str
    edited: bool
    exit_code: int | None
    """None: it was still running when its time was over."""
    answered: bool
    """The agent's output has the answer's last words."""
    refused: Sequence[str] = ()
    unfinished: int = 0
    """Answers that the agent did not read to the end."""
    ignored: Sequence[str] = ()
    turns: Sequence[Turn] = ()
    silence_s: float = 0.0
    """The longest time without an event that clients count."""
    seconds: float = 0.0
    output: str = ""
    warned: Sequence[str] = ()
    """Lines of the output that doubt the model"""
    servers: Sequence[int] = ()
    """How many requests each server answered"""
    bodies: Sequence[Mapping[str, Any]] = attrs.field(default=(), repr=False)
    """The latest request of each of its conversations, as `shapes` says."""

    @property
    def ok(self) -> bool:
        ended = self.edited and self.exit_code == 0 and self.answered
        return ended and not self.refused and not self.warned

    @property
    def shortened(self) -> bool:
        """It ended after its context was full; nothing else was refused."""
        other = [line for line in self.refused if "context_length_exceeded" not in line]
        return self.answered and not other

    @property
    def first_prompt(self) -> int:
        """Tokens of the longest prompt that begins a conversation."""
        return max((turn.prompt for turn in self.turns if not turn.known), default=0)

    @property
    def later(self) -> list[Turn]:
        """Turns that go on with a conversation."""
        return [turn for turn in self.turns if turn.known]


def run(
    agent: str,
    family: str = "qwen3",
    *,
    words: int = 0,
    prefill_rate: float = 0.0,
    context: int = 131_072,
    max_prompt: int = 0,
    fill: bool = False,
    router: str = "",
    policy: str = "cache_aware",
    kill_after: int = 0,
    terminal: bool = False,
) -> Session:
    """Let an agent edit a file; with `terminal` as a person would. With `words` so many of a text
    come before the task, by stdin. `prefill_rate`: prompt tokens a second, 0: no time. `context`:
    tokens that the model holds. Longer prompts than `max_prompt` are refused, of which the agent
    knows nothing. With `fill` the task does not end before the agent has made its conversation
    shorter. With a `router` two servers answer; `kill_after`: the server of that request is killed
    then."""
    install(agent)
    with tempfile.TemporaryDirectory(
        prefix="agent-", dir=Path.cwd().parent, ignore_cleanup_errors=True
    ) as name:
        home = Path(name)
        work, record = home / "work", home / "record.jsonl"
        work.mkdir()
        (work / "greeting.py").write_text(edit_task.BEFORE + "\n", "utf-8")
        (work / "check.py").write_text(edit_task.CHECK, "utf-8")
        flags = (
            "--family",
            family,
            "--script",
            FULL_CONTEXT if fill else SCRIPT,
            "--prefill-rate",
            str(prefill_rate),
            "--context",
            str(context),
            *(("--set", f"max_prompt_tokens={max_prompt}") if max_prompt else ()),
        )
        began = time.monotonic()
        servers = scripted_servers(
            router, *flags, record=record, policy=policy, kill_after=kill_after
        )
        with variable(edit_task.DIRECTORY, str(work)), servers as url:
            if terminal:
                exit_code, output = play_in_terminal(agent, url, home)
            else:
                exit_code, output = _ran(agent, url, home, words)
        text = (work / "greeting.py").read_text("utf-8")
        return attrs.evolve(
            _observed(record, str(home)),
            agent=agent,
            family=family,
            edited=text.strip() == edit_task.AFTER,
            exit_code=exit_code,
            answered=edit_task.FINAL in output,
            seconds=time.monotonic() - began,
            output=output,
            warned=[line for line in output.splitlines() if any(text in line for text in WARNINGS)],
        )


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _ran(agent: str, url: str, home: Path, words: int) -> tuple[int | None, str]:
    program = AGENTS[agent]
    arguments: Sequence[str] = program.arguments if not words else program.piped or ()
    line = [part.replace(TASK, edit_task.TASK) for part in arguments]
    stdin = f"{'The quick brown fox ' * (words // 4)}\n\n{edit_task.TASK}" if words else ""
    return play(agent, line, url, home, stdin)


def play(
    agent: str, arguments: Sequence[str], url: str, home: Path, stdin: str = ""
) -> tuple[int | None, str]:
    """Start the agent in `home`/work with the server at `url`. `stdin`: its stdin. Returns the exit
    code, None if its time was over, and what it wrote."""
    line, environment = started(agent, arguments, url, home)
    process = subprocess.Popen(
        line,
        cwd=home / "work",
        env=environment,
        text=True,
        errors="replace",
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        output, _ = process.communicate(stdin, LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, _end(process)
    _end(process)
    return process.returncode, output


def started(
    agent: str, arguments: Sequence[str], url: str, home: Path
) -> tuple[list[str], dict[str, str]]:
    """The command line, and the environment."""
    program = AGENTS[agent]
    line = [part.replace(URL, url) for part in arguments]
    if program.connected:
        connect = "import sys; from trouper.cli import main; main()"
        line = [sys.executable, "-c", connect, "connect", "--url", url, "--run", agent, "--", *line]
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")
    }
    environment |= {
        **QUIET,
        **{name: value.replace(URL, url) for name, value in program.variables.items()},
        "HOME": str(home),
        "PWD": str(home / "work"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PATH": search_path(agent),
        "PYTHONPATH": str(ROOT) if program.connected else "",
    }
    return line, environment


def play_in_terminal(agent: str, url: str, home: Path) -> tuple[int | None, str]:
    """As `play`, without arguments and without what says that nobody is there. 0: it ended with the
    answer, and waits for the next task."""
    dialogs = AGENTS[agent].dialogs
    assert dialogs is not None, f"{agent} is not played in a terminal"
    line, environment = started(agent, (), url, home)
    for name in ("CI", "NO_COLOR", "TMUX"):
        environment.pop(name, None)
    terminal = Terminal(home / "tmux")
    terminal.start(line, home / "work", environment)
    try:
        ended = converse(terminal, dialogs, edit_task.TASK, edit_task.FINAL, LIMIT_S)
        return 0 if ended else None, terminal.screen()
    finally:
        terminal.close()


def _end(process: subprocess.Popen[str]) -> str:
    """End what the agent has left behind, a daemon among it, and return what it wrote until
    then."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return ""
    return process.communicate()[0] or ""


def _observed(record: Path, home: str) -> Session:
    lines = [line for line in recorded(record) if line["method"] == "POST"]
    tokens = {line["request_id"]: line for line in recorded(record, "request")}
    return Session(
        agent="",
        family="",
        edited=False,
        exit_code=None,
        answered=False,
        refused=[
            f"{line['path']}: {line['status']} {line['answer'][:400]}"
            for line in lines
            if line["status"] >= 400
        ],
        unfinished=sum(not line["ended"] for line in lines),
        ignored=sorted(
            {
                name
                for line in lines
                for name in _names(line["headers"].get("x-trouper-ignored", ""))
            }
        ),
        turns=list(_turns(lines, tokens)),
        servers=sorted(Counter(line["pid"] for line in lines).values()),
        bodies=list(shapes(record, home)),
        silence_s=max((line["event_silence_s"] for line in lines), default=0.0),
    )


def _names(header: str) -> list[str]:
    return [name.strip() for name in header.split(",") if name.strip()]


@attrs.frozen
class _Before:
    """A request that others may go on with. `given`: the tokens of its prompt that no answer had
    generated."""

    texts: Sequence[str]
    prompt: int
    given: int
    generated: int


def _turns(
    lines: Sequence[Mapping[str, Any]], tokens: Mapping[str, Mapping[str, Any]]
) -> Iterator[Turn]:
    """A request goes on with the latest one whose conversation begins as its own."""
    seen: list[_Before] = []
    for line in lines:
        counted = tokens.get(line["headers"].get("x-request-id", ""))
        if counted is None or line["status"] >= 400:
            continue
        prompt, texts = counted["prompt_tokens"], _texts(json.loads(line["body"]))
        last = max(
            (one for one in seen if _continues(texts, one.texts)),
            key=lambda one: one.prompt,
            default=None,
        )
        known, answers = (
            (0, 0) if last is None else (last.given, last.prompt - last.given + last.generated)
        )
        seen.append(_Before(texts, prompt, prompt - answers, counted["generated_tokens"]))
        yield Turn(
            line["path"], prompt, counted["cached_tokens"], counted["generated_tokens"], known
        )


def _continues(texts: Sequence[str], before: Sequence[str]) -> bool:
    return len(before) < len(texts) and texts[: len(before)] == before


def _texts(body: Mapping[str, Any]) -> list[str]:
    """A text for each message or item, without what clients write another way in the next turn."""
    messages = body.get("messages") or body.get("input") or ()
    return [json.dumps(_bare(message), sort_keys=True) for message in messages]


def _bare(value: Any) -> Any:
    """A part without marks of what to cache. A single text is the same with a type and without."""
    if isinstance(value, list):
        parts = [_bare(part) for part in value]
        return parts[0]["text"] if len(parts) == 1 and _is_text(parts[0]) else parts
    if isinstance(value, dict):
        return {key: _bare(part) for key, part in value.items() if key != "cache_control"}
    return value


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.keys() == {"type", "text"}
