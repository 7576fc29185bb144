"""instructor: an object of a class, whose first answer fails the class' own check, so that it is
asked again."""

from typing import Annotated

import instructor
import loop
import openai
from pydantic import AfterValidator, BaseModel


def positive(age):
    if age < 0:
        raise ValueError("an age is not negative")
    return age


class Person(BaseModel):
    name: str
    age: Annotated[int, AfterValidator(positive)]
    tags: list[str]


class Loose(BaseModel):
    """As Person; a stream is not asked again."""

    name: str
    age: int
    tags: list[str]


client = openai.OpenAI(base_url=f"{loop.URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "system", "content": loop.SYSTEM}, {"role": "user", "content": "Who is Ada?"}]


def whole(mode):
    person, answer = instructor.from_openai(
        client, mode=mode
    ).chat.completions.create_with_completion(
        model="any", messages=MESSAGES, response_model=Person, max_retries=2
    )
    assert (person.name, person.age, person.tags) == ("Ada", 7, ["x", 'y"z']), person
    loop.check_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)


def streamed(mode):
    parts = instructor.from_openai(client, mode=mode).chat.completions.create_partial(
        model="any", messages=MESSAGES, response_model=Loose
    )
    last = list(parts)[-1]
    assert (last.name, last.age, last.tags) == ("Ada", -7, ["x", 'y"z']), last


loop.case("tools", False, lambda: whole(instructor.Mode.TOOLS))
loop.case("tools", True, lambda: streamed(instructor.Mode.TOOLS))
loop.case("strict tools", False, lambda: whole(instructor.Mode.TOOLS_STRICT))
