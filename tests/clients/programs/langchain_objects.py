"""Objects of both LangChain clients."""

import schema_cases


def answer_of(model, value, streamed, more):
    structured = model.with_structured_output(type(value), **more)
    if not streamed:
        return structured.invoke(schema_cases.question(value))
    return list(structured.stream(schema_cases.question(value)))[-1]


def run(label, model, streamed, names=schema_cases.VALUES, **more):
    schema_cases.each(label, streamed, lambda value: answer_of(model, value, streamed, more), names)
