"""python_client.py URL: calls operations of the client that openapi-python-client made."""

import json
import sys

from trouper_client import Client
from trouper_client.api.anthropic import create_message
from trouper_client.api.open_ai import create_chat_completion, create_embedding, list_models
from trouper_client.api.responses import create_response
from trouper_client.models import (
    AnthropicMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatRequest,
    CreateEmbeddingResponse,
    EmbeddingRequest,
    MessagesRequest,
    ResponseObject,
    ResponseRequest,
)

QUESTION = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
client = Client(base_url=sys.argv[1])
assert list_models.sync(client=client).data[0].id == "fake"
chat = create_chat_completion.sync(client=client, body=ChatRequest.from_dict(QUESTION))
assert isinstance(chat, ChatCompletion) and chat.choices[0].message.content
message = create_message.sync(client=client, body=MessagesRequest.from_dict(QUESTION))
assert isinstance(message, AnthropicMessage) and message.content[0].text
body = ResponseRequest.from_dict({"input": "hello", "max_output_tokens": 16})
response = create_response.sync(client=client, body=body)
assert isinstance(response, ResponseObject) and response.output[0].content[0].text
body = EmbeddingRequest.from_dict({"input": ["a", "b"]})
vectors = create_embedding.sync(client=client, body=body)
assert isinstance(vectors, CreateEmbeddingResponse) and len(vectors.data) == 2
streamed = ChatRequest.from_dict(QUESTION | {"stream": True}).to_dict()
with client.get_httpx_client().stream("POST", "/v1/chat/completions", json=streamed) as answer:
    data = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
chunks = [ChatCompletionChunk.from_dict(json.loads(line)) for line in data]
assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)
later = ChatCompletion.from_dict(chat.to_dict() | {"of_a_later_version": 1})
assert later.choices
