"""The model's side of the loop: a call; two calls at once; the text that says what the tools said.

Where a grammar forces a call, calls come one by one, and the end is a call, too, if the client has
a tool for that.
"""

from __future__ import annotations

from typing import Any

from tests.scripted.conversation import Conversation, text_of

Json = dict[str, Any]
OSLO: Json = {"place": 'Oslo "Ø"\n<north>', "options": {"unit": "g", "counts": [1, 2]}}
ROME: Json = {"place": "Rome", "options": {"unit": "kg", "counts": []}}
NOTE: Json = {"text": "2 < 3 & that is all"}
CALLS: tuple[tuple[str, Json], ...] = (("weigh", OSLO), ("weigh", ROME), ("note", NOTE))
FINAL = "All done: "
PERSONS = ("Person", "PartialLoose")
"""Tools that a client makes of classes, to be given an object. The first one fails the client's own
check of a Person."""
OBSERVED = "Observation:\n"
"""How smolagents gives results, as a user's messages."""


def script(conversation: Conversation) -> str:
    offered = {str(tool["function"]["name"]) for tool in conversation.tools}
    texts = conversation.results or _observed(conversation)
    results = len(texts)
    if person := next((name for name in PERSONS if name in offered), None):
        age = 7 if conversation.turn else -7
        return conversation.call(person, name="Ada", age=age, tags=["x", 'y"z'])
    if not offered:
        return conversation.answer(f"Hello: {conversation.question}", reasoning="They greet.")
    if results < len(CALLS) and conversation.forced:
        return conversation.calls(CALLS[results])
    if results == 0:
        return conversation.calls(CALLS[0], text="I will look.", reasoning="Oslo comes first.")
    if results < len(CALLS):
        return conversation.calls(*CALLS[results:], reasoning="Now the others.")
    text = FINAL + " | ".join(texts)
    return _last_call(conversation, offered, text) or conversation.answer(
        text, reasoning="That was it."
    )


def _last_call(conversation: Conversation, offered: set[str], text: str) -> str:
    arguments: dict[str, Json] = {
        "final_answer": {"answer": text},
        "final_result": {"summary": text, "places": 2},
    }
    return next(
        (conversation.call(name, **arguments[name]) for name in arguments if name in offered), ""
    )


def _observed(conversation: Conversation) -> list[str]:
    texts = [text_of(message) for message in conversation.messages]
    return [text.partition(OBSERVED)[2] for text in texts if OBSERVED in text]
