"""openapi_generator_client.py URL: calls operations of the client that openapi-generator made."""

import json
import sys

from openapi_client import (
    AnthropicApi,
    ApiClient,
    ChatCompletionChunk,
    ChatRequest,
    Configuration,
    EmbeddingRequest,
    MessagesRequest,
    OpenAIApi,
    ResponseRequest,
    ResponsesApi,
)

QUESTION = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
client = ApiClient(Configuration(host=sys.argv[1]))
openai = OpenAIApi(client)
assert openai.list_models().data[0].id == "fake"
chat = openai.create_chat_completion(ChatRequest.from_dict(QUESTION))
assert chat.choices[0].message.content
message = AnthropicApi(client).create_message(MessagesRequest.from_dict(QUESTION))
assert message.content[0].actual_instance.text
body = ResponseRequest.from_dict({"input": "hello", "max_output_tokens": 16})
response = ResponsesApi(client).create_response(body)
assert response.output[0].actual_instance.content[0].text
vectors = openai.create_embedding(EmbeddingRequest.from_dict({"input": ["a", "b"]}))
assert len(vectors.data) == 2
streamed = openai.create_chat_completion_without_preload_content(
    ChatRequest.from_dict(QUESTION | {"stream": True})
)
lines = [line for line in streamed.data.decode().splitlines() if line.startswith("data: {")]
chunks = [ChatCompletionChunk.from_dict(json.loads(line[6:])) for line in lines]
assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
assert type(chat).from_dict(chat.to_dict() | {"of_a_later_version": 1}).choices
