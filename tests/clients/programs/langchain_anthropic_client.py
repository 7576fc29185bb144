"""langchain-anthropic: messages, with thinking, too."""

import langchain_loop
import loop
from langchain_anthropic import ChatAnthropic

ASKED = {
    "model": "any",
    "base_url": loop.URL,
    "api_key": "none",
    "max_retries": 0,
    "max_tokens": 4000,
}

for streamed in (False, True):
    plain = ChatAnthropic(**ASKED)
    thinking = ChatAnthropic(thinking={"type": "enabled", "budget_tokens": 2000}, **ASKED)
    loop.case(
        "messages",
        streamed,
        lambda model=plain, streamed=streamed: langchain_loop.run(model, streamed),
    )
    loop.case(
        "messages, thinking",
        streamed,
        lambda model=thinking, streamed=streamed: langchain_loop.run(model, streamed),
    )
    loop.case(
        "messages, full context",
        streamed,
        lambda model=plain, streamed=streamed: langchain_loop.full(model, streamed),
    )
