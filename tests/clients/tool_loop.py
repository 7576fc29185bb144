"""The model's side of the loop: a call; two calls at once; the text that says what the tools said.

Where a grammar forces a call, calls come one by one, and the end is a call, too, if the client has a tool for that.
"""

from __future__ import annotations

from typing import Any

from tests.scripted.conversation import Conversation

Json = dict[str, Any]
OSLO: Json = {"place": 'Oslo "Ø"\n<north>', "options": {"unit": "g", "counts": [1, 2]}}
ROME: Json = {"place": "Rome", "options": {"unit": "kg", "counts": []}}
NOTE: Json = {"text": "2 < 3 & that is all"}
CALLS: tuple[tuple[str, Json], ...] = (("weigh", OSLO), ("weigh", ROME), ("note", NOTE))
FINAL = "All done: "
PERSON = "Person"
"""A tool that a client makes of a class, to be given an object of it. The first one fails the client's own check."""


def script(conversation: Conversation) -> str:
    offered = {str(tool["function"]["name"]) for tool in conversation.tools}
    results = len(conversation.results)
    if PERSON in offered:
        age = 7 if conversation.turn else -7
        return conversation.call(PERSON, name="Ada", age=age, tags=["x", 'y"z'])
    if not offered:
        return conversation.answer(f"Hello: {conversation.question}", reasoning="They greet.")
    if results < len(CALLS) and conversation.forced:
        return conversation.calls(CALLS[results])
    if results == 0:
        return conversation.calls(CALLS[0], text="I will look.", reasoning="Oslo comes first.")
    if results < len(CALLS):
        return conversation.calls(*CALLS[results:], reasoning="Now the others.")
    text = FINAL + " | ".join(conversation.results)
    return _last_call(conversation, offered, text) or conversation.answer(text, reasoning="That was it.")


def _last_call(conversation: Conversation, offered: set[str], text: str) -> str:
    arguments: dict[str, Json] = {"final_answer": {"answer": text}, "final_result": {"summary": text, "places": 2}}
    return next((conversation.call(name, **arguments[name]) for name in arguments if name in offered), "")
