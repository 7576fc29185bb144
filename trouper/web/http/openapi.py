"""GET /openapi.json, from the table of endpoints and the body classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs

from trouper.web.http.endpoints import OPENAI_ERROR, Endpoint
from trouper.web.http.named_schemas import with_names
from trouper.web.http.request_schema import TEXT, Json, components_of, either, ref, schema_of
from trouper.web.keys.endpoint_rights import access_of

BEYOND_SCHEMA: Mapping[str, str] = {
    "invalid_combination": "parameters that contradict each other where no schema can say it: "
    "best_of below n, a named tool "
    "that is not offered, two tools of one name",
    "context_length_exceeded": "prompt and answer together are longer than the context",
    "invalid_token": "a token id that this model does not have",
    "invalid_grammar": "a schema, regex or grammar that cannot be followed",
    "invalid_text": "half of a surrogate pair, which JSON can write but which is no text",
    "invalid_json_text": "a string that has to hold JSON and does not",
    "empty_prompt": "a prompt that has no tokens",
    "tools_not_supported": "--strict: tools for a model that was not trained to call them",
    "reasoning_not_supported": "an effort of reasoning for a model that does not think",
    "speculation_not_supported": (
        "drafts for a model that cannot be given any, or by a draft model where there is none"
    ),
    "images_not_supported": "an image for a model that reads text only, on a server with --strict",
    "background_not_supported": "a response in the background from a server that keeps none",
    "response_ended": "cancelling a response that has ended",
    "previous_response_not_found": "going on from a response that is not stored here any more",
    "previous_response_not_ended": "going on from a response that still runs",
    "previous_response_not_completed": "going on from a response that failed or was cancelled",
    "embeddings_not_supported": "an embedding by a model that gives none",
    "infill_not_supported": "a suffix for a model that was not trained to fill in the middle",
    "unequal_texts": (
        "as many of one text as of the other are needed, unless there is one of the first"
    ),
    "rerank_not_supported": "a rerank by a model without single tokens for yes and no",
    "file_in_use": "deleting the input file of a batch that has not ended",
    "no_chat_template": "messages for a model without a chat template",
}

REASONS = {
    400: (
        "The request cannot be: bad JSON, a wrong parameter, or one without which the answer would "
        "be wrong."
    ),
    401: "The API key is missing or wrong.",
    403: "A web page asks that may not, the Host is none that the server answers to "
    "(--cors-origins, --allowed-hosts), or the "
    "key has no right to it.",
    404: "What is asked for is not here: a model, or something by its id.",
    408: "The body did not arrive in time.",
    409: (
        "The state of what is asked for does not allow it: a pinned model, or one that cannot be "
        "unloaded."
    ),
    413: "The body is too large.",
    415: "The body's Content-Type is not JSON, or its Content-Encoding neither gzip nor zstd.",
    422: (
        "It makes the engine crash, also when it runs alone (request_crashes_engine), or cannot be "
        "prepared (intake_failed)."
    ),
    429: "The queue is full, or a limit is met; Retry-After says when to come again.",
    499: "It was cancelled by its id.",
    500: "The server failed.",
    503: "The server drains, restarts, or had no room in time.",
    504: "A time limit was met before the answer was complete.",
    529: (
        "Of /v1/messages, as of Anthropic's own API: the server had no room in time. A server that "
        "drains answers 503."
    ),
    507: "The weights do not fit beside the models that are pinned or in use.",
}


@attrs.frozen(kw_only=True)
class DocumentContext:
    """Parts that depend on the served models and the client's key."""

    version: str
    keyed: bool
    restricted: bool = False
    """Whether keys have rights: some open endpoints then need a key."""
    strict: bool = False
    models: Sequence[str] = ()
    """Model names; empty for a client without a key, and with --model-alias."""
    vocabulary: int = 2**31
    context: int = 2**63
    dimensions: int = 2**31


def document(
    endpoints: Iterable[Endpoint], components: Mapping[str, Json], context: DocumentContext
) -> Json:
    """Return the document; `components` are parts of answers."""
    endpoints, paths = list(endpoints), dict[str, Json]()
    for endpoint in endpoints:
        paths.setdefault(endpoint.template, {})[endpoint.method.lower()] = _operation(
            endpoint, context
        )
    classes = {endpoint.request for endpoint in endpoints if endpoint.request is not None}
    requests = components_of(classes, strict=context.strict)
    requests |= {kind.__name__: schema_of(kind, strict=context.strict) for kind in classes}
    keys = {"securitySchemes": SECURITY} if context.keyed else {}
    return with_names(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "Trouper",
                "version": context.version,
                "description": (
                    "An LLM server. Each parameter works, is refused by name, or changes nothing "
                    "and is named in X-Trouper-Ignored."
                ),
                "license": {"name": "MIT", "identifier": "MIT"},
            },
            "servers": [{"url": "/"}],
            "paths": paths,
            "security": [],
            "components": {"schemas": {**components, **requests, **_served(context)}, **keys},
        }
    )


