"""Probes a chat template by rendering conversations.

The first value of a `MessageAdaptation` field with which most conversations render wins: messages
change only where the template refuses, drops or reorders one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import attrs

from trouper.engine.loading.message_adaptation import Message, MessageAdaptation
from trouper.engine.platform.error_text import first_line_of

Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
"""Raises an exception if the template refuses."""
TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}
MARK = re.compile("probe[0-9]+x")
"""No template contains such text."""
WRONG_FORM = re.compile(r"""'path': 'probe|\\"probe|['"]thinking['"]: ['"]probe""")
"""Python's form of an object, JSON within a JSON string, or a part in place of its text."""
Conversation = tuple[str, ...]
"""Roles; see `_messages`."""


@attrs.frozen
class Step:
    """Candidates, smallest change first, and the deciding conversations."""

    candidates: tuple[Mapping[str, Any], ...]
    conversations: tuple[Conversation, ...]
    tools: bool = False
    """Templates may render calls only where tools are offered."""
    optional: bool = False
    """Many templates drop what it shows: no refusal."""


def _step(
    candidates: Sequence[Mapping[str, Any]], conversations: Sequence[str], *, tools: bool = False
) -> Step:
    return Step(({}, *candidates), tuple(tuple(text.split()) for text in conversations), tools)


def _call_forms() -> Iterator[Mapping[str, Any]]:
    """Fewest changes first, text last."""
    choices = {"call_ids": "hashed", "arguments": "json", "empty_content": "absent"}
    forms = [
        {name: choices[name] for name, chosen in zip(choices, mask, strict=True) if chosen}
        for mask in product((False, True), repeat=len(choices))
    ]
    yield from sorted(filter(None, forms), key=len)
    yield {"calls": "text"}
    yield {"calls": "text", "results": "user"}


# The order of the steps matters: a message with a new role becomes a neighbour of messages with the
# same role, therefore joining neighbours comes first; a system message behind a result needs
# rendered calls.
STEPS = (
    _step([{"content": "parts"}], ["user"]),
    _step([{"users": "merged"}], ["user user", "user assistant user user"]),
    _step([{"assistants": "merged"}], ["user assistant assistant user"]),
    _step(
        [{"system": "merged"}, {"system": "user"}],
        ["system user", "system user assistant user", "system system user"],
    ),
    _step([{"first_user": True}], ["system", "assistant user", "system assistant user"]),
    _step([*_call_forms()], ["user call tool", "user call tool assistant user"], tools=True),
    _step(
        [
            {"calls": "split"},
            {"calls": "separated"},
            {"calls": "text"},
            {"calls": "text", "results": "user"},
        ],
        [
            "user text+call tool",
            "user text+call tool assistant user",
            "user text+call tool text+call tool",
        ],
        tools=True,
    ),
    _step(
        [{"parallel_calls": "single"}, {"calls": "text"}], ["user calls tool tool+1"], tools=True
    ),
    _step([{"empty_results": "marked"}], ["user call empty"], tools=True),
    _step([{"empty_answers": "blank"}], ["user silent user"]),
    _step(
        [{"user_after_tool": "assistant"}],
        ["user call tool user", "user call tool user assistant user"],
        tools=True,
    ),
    _step(
        [{"later_system": "user"}],
        [
            "user system",
            "system user system assistant user",
            "system user assistant system",
            "system user assistant system user",
            "user assistant user system assistant user system",
        ],
    ),
    _step(
        [{"system_after_tool": "tool"}, {"system_after_tool": "user"}],
        ["user call tool system", "system user call tool system call tool system assistant user"],
        tools=True,
    ),
    # Behind the last question, where templates keep reasoning if anywhere. transformers writes it
    # into the fields that others read (`thinking`).
    attrs.evolve(
        _step([{"reasoning": "chunk"}], ["user thought+call tool"], tools=True),
        optional=True,
    ),
)


@attrs.frozen
class TemplateReport:
    adaptation: MessageAdaptation = attrs.field(factory=MessageAdaptation)
    refused: tuple[str, ...] = ()
    """Refused in spite of the adaptation."""
    fault: str | None = None
    image_text: str = ""
    """Text that the template writes for an image; "" if it writes none."""
    image_roles: frozenset[str] = frozenset()
    """Roles whose messages can hold images, by the adaptation."""

    def roles_with(self, marker: str) -> frozenset[str]:
        """`image_roles`, of a model that knows images by `marker`."""
        return self.image_roles if marker in self.image_text else frozenset()

    @property
    def summary(self) -> str | None:
        if self.fault is not None:
            return (
                f"the chat template does not render a question ({self.fault}); /v1/completions "
                "needs no template"
            )
        changes = "; ".join(f"{name}: {text}" for name, text in self.lines)
        return f"messages are adapted to the chat template: {changes}" if changes else None

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        refused = "; ".join(self.refused) if self.fault is None else "user"
        return self.adaptation.changes + ((("not_rendered", refused),) if refused else ())


def probe(render: Render, *, images: bool = False) -> TemplateReport:
    """A template that refuses a lone user message is not for conversations: no change. `images`:
    look for the roles whose messages can hold images."""
    prober = _Prober(render)
    first, *others = STEPS
    adaptation = prober.decided(MessageAdaptation(), first, {})
    if not prober.renders(adaptation, ("user",), {}):
        return TemplateReport(fault=prober.fault())
    offered: Mapping[str, Any] = {"tools": [TOOL]}
    if not prober.renders(adaptation, ("user",), offered):
        offered = {}
    for step in others:
        adaptation = prober.decided(adaptation, step, offered if step.tools else {})
    refused: list[str] = []
    for step in STEPS:
        if step.optional:
            continue
        options = offered if step.tools else {}
        refused += [
            " ".join(roles)
            for roles in step.conversations
            if not prober.renders(adaptation, roles, options)
        ]
    report = TemplateReport(adaptation, tuple(refused))
    return prober.with_images(report, offered) if images else report


@attrs.frozen
class _Prober:
    _render: Render

    def with_images(self, report: TemplateReport, offered: Mapping[str, Any]) -> TemplateReport:
        """Instructions and answers have no images: no API of clients has any there."""
        adaptation = report.adaptation
        text = self._image_text(adaptation)
        if not text or not self._shows(adaptation, USER_IMAGES, {}, text):
            return report
        report = attrs.evolve(report, image_text=text, image_roles=frozenset({"user"}))
        for tool_images in ("given", "user"):
            changed = attrs.evolve(adaptation, tool_images=tool_images)
            if all(self._shows(changed, roles, offered, text) for roles in TOOL_IMAGES):
                roles = frozenset({"user", "tool"})
                return attrs.evolve(report, adaptation=changed, image_roles=roles)
        return report

    def _image_text(self, adaptation: MessageAdaptation) -> str:
        """What stands between two texts that have an image between them."""
        try:
            text = self._render(adaptation.adapted(_messages(("image",))), {})
        except Exception:  # noqa: BLE001 - as in `renders`.
            return ""
        _, mark, behind = text.partition(IMAGE_MARKS[0])
        return behind.partition(IMAGE_MARKS[1])[0].strip() if mark else ""

    def _shows(
        self,
        adaptation: MessageAdaptation,
        roles: Conversation,
        options: Mapping[str, Any],
        image_text: str,
    ) -> bool:
        """Whether every text and every image appears once."""
        if not self.renders(adaptation, roles, options):
            return False
        text = self._render(adaptation.adapted(_messages(roles)), options)
        return text.count(image_text) == sum(role.endswith("image") for role in roles)

    def decided(
        self, adaptation: MessageAdaptation, step: Step, options: Mapping[str, Any]
    ) -> MessageAdaptation:
        """The first candidate that renders the most conversations wins."""
        best, best_count = adaptation, -1
        for change in step.candidates:
            candidate = attrs.evolve(adaptation, **change)
            count = sum(self.renders(candidate, roles, options) for roles in step.conversations)
            if count > best_count:
                best, best_count = candidate, count
            if count == len(step.conversations):
                break
        return best

    def renders(
        self, adaptation: MessageAdaptation, roles: Conversation, options: Mapping[str, Any]
    ) -> bool:
        """Whether every text appears once, in order."""
        messages = _messages(roles)
        adapted = adaptation.adapted(messages)
        try:
            text = self._render(adapted, options)
            if roles[-1] == "empty" and text == self._render(
                adaptation.adapted(messages[:-1]), options
            ):
                return False  # The empty result is dropped.
        except Exception:  # noqa: BLE001
            # A template is code of any kind: whatever it raises, it refuses.
            return False
        return MARK.findall(text) == _marks(adapted) and not WRONG_FORM.search(text)

    def fault(self) -> str:
        try:
            self._render(_messages(("user",)), {})
        except Exception as error:  # noqa: BLE001 - as above.
            return first_line_of(error)
        return "the question is not in it, or not once"


def conversations() -> list[tuple[list[Message], Mapping[str, Any]]]:
    return [
        (
            list(attrs.evolve(MessageAdaptation(), **change).adapted(_messages(roles))),
            {"tools": [TOOL]} if tools else {},
        )
        for step in STEPS
        for change in step.candidates
        for roles in step.conversations
        for tools in {False, step.tools}
    ]


IMAGE_MARKS = ("probe0x", "probe1x")
"""The texts around the image of a first message."""
USER_IMAGES: Conversation = ("image", "assistant", "image")
TOOL_IMAGES: tuple[Conversation, ...] = (
    ("user", "call", "tool+image"),
    ("user", "call", "tool+image", "assistant", "user"),
    ("image", "call", "tool+image", "call", "tool+image", "assistant", "image"),
)
CALL_MARK = "probe11x"
"""The argument of the call in `call_conversation`."""


def call_conversation() -> list[Message]:
    return _messages(("user", "call", "tool"))


def _messages(roles: Conversation) -> list[Message]:
    """`call`: a message with a call, `calls` with two, `text+call` also with text, `thought+call`
    with reasoning; `tool+1`: the second call's result, `empty` an empty one; `image`: the user's,
    between two texts; `silent`: an answer without text."""
    messages: list[Message] = []
    for index, role in enumerate(roles):
        text = f"probe{10 * index}x"
        match role:
            case "call" | "calls" | "text+call" | "thought+call":
                count = 2 if role == "calls" else 1
                calls = [_call(10 * index + 1 + number, number) for number in range(count)]
                content = text if role == "text+call" else ""
                answer: Message = {"role": "assistant", "content": content, "tool_calls": calls}
                if role == "thought+call":
                    answer["reasoning_content"] = text
                messages.append(answer)
            case "tool" | "tool+1" | "empty" | "tool+image":
                result: Message = {
                    "role": "tool",
                    "name": "probe_tool",
                    "content": "" if role == "empty" else text,
                    "tool_call_id": _id(int(role == "tool+1")),
                }
                if role == "tool+image":
                    result["content"] = _around_image(index)
                messages.append(result)
            case "image":
                messages.append({"role": "user", "content": _around_image(index)})
            case "silent":
                messages.append({"role": "assistant", "content": ""})
            case _:
                messages.append({"role": role, "content": text})
    return messages


def _around_image(index: int) -> list[Message]:
    before, behind = (f"probe{10 * index + number}x" for number in range(2))
    return [
        {"type": "text", "text": before},
        {"type": "image"},
        {"type": "text", "text": behind},
    ]


def _id(number: int) -> str:
    return f"call_probe_{number}"


def _call(mark: int, number: int) -> Message:
    return {
        "id": _id(number),
        "type": "function",
        "function": {"name": "probe_tool", "arguments": {"path": f"probe{mark}x"}},
    }


def _marks(messages: Sequence[Message]) -> list[str]:
    texts = ("reasoning_content", "content", "tool_calls")
    return MARK.findall(json.dumps([[turn.get(name) for name in texts] for turn in messages]))
