"""langchain-openai: objects of each class by each method, over chat and responses."""

import langchain_objects
import loop
import schema_cases
from langchain_openai import ChatOpenAI

OPTIONS = {"model": "any", "base_url": f"{loop.URL}/v1", "api_key": "none", "max_retries": 0}
MODELS = {
    "chat": ChatOpenAI(**OPTIONS),
    "responses": ChatOpenAI(use_responses_api=True, **OPTIONS),
}

for name, model in MODELS.items():
    for streamed in (False, True):
        langchain_objects.run(f"{name}, tool", model, streamed, method="function_calling")
        langchain_objects.run(
            f"{name}, format", model, streamed, method="json_schema", strict=False
        )
    langchain_objects.run(
        f"{name}, strict format",
        model,
        False,
        schema_cases.STRICT,
        method="json_schema",
        strict=True,
    )
    langchain_objects.run(
        f"{name}, strict tool",
        model,
        False,
        schema_cases.STRICT,
        method="function_calling",
        strict=True,
    )
