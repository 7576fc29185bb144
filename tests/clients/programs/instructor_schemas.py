"""instructor: objects of each class in each mode, over three APIs."""

import anthropic
import instructor
import loop
import openai
import schema_cases
from instructor import Mode

OPENAI = openai.OpenAI(base_url=f"{loop.URL}/v1", api_key="none", max_retries=0)
ANTHROPIC = anthropic.Anthropic(base_url=loop.URL, api_key="none", max_retries=0)


NO_PARTS = {"discriminated unions": "parts of a stream have no classes with a discriminator"}


def answer_of(client, value, streamed, more):
    ask = client.chat.completions.create_partial if streamed else client.chat.completions.create
    answer = ask(
        model="any",
        messages=[{"role": "user", "content": schema_cases.question(value)}],
        response_model=type(value),
        max_retries=0,
        **more,
    )
    if not streamed:
        return answer
    last = list(answer)[-1]
    return type(value).model_validate(last.model_dump())


def run(mode, make, client, streamed=False, names=schema_cases.VALUES, **more):
    made = make(client, mode=mode)
    schema_cases.each(
        mode.name.lower().replace("_", " "),
        streamed,
        lambda value: answer_of(made, value, streamed, more),
        names,
        NO_PARTS if streamed else {},
    )


for mode in (Mode.TOOLS, Mode.JSON, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS):
    run(mode, instructor.from_openai, OPENAI)
run(Mode.TOOLS_STRICT, instructor.from_openai, OPENAI, names=schema_cases.STRICT)
for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
    # By default a stream's last part is checked as Python objects: no JSON has a set or a date.
    run(mode, instructor.from_openai, OPENAI, streamed=True, strict=False)
for mode in (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_JSON):
    run(mode, instructor.from_anthropic, ANTHROPIC, max_tokens=4000)
