"""Objects of both LangChain clients."""

from types import MappingProxyType

import schema_cases


def answer_of(model, value, streamed, more):
    # With a class the OpenAI client asks strictly for a format, whatever `strict` says.
    by_schema = more.get("strict") is False
    schema = type(value).model_json_schema() if by_schema else type(value)
    structured = model.with_structured_output(schema, **more)
    question = schema_cases.question(value)
    answer = list(structured.stream(question))[-1] if streamed else structured.invoke(question)
    return type(value).model_validate(answer) if by_schema else answer


def run(label, model, streamed, names=schema_cases.VALUES, limits=MappingProxyType({}), **more):
    schema_cases.each(
        label, streamed, lambda value: answer_of(model, value, streamed, more), names, limits
    )
