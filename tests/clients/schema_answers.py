"""The model's side of the programs about schemas: a call of the tool that looks something up, and
then the JSON of the question, as text or as a call."""

from __future__ import annotations

import json
from typing import Any

from tests.scripted.conversation import Conversation

PROMPT = "Write this: "
LOOK = "look_up"


def script(conversation: Conversation) -> str:
    value = value_of(conversation)
    names = [str(tool["function"]["name"]) for tool in conversation.tools]
    if LOOK in names and not conversation.results:
        return conversation.call(LOOK, city="Oslo")
    outputs = [name for name in names if name != LOOK]
    if outputs:
        return conversation.call(outputs[0], **value)
    return conversation.answer(json.dumps(value, ensure_ascii=False), reasoning="As it says.")


def value_of(conversation: Conversation) -> dict[str, Any]:
    """Return the value that the question has."""
    text = conversation.question.partition(PROMPT)[2]
    value, _ = json.JSONDecoder().raw_decode(text)
    return dict(value)
