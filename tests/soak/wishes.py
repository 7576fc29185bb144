"""What the soak asks, and the answers it must get: computed beforehand by a server that keeps
nothing, one request at a time.

Greedy prompts are chosen so that the model is sure of each token: no rounding of a batch changes an
answer.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import attrs
import numpy as np

from tests.pictures import png, screenshot
from tests.soak.client import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Ask, Json, answer_of, ask
from tests.vision_model.asking import request
from tests.vision_model.questions import IMAGE, SEEDS_OF_TESTS, Message, draw, fresh, text_of

WORDS = [
    "river",
    "stone",
    "cloud",
    "lamp",
    "paper",
    "green",
    "seven",
    "door",
    "music",
    "winter",
    "bread",
    "field",
    "horse",
    "silver",
    "road",
    "glass",
]
TOKENS = 8
TRIES = 200
SALTED = {CHAT, COMPLETIONS, RESPONSES, MESSAGES, "/v1/rerank", "/v1/score"}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"const": 7}},
    "required": ["answer"],
    "additionalProperties": False,
}


@attrs.frozen
class Model:
    """`certain`: between the best two log-probabilities of each token. `vocabulary`: ids that
    prompts are made of. `sees`: it is asked about images, too."""

    name: str
    certain: float
    vocabulary: tuple[int, int]
    longest: int
    """Words of a prompt."""
    sees: bool = False


@attrs.frozen
class Question:
    """A request, and what its answer must be equal to."""

    model: str
    wish: Ask
    answer: Any

    def salted(self, salt: str) -> Ask:
        """The same, in a cache of its own: it computes what others with the same prompt have
        stored."""
        if self.wish.body is None or self.wish.path not in SALTED:
            return self.wish
        return attrs.evolve(self.wish, body={**self.wish.body, "cache_salt": salt})


async def questions(port: int, model: Model, count: int, chance: Random) -> list[Question]:
    """Of every endpoint; `count` prompts of chats, and as many of completions. Raises
    `AssertionError` if the model is sure of too few."""
    chats = [talk async for talk in _certain_talks(port, model, count, chance)]
    prompts = [prompt async for prompt in _certain_prompts(port, model, count, chance)]
    wishes = [*generating(model, chats, prompts), *computing(model, chance)]
    if model.sees:
        wishes += [wish async for wish in _certain_views(port, model, count, chance)]
    found = []
    for wish in wishes:
        heard = await ask(port, wish)
        assert heard.status in (200, 400), (wish, heard.status, heard.body[:500])
        found.append(Question(model.name, wish, answer_of(wish, heard)))
    return found


async def _certain_talks(port: int, model: Model, count: int, chance: Random) -> Any:
    for _ in range(TRIES * count):
        text = " ".join(chance.choices(WORDS, k=chance.randrange(3, model.longest)))
        talk = [
            {"role": "system", "content": "Say it again. " * 8},
            {"role": "user", "content": f"Say: {text}"},
        ]
        body = {"messages": talk, "logprobs": True, "top_logprobs": 2}
        if await _is_certain(port, model, _greedy(model, **body)):
            yield talk
            count -= 1
        if not count:
            return
    raise AssertionError(f"{model.name} is sure of too few chats")


async def _is_certain(port: int, model: Model, body: Json) -> bool:
    said = (await ask(port, Ask(CHAT, body))).json()
    steps = [
        [top["logprob"] for top in step["top_logprobs"]]
        for step in said["choices"][0]["logprobs"]["content"]
    ]
    return all(best - second > model.certain for best, second in steps)


async def _certain_views(port: int, model: Model, count: int, chance: Random) -> Any:
    """Conversations with images in each dialect, streamed and not, a large one, and a damaged
    one."""
    shot = [{"role": "user", "content": [IMAGE, text_of("What color is it?")]}]
    for number in range(count):
        while True:
            messages, scenes, _ = fresh(chance.randrange(SEEDS_OF_TESTS), 1 + number % 3)
            pictures = [draw(scene) for scene in scenes]
            body = request(CHAT, messages, pictures) | {"model": model.name}
            if await _is_certain(port, model, body | {"logprobs": True, "top_logprobs": 2}):
                break
        for path in (CHAT, MESSAGES, RESPONSES):
            wish = request(path, messages, pictures) | {"model": model.name}
            if path == RESPONSES:
                wish["store"] = True  # Clients come back for some.
            yield Ask(path, wish)
            yield Ask(path, {**wish, "stream": True})
        large = [screenshot(chance.randrange(10_000), 1280, 800)]
        yield Ask(CHAT, request(CHAT, shot, large) | {"model": model.name, "max_tokens": 1})
    yield Ask(MESSAGES, {"model": model.name, "max_tokens": 1, "messages": [_damaged()]})


def _damaged() -> Message:
    """The second half of its file is cut off."""
    data = png(screenshot(1, 320, 200))
    url = "data:image/png;base64," + b64encode(data[: len(data) // 2]).decode()
    source = {"type": "url", "url": url}
    return {"role": "user", "content": [{"type": "image", "source": source}]}


async def _certain_prompts(port: int, model: Model, count: int, chance: Random) -> Any:
    """Token ids: phrases that repeat."""
    for _ in range(TRIES * count):
        phrase = chance.sample(range(*model.vocabulary), chance.randrange(5, 12))
        prompt = (phrase * model.longest)[: chance.randrange(20, 4 * model.longest)]
        body = _greedy(model, prompt=prompt, logprobs=2)
        said = (await ask(port, Ask(COMPLETIONS, body))).json()["choices"][0]["logprobs"][
            "top_logprobs"
        ]
        best = [sorted(step.values(), reverse=True) for step in said]
        if all(len(step) > 1 and step[0] - step[1] > model.certain for step in best):
            yield prompt
            count -= 1
        if not count:
            return
    raise AssertionError(f"{model.name} is sure of too few prompts")


def _greedy(model: Model, **fields: Any) -> Json:
    return {"model": model.name, "max_tokens": TOKENS, "temperature": 0, **fields}


def generating(
    model: Model, chats: Sequence[list[Json]], prompts: Sequence[list[int]]
) -> Iterator[Ask]:
    for talk in chats:
        spoken = {"messages": talk}
        yield Ask(CHAT, _greedy(model, **spoken, stream=True))
        yield Ask(CHAT, _greedy(model, **spoken, logprobs=True, top_logprobs=3))
        yield Ask(MESSAGES, _greedy(model, **spoken, stream=True))
        yield Ask(MESSAGES, _greedy(model, **spoken))
        asked = {"model": model.name, "input": talk, "max_output_tokens": TOKENS, "temperature": 0}
        yield Ask(RESPONSES, {**asked, "stream": True})
        yield Ask(RESPONSES, {**asked, "store": True})
    for prompt in prompts:
        yield Ask(COMPLETIONS, _greedy(model, prompt=prompt, stream=True))
        yield Ask(COMPLETIONS, _greedy(model, prompt=prompt, n=2))
        yield Ask(
            COMPLETIONS,
            _greedy(model, prompt=[prompt, prompt[: len(prompt) // 2 + 1]], max_tokens=1),
        )
    schema = {"type": "json_schema", "json_schema": {"name": "seven", "schema": SCHEMA}}
    yield Ask(
        CHAT,
        _greedy(model, messages=chats[0], response_format=schema, max_tokens=40),
        structured=True,
    )


def computing(model: Model, chance: Random) -> Iterator[Ask]:
    """What generates nothing, and what is refused."""
    name = model.name
    texts = [" ".join(chance.choices(WORDS, k=length)) for length in (2, 7, 15)]
    yield Ask("/v1/embeddings", {"model": name, "input": texts})
    yield Ask("/v1/rerank", {"model": name, "query": texts[0], "documents": texts[1:]})
    yield Ask("/v1/score", {"model": name, "text_1": texts[0], "text_2": texts[1:]})
    yield Ask("/tokenize", {"model": name, "prompt": texts[2]})
    yield Ask("/detokenize", {"model": name, "tokens": [70, 71, 72]})
    yield Ask(
        "/v1/messages/count_tokens",
        {"model": name, "messages": [{"role": "user", "content": texts[1]}]},
    )
    yield Ask("/v1/responses/input_tokens", {"model": name, "input": texts[1]})
    yield Ask(
        "/infill",
        {"model": name, "input_prefix": texts[0], "input_suffix": texts[1], "n_predict": 4},
    )
    yield Ask(CHAT, {"model": name, "messages": [], "temperature": 9})
    yield Ask(COMPLETIONS, _greedy(model, prompt=texts[0], top_k="many"))


def vocabulary_of(name: str) -> tuple[int, int]:
    """Ids of the model that sees begin with markers of its template."""
    return (10, 500) if name.startswith("small") else (1000, 20_000)


def shuffled(questions: Sequence[Question], seed: int) -> list[Question]:
    return [questions[place] for place in np.random.RandomState(seed).permutation(len(questions))]
