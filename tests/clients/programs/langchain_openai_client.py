"""langchain-openai: chat and responses, with strict tools, too."""

import langchain_loop
import loop
from langchain_openai import ChatOpenAI

ASKED = {
    "model": "any",
    "base_url": f"{loop.URL}/v1",
    "api_key": "none",
    "max_retries": 0,
    "stream_usage": True,
}

for streamed in (False, True):
    chat, responses = ChatOpenAI(**ASKED), ChatOpenAI(use_responses_api=True, **ASKED)
    loop.case(
        "chat", streamed, lambda chat=chat, streamed=streamed: langchain_loop.run(chat, streamed)
    )
    loop.case(
        "chat, strict tools",
        streamed,
        lambda chat=chat, streamed=streamed: langchain_loop.run(chat, streamed, strict=True),
    )
    loop.case(
        "responses",
        streamed,
        lambda model=responses, streamed=streamed: langchain_loop.run(model, streamed),
    )
    for name, model in (("chat", chat), ("responses", responses)):
        loop.case(
            f"{name}, full context",
            streamed,
            lambda model=model, streamed=streamed: langchain_loop.full(model, streamed),
        )
