"""langchain-anthropic: objects of each class by both methods."""

import langchain_objects
import loop
import schema_cases
from langchain_anthropic import ChatAnthropic

CLOSED = dict.fromkeys(schema_cases.OPEN, "its formats have no objects with any names")

MODEL = ChatAnthropic(
    model="any", base_url=loop.URL, api_key="none", max_retries=0, max_tokens=4000
)

for streamed in (False, True):
    langchain_objects.run("messages, tool", MODEL, streamed, method="function_calling")
    langchain_objects.run("messages, format", MODEL, streamed, limits=CLOSED, method="json_schema")
