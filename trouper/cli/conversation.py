"""The state of `trouper chat` and its commands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import attrs

from trouper.cli.terminal_text import can_be_sent, text_shown

Part: TypeAlias = dict[str, Any]
Content: TypeAlias = str | list[Part]
"""Text, or pictures and text in OpenAI's form"""
Message: TypeAlias = dict[str, Any]
PART_TYPES = ("text", "image_url")
ROLES = ("system", "developer", "user", "assistant")
STREAMED = "answers are always streamed"

# Refused by /set, and why.
FIXED = {
    "messages": "the messages are what was said; /system, /undo and /clear change them",
    "stream": STREAMED,
    "stream_options": STREAMED,
    "model": "`/model NAME` does that",
}
MAX_TEXT_BYTES = 2**20
"""Of an attached file. Few contexts hold as much."""
MAX_SHOWN = 500
"""Characters of a part that /undo shows"""
COMMAND = re.compile(r"/[^/\s]*(\s|$)")  # A command is one word; `/usr/bin` is a question.


class CommandRefused(Exception):
    """The message says why a command cannot be followed."""


class EndOfChat(Exception):
    """Raised by /quit."""


class AskAgain(Exception):
    """Raised by /retry, with the question."""

    def __init__(self, question: Content) -> None:
        super().__init__(question)
        self.question = question


class Checks(Protocol):
    """Both raise `CommandRefused`."""

    def require_model(self, name: str) -> None: ...

    def require_parameter(self, name: str, value: Any) -> None: ...


class Chats(Protocol):
    """Conversations of earlier sessions."""

    def listed(self) -> str: ...

    def resume(self, number: str) -> Conversation:
        """Raises `CommandRefused`."""

    def begin_another(self) -> None: ...