SECURITY = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "OpenAI's clients send the key so.",
    },
    "key": {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "Anthropic's clients send it so.",
    },
}


def _served(context: DocumentContext) -> Json:
    digits = len(str(context.vocabulary - 1))
    named = {"enum": list(context.models)} if context.models else {}
    return {
        "Model": {"type": "string", "description": "A model that is served here.", **named},
        "TokenId": {"type": "integer", "minimum": 0, "maximum": context.vocabulary - 1},
        "TokenKey": {
            "type": "string",
            "pattern": f"^(0|[1-9][0-9]{{0,{digits - 1}}})$",
            "description": "A token id.",
        },
        "Length": {
            "type": "integer",
            "minimum": 1,
            "maximum": context.context,
            "description": "Tokens; with the prompt's they must fit the context.",
        },
        "Dimensions": {
            "type": "integer",
            "minimum": 1,
            "maximum": context.dimensions,
            "description": "Of an embedding; the first so many are given.",
        },
    }


def _operation(endpoint: Endpoint, context: DocumentContext) -> Json:
    operation: Json = {
        "operationId": endpoint.operation,
        "tags": [endpoint.tag],
        "summary": endpoint.summary,
        "responses": _responses(endpoint, context),
    }
    if endpoint.description:
        operation["description"] = endpoint.description
    if endpoint.path_parameters or endpoint.query:
        operation["parameters"] = [*_path_parameters(endpoint), *_query(endpoint)]
    if endpoint.request is not None:
        operation["requestBody"] = _body(endpoint, ref(endpoint.request.__name__))
    if endpoint.form is not None:
        content = {"multipart/form-data": {"schema": endpoint.form}}
        operation["requestBody"] = {"required": True, "content": content}
    if _is_closed(endpoint, context):
        operation["security"] = [{name: []} for name in SECURITY]
    return operation


def _is_closed(endpoint: Endpoint, context: DocumentContext) -> bool:
    return context.keyed and access_of(endpoint.path, restricted=context.restricted) != "open"


def _path_parameters(endpoint: Endpoint) -> list[Json]:
    """Describe path parameters. None may be empty: two slashes are another path."""
    schema = {"type": "string", "minLength": 1}
    return [
        {"name": name, "in": "path", "required": True, "schema": schema}
        for name in endpoint.path_parameters
    ]


def _query(endpoint: Endpoint) -> list[Json]:
    return [
        {"name": name, "in": "query", "required": False, "schema": schema}
        for name, schema in endpoint.query.items()
    ]


def _body(endpoint: Endpoint, schema: Json) -> Json:
    content: Json = {"schema": schema}
    if endpoint.examples:
        content["examples"] = {name: {"value": value} for name, value in endpoint.examples.items()}
    return {"required": True, "content": {"application/json": content}}


def _responses(endpoint: Endpoint, context: DocumentContext) -> Json:
    done: Json = {endpoint.content_type: {"schema": endpoint.answer}}
    if endpoint.events is not None:
        done["text/event-stream"] = {"schema": _event(endpoint.events, endpoint.last_event)}
    responses: Json = {"200": {"description": "Done.", "content": done}}
    for status in sorted(
        {403, *endpoint.statuses} | ({401} if _is_closed(endpoint, context) else set())
    ):
        responses[str(status)] = _error(endpoint, status)
    return responses


def _event(data: Json, last: str | None) -> Json:
    """Return the schema of one event: OpenAPI 3.1 describes a stream event by event."""
    data_schema = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    event: Json = {
        "type": "object",
        "properties": {"event": TEXT, "data": data_schema},
        "required": ["data"],
    }
    if last is None:
        return event
    return either(
        {"type": "object", "properties": {"data": {"const": last}}, "required": ["data"]}, event
    )


def _error(endpoint: Endpoint, status: int) -> Json:
    description = REASONS[status]
    if status == 400:
        codes = "".join(f"\n- `{code}`: {reason}" for code, reason in BEYOND_SCHEMA.items())
        description += (
            " A body that follows the schema can still be refused, with one of these codes:\n"
            f"{codes}"
        )
    # A refusal before the probe runs has OpenAI's error format, not the probe's.
    schema = OPENAI_ERROR if status == 403 and endpoint.request is None else endpoint.error
    return {"description": description, "content": {"application/json": {"schema": schema}}}
