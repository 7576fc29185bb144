"""pydantic_models.py URL: sends and reads bodies by the models of datamodel-code-generator."""

import json
import sys
import urllib.request

import models

QUESTION = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def sent(path: str, body: models.BaseModel) -> bytes:
    data = body.model_dump_json(by_alias=True, exclude_unset=True).encode()
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(sys.argv[1] + path, data, headers), timeout=60
    ) as answer:
        return answer.read()


chat = sent("/v1/chat/completions", models.ChatRequest.model_validate(QUESTION))
assert models.ChatCompletion.model_validate_json(chat).choices[0].message.content
message = sent("/v1/messages", models.MessagesRequest.model_validate(QUESTION))
assert models.AnthropicMessage.model_validate_json(message).content
body = models.ResponseRequest.model_validate({"input": "hello", "max_output_tokens": 16})
assert models.ResponseObject.model_validate_json(sent("/v1/responses", body)).output
body = models.EmbeddingRequest.model_validate({"input": ["a", "b"]})
assert models.CreateEmbeddingResponse.model_validate_json(sent("/v1/embeddings", body)).data
streamed = models.ChatRequest.model_validate(QUESTION | {"stream": True})
lines = sent("/v1/chat/completions", streamed).decode().splitlines()
data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
chunks = [models.ChatCompletionChunk.model_validate(one) for one in data]
assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
answered = models.ChatCompletion.model_validate(json.loads(chat) | {"of_a_later_version": 1})
assert answered.choices