@attrs.define
class Conversation:
    """The last message is the assistant's, unless a question is open."""

    system: str = ""
    model: str | None = None  # None: the server's default
    parameters: dict[str, Any] = attrs.field(factory=dict)
    messages: list[Message] = attrs.field(factory=list)
    unanswered: Content | None = None
    """Not among the messages"""
    attached: list[Part] = attrs.field(factory=list)
    """Pictures and texts for the next question"""
    checks: Checks | None = attrs.field(default=None, eq=False)
    """The server's, of what /set and /model say"""
    chats: Chats | None = attrs.field(default=None, eq=False)
    """None: no conversation is kept"""

    def body(self) -> dict[str, Any]:
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        named = {} if self.model is None else {"model": self.model}
        return named | self.parameters | {"messages": [*first, *self.messages]}

    def ask(self, question: Content) -> None:
        self.messages.append({"role": "user", "content": question})
        self.unanswered = None

    def answered(self, text: str) -> None:
        """Append an answer, also a partial one; without one take the question back."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.unanswered = self.messages.pop()["content"]

    def go_on_with(self, other: Conversation) -> None:
        self.system, self.parameters = other.system, other.parameters
        self.messages, self.unanswered = other.messages, None

    def take_back(self) -> Content:
        """Remove and return the last question. Raises `CommandRefused`."""
        question: Content
        if self.unanswered is not None:
            question, self.unanswered = self.unanswered, None
            return question
        questions = [
            index for index, message in enumerate(self.messages) if message["role"] == "user"
        ]
        if not questions:
            raise CommandRefused("nothing was asked yet")
        question = self.messages[questions[-1]]["content"]
        del self.messages[questions[-1] :]
        return question


def _help(_: Conversation, __: str) -> str:
    """what there is"""
    width = max(len(name) for name in COMMANDS)
    lines = [f"{name:{width}}  {command.__doc__}" for name, command in COMMANDS.items()]
    more = (
        "Alt-Enter begins a new line; Ctrl-C stops an answer; Ctrl-D leaves",
        "// at its start: a question that begins with /",
    )
    return "\n".join([*lines, "", *more])


def _clear(conversation: Conversation, _: str) -> str:
    """begin another conversation; the system prompt stays"""
    if conversation.chats is not None:
        conversation.chats.begin_another()
    conversation.messages.clear()
    conversation.attached.clear()
    conversation.unanswered = None
    return "a new conversation"


def _system(conversation: Conversation, text: str) -> str:
    """TEXT: the system prompt from now on; without TEXT: show it; `-`: none"""
    if text:
        conversation.system = "" if text == "-" else text
    return conversation.system or "no system prompt"


def _set(conversation: Conversation, text: str) -> str:
    """NAME VALUE: a parameter of the API, as in `/set temperature 0`; NAME -: its default"""
    name, given = _parted(text)
    if name and not given:
        raise CommandRefused("give a value, as in `/set temperature 0`, or - for the default")
    if name:
        value = None if given == "-" else _value(given)
        _check_parameter(name, value)
        if given != "-" and conversation.checks is not None:
            conversation.checks.require_parameter(name, value)
        if given == "-":
            conversation.parameters.pop(name, None)
        else:
            conversation.parameters[name] = value
    return (
        ", ".join(f"{key} = {json.dumps(value)}" for key, value in conversation.parameters.items())
        or "all defaults"
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_parameter(name: str, value: Any) -> None:
    """Raises `CommandRefused` for a fixed parameter, or a value that JSON cannot express."""
    if name in FIXED:
        raise CommandRefused(FIXED[name])
    if name == "n" and value not in (None, 1):
        raise CommandRefused("one answer is shown at a time: n stays 1")
    if not can_be_sent(value):
        raise CommandRefused(f"{name}: {json.dumps(value)} cannot be sent as JSON")


def _model(conversation: Conversation, name: str) -> str:
    """NAME: another of the server's models; without NAME: which one; `-`: the server's default"""
    if name and name != "-" and conversation.checks is not None:
        conversation.checks.require_model(name)
    if name:
        conversation.model = None if name == "-" else name
    return conversation.model or "the server's default"


def _undo(conversation: Conversation, _: str) -> str:
    """take the last question back, and its answer"""
    return f"taken back: {shown(conversation.take_back())}"


def shown(question: Content) -> str:
    if isinstance(question, str):
        return question
    return " ".join(_part_shown(part) for part in question)


def _part_shown(part: Part) -> str:
    text = str(part.get("text") or "[picture]")
    return f"[{len(text):,} characters]" if len(text) > MAX_SHOWN else text


def _retry(conversation: Conversation, _: str) -> str:
    """ask the last question again, also one that got no answer"""
    raise AskAgain(conversation.take_back())


def _save(conversation: Conversation, path: str) -> str:
    """FILE: write the conversation, as JSON"""
    file = _file(path)
    try:
        file.write_text(written(conversation), encoding="utf-8")
    except OSError as error:
        raise CommandRefused(f"{path}: {error.strerror}") from error
    return f"{len(conversation.messages)} messages are in {path}"


def _load(conversation: Conversation, path: str) -> str:
    """FILE: go on with a conversation that was saved"""
    conversation.go_on_with(read_chat(_file(path), path))
    if conversation.chats is not None:
        conversation.chats.begin_another()
    return f"{len(conversation.messages)} messages"


def _resume(conversation: Conversation, number: str) -> str:
    """NUMBER: go on with an earlier conversation; without NUMBER: list them"""
    if conversation.chats is None:
        raise CommandRefused("no conversation is kept")
    if not number:
        return conversation.chats.listed()
    conversation.go_on_with(conversation.chats.resume(number))
    last = "\n\n".join(shown(message["content"]) for message in conversation.messages[-2:])
    return f"{text_shown(last)}\n\n{len(conversation.messages)} messages"


def written(conversation: Conversation) -> str:
    kept = {
        "system": conversation.system,
        "parameters": conversation.parameters,
        "messages": conversation.messages,
    }
    return json.dumps(kept, indent=1, ensure_ascii=False) + "\n"


def read_chat(file: Path, name: str) -> Conversation:
    """Raises `CommandRefused` with the name."""
    try:
        return _saved(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise CommandRefused(f"{name}: {error.strerror}; /model takes another model") from error
    except CommandRefused as refused:
        raise CommandRefused(f"{name}: {refused}") from refused
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommandRefused(f"{name} holds no conversation") from error


def _saved(kept: Any) -> Conversation:
    """Raises `CommandRefused` for a conversation that a server would refuse."""
    messages: list[Message] = [
        {"role": str(message["role"]), "content": _content(message["content"])}
        for message in kept["messages"]
    ]
    system, parameters = str(kept.get("system", "")), dict(kept.get("parameters", {}))
    for message in messages:
        if message["role"] not in ROLES:
            raise CommandRefused(
                f"a message's role is one of {', '.join(ROLES)}, not {message['role']!r}"
            )
    for name, value in parameters.items():
        _check_parameter(name, value)
    if not can_be_sent([system, messages]):
        raise CommandRefused("it has characters that are not Unicode's")
    return Conversation(system, None, parameters, messages)


def _content(saved: Any) -> Content:
    """Raises `CommandRefused` for parts that a server would refuse."""
    if not isinstance(saved, list):
        return str(saved)
    if not all(part["type"] in PART_TYPES for part in saved):
        raise CommandRefused(f"a part of a message is of type {' or '.join(PART_TYPES)}")
    return saved


def _attach(conversation: Conversation, path: str) -> str:
    """NAME: put a text file before the next question; pictures need no command"""
    file = _file(path)
    try:
        if file.stat().st_size > MAX_TEXT_BYTES:
            raise CommandRefused(f"{path} is larger than {MAX_TEXT_BYTES // 2**20} MiB")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandRefused(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CommandRefused(f"{path} is no text") from error
    conversation.attached.append({"type": "text", "text": f"{file.name}:\n```\n{text}\n```\n"})
    return f"{file.name}: {len(text):,} characters, for the next question"


def _file(path: str) -> Path:
    if not path:
        raise CommandRefused("name a file")
    try:
        return Path(path.replace("\0", "\ufffd")).expanduser()
    except RuntimeError as error:
        raise CommandRefused(f"{path}: {error}") from error


def _quit(_: Conversation, __: str) -> str:
    """leave"""
    raise EndOfChat


Command: TypeAlias = Callable[[Conversation, str], str]
COMMANDS: dict[str, Command] = {
    "/help": _help,
    "/clear": _clear,
    "/system": _system,
    "/set": _set,
    "/model": _model,
    "/file": _attach,
    "/retry": _retry,
    "/undo": _undo,
    "/resume": _resume,
    "/save": _save,
    "/load": _load,
    "/quit": _quit,
}
# Words of ollama, `lms chat` and llama-cli.
SYNONYMS = {
    "/bye": "/quit",
    "/exit": "/quit",
    "/?": "/help",
    "/regen": "/retry",
    "/system-prompt": "/system",
    "/read": "/file",
}
ELSEWHERE = {
    "/show": "/model, /system and /set show what holds",
    "/image": "a picture's path in the question attaches it",
    "/stats": "they are behind each answer",
    "/download": "`trouper models pull ID` does that",
}


def question_in(line: str) -> str | None:
    if line.startswith("//"):
        return line[1:]
    return None if COMMAND.match(line) else line


def follow(conversation: Conversation, line: str) -> str:
    """Run a command. Raises `CommandRefused`, `AskAgain` and `EndOfChat`."""
    name, argument = _parted(line)
    command = COMMANDS.get(SYNONYMS.get(name, name))
    if command is None:
        remedy = ELSEWHERE.get(name, "/help lists what there is")
        raise CommandRefused(f"there is no {name}; {remedy}")
    return command(conversation, argument)


def _parted(text: str) -> tuple[str, str]:
    first, *remainder = text.strip().split(maxsplit=1) or [""]
    return first, remainder[0] if remainder else ""
