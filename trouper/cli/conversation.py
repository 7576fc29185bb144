"""What `trouper chat` keeps of a conversation, and the commands that change it. Knows neither terminal nor network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import attrs

Message: TypeAlias = dict[str, str]


class CommandRefused(Exception):
    """A command that cannot be followed. Says why."""


class Leave(Exception):
    """/quit."""


class AskAgain(Exception):
    """/retry, with the question."""

    def __init__(self, question: str) -> None:
        super().__init__(question)
        self.question = question


@attrs.define
class Conversation:
    """Messages in their order; the last one is the assistant's, unless a question is open."""

    system: str = ""
    model: str | None = None
    """None: the server's default."""
    parameters: dict[str, Any] = attrs.field(factory=dict)
    """Of each request: temperature and the like."""
    messages: list[Message] = attrs.field(factory=list)
    unanswered: str | None = None
    """The last question, if no answer came: it is none of the messages."""

    def body(self) -> dict[str, Any]:
        """What is asked of the server."""
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        named = {} if self.model is None else {"model": self.model}
        return named | self.parameters | {"messages": [*first, *self.messages]}

    def ask(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        self.unanswered = None

    def answered(self, text: str) -> None:
        """A partial answer counts: the next question may be about it. Without one the question is taken back."""
        if text:
            self.messages.append({"role": "assistant", "content": text})
        else:
            self.unanswered = self.messages.pop()["content"]

    def take_back(self) -> str:
        """The last question, without its answer; the answers before it stay. Raises `CommandRefused`."""
        if self.unanswered is not None:
            question, self.unanswered = self.unanswered, None
            return question
        asked = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise CommandRefused("nothing was asked yet")
        question = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        return question


def _help(_: Conversation, __: str) -> str:
    """what there is"""
    width = max(len(name) for name in COMMANDS)
    lines = [f"{name:{width}}  {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "Alt-Enter begins a new line; Ctrl-C stops an answer; Ctrl-D leaves"])


def _clear(conversation: Conversation, _: str) -> str:
    """forget all that was said; the system prompt stays"""
    conversation.messages.clear()
    conversation.unanswered = None
    return "forgotten"


def _system(conversation: Conversation, text: str) -> str:
    """TEXT: the system prompt from now on; without TEXT: show it; `-`: none"""
    if text:
        conversation.system = "" if text == "-" else text
    return conversation.system or "no system prompt"


def _set(conversation: Conversation, text: str) -> str:
    """NAME VALUE: a parameter of the API, as in `/set temperature 0`; NAME -: its default"""
    name, _, value = text.partition(" ")
    if name and not value:
        raise CommandRefused("give a value, as in `/set temperature 0`, or - for the default")
    if value.strip() == "-":
        conversation.parameters.pop(name, None)
    elif name:
        conversation.parameters[name] = _value(value.strip())
    return ", ".join(f"{key} = {json.dumps(one)}" for key, one in conversation.parameters.items()) or "all defaults"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _model(conversation: Conversation, name: str) -> str:
    """NAME: another of the server's models; without NAME: which one it is"""
    conversation.model = name or conversation.model
    return conversation.model or "the server's default"


def _undo(conversation: Conversation, _: str) -> str:
    """take the last question back, and its answer"""
    return f"taken back: {conversation.take_back()}"


def _retry(conversation: Conversation, _: str) -> str:
    """ask the last question again, also one that got no answer"""
    raise AskAgain(conversation.take_back())


def _save(conversation: Conversation, path: str) -> str:
    """FILE: write the conversation, as JSON"""
    kept = {"system": conversation.system, "parameters": conversation.parameters, "messages": conversation.messages}
    try:
        _file(path).write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandRefused(f"{path}: {error.strerror}") from error
    return f"{len(conversation.messages)} messages are in {path}"


def _load(conversation: Conversation, path: str) -> str:
    """FILE: go on with a conversation that was saved"""
    try:
        kept = json.loads(_file(path).read_text(encoding="utf-8"))
        messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in kept["messages"]]
        system, parameters = str(kept.get("system", "")), dict(kept.get("parameters", {}))
    except OSError as error:
        raise CommandRefused(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandRefused(f"{path} holds no conversation") from error
    conversation.system, conversation.parameters, conversation.messages = system, parameters, messages
    conversation.unanswered = None
    return f"{len(messages)} messages"


def _file(path: str) -> Path:
    if not path:
        raise CommandRefused("name a file")
    return Path(path).expanduser()


def _quit(_: Conversation, __: str) -> str:
    """leave"""
    raise Leave


Command: TypeAlias = Callable[[Conversation, str], str]
COMMANDS: dict[str, Command] = {
    "/help": _help,
    "/clear": _clear,
    "/system": _system,
    "/set": _set,
    "/model": _model,
    "/retry": _retry,
    "/undo": _undo,
    "/save": _save,
    "/load": _load,
    "/quit": _quit,
}


def follow(conversation: Conversation, line: str) -> str:
    """What a command has to say. Raises `CommandRefused`, `AskAgain` and `Leave`."""
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise CommandRefused(f"there is no {name}; /help lists what there is")
    return command(conversation, argument.strip())
