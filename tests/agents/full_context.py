"""The model's side of a session whose context becomes full: calls with long results, until the
agent has made its conversation shorter."""

from __future__ import annotations

import json
import re

from tests.agents.edit_task import FINAL, RUN, TASK, Json, steps_of
from tests.scripted.conversation import Conversation, text_of

SUMMARY = f"The task of this session: {TASK} The files were read, and a summary is all that is left"
ASKS = re.compile(r"summar|compact|checkpoint|condens|hand-?(off|over)", re.IGNORECASE)
"""What a request for a summary says."""
KEPT = 0.75
"""Part of the longest conversation; a shorter one was cut."""

longest = 0


def script(conversation: Conversation) -> str:
    """Unlike others, this script knows the prompts before: some agents cut without a summary."""
    global longest  # noqa: PLW0603 - one script is one process
    texts = [text_of(message) for message in conversation.messages]
    offered = {str(tool["function"]["name"]) for tool in conversation.tools}
    went_on = bool(offered) and any(SUMMARY in text for text in texts)
    if ASKS.search(conversation.question) and not went_on:
        return conversation.answer(f"<summary>\n{SUMMARY}.\n</summary>")
    if not offered:
        return conversation.answer("A greeting")
    length = sum(map(len, texts))
    shorter = went_on or length < KEPT * longest
    longest = max(longest, length)
    steps = steps_of(offered)
    if shorter:
        name, arguments = steps[-1]
        ends_by_call = FINAL in json.dumps(arguments)
        return conversation.call(name, **arguments) if ends_by_call else conversation.answer(FINAL)
    name, arguments = next(step for step in steps if RUN in json.dumps(step[1]))
    long = f"seq 1 1200 | sed 's/$/ of part {len(conversation.results)}/'"
    tool = next(offer for offer in sorted(offered, key=len) if offer.endswith(name))
    return conversation.calls((tool, _replaced(arguments, long)), text="More of it.")


def _replaced(arguments: Json, command: str) -> Json:
    return dict(json.loads(json.dumps(arguments).replace(json.dumps(RUN), json.dumps(command))))
