"""langchain-anthropic: objects of each class by both methods."""

import langchain_objects
import loop
from langchain_anthropic import ChatAnthropic

MODEL = ChatAnthropic(
    model="any", base_url=loop.URL, api_key="none", max_retries=0, max_tokens=4000
)

for streamed in (False, True):
    langchain_objects.run("messages, tool", MODEL, streamed, method="function_calling")
    langchain_objects.run("messages, format", MODEL, streamed, method="json_schema")
