"""Pictures of coloured shapes and digits, and questions about them with their answers.

Training and tests have the same ones, of any length that they come to. They keep to what a model of
this size answers surely: a digit stands alone in its picture, and a question which image shows
something names a color that no other of the images has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import attrs

from tests.pictures import COLORS, DIGITS, SHAPES, Picture, blank, put

SIDES = {
    (0, 1): "on the left",
    (2, 1): "on the right",
    (1, 0): "at the top",
    (1, 2): "at the bottom",
}
"""The cells (column, row) of three times three that have a name."""
CELLS = [(column, row) for row in range(3) for column in range(3)]
WIDTHS = (128, 160, 192)
"""Sides of pictures, in pixels."""
NTH = ("first", "second", "third")
WHATS = SHAPES + DIGITS


@attrs.frozen
class Thing:
    """A shape or a digit. `center` and `size` in pixels."""

    what: str
    color: str
    cell: tuple[int, int]
    center: tuple[int, int]
    size: int


@attrs.frozen
class Scene:
    width: int
    height: int
    shade: tuple[int, int, int]
    things: tuple[Thing, ...]


@attrs.frozen
class Question:
    kind: str
    text: str
    answer: str


def draw(scene: Scene) -> Picture:
    picture = blank(scene.width, scene.height, scene.shade)
    for thing in scene.things:
        put(picture, thing.what, thing.color, thing.center, thing.size)
    return picture


ALONE = (1, 1, 1, 2, 2, 3, 4)
AMONG_OTHERS = (1, 1, 1, 2)
"""How many things are in a picture: in a single one, and in one of several."""


def make_scene(drawn: Random, width: int, height: int, counts: Sequence[int] = ALONE) -> Scene:
    """A scene about which something can be asked."""
    while not questions_of(scene := _random_scene(drawn, width, height, drawn.choice(counts))):
        pass
    return scene


def _random_scene(drawn: Random, width: int, height: int, count: int) -> Scene:
    """A digit alone, or shapes in different cells, on grey."""
    digit = drawn.random() < 0.25
    pool, count = (DIGITS, 1) if digit else (SHAPES, count)
    cells = drawn.sample(CELLS, count)
    alike = count > 1 and drawn.random() < 0.4
    things: list[Thing] = []
    for cell in cells:
        what, color = drawn.choice(pool), drawn.choice(list(COLORS))
        if alike and things and drawn.random() < 0.6:
            color = things[0].color
        things.append(_put_into_cell(drawn, what, color, cell, (width, height)))
    if count == 1 and drawn.random() < 0.5:
        size = int(drawn.uniform(0.4, 0.75) * min(width, height))
        things = [attrs.evolve(things[0], cell=(1, 1), center=(width // 2, height // 2), size=size)]
    grey = drawn.randint(105, 190)
    red, green, blue = (grey + drawn.randint(-6, 6) for _ in range(3))
    return Scene(width, height, (red, green, blue), tuple(things))


def _put_into_cell(
    drawn: Random, what: str, color: str, cell: tuple[int, int], sides: tuple[int, int]
) -> Thing:
    """In the middle of the cell, nearly."""
    step = min(sides) / 3
    x, y = (
        int((part + 0.5) * side / 3 + drawn.uniform(-0.05, 0.05) * step)
        for part, side in zip(cell, sides, strict=True)
    )
    return Thing(what, color, cell, (x, y), int(drawn.uniform(0.75, 0.95) * step))


def questions_of(scene: Scene) -> list[Question]:
    """All that can be asked about a picture and has one answer."""
    things = scene.things
    questions: list[Question] = []
    for thing in things:
        noun = "digit" if thing.what in DIGITS else "shape"
        if len(things) == 1:
            questions += [
                _color(thing, "What {color} is it?"),
                _color(thing, f"What {{color}} is the {noun}?"),
                _what(thing, f"What {noun} is it?"),
                _what(thing, f"Which {noun} do you see?"),
            ]
        if _count(things, what=thing.what) == 1:
            questions.append(_color(thing, f"What {{color}} is the {thing.what}?"))
            questions.append(_color(thing, f"Which {{color}} does the {thing.what} have?"))
        if _count(things, color=thing.color) == 1:
            questions.append(_what(thing, f"What {noun} is {thing.color}?"))
            questions.append(_what(thing, f"Which {noun} is {thing.color}?"))
        if thing.cell in SIDES and len(things) == 1:
            name = f"the {thing.color} {thing.what}"
            answer = f"It is {SIDES[thing.cell]}."
            questions.append(Question("where", f"Where is {name}?", answer))
            questions.append(Question("where", f"On which side is {name}?", answer))
    if all(thing.what in SHAPES for thing in things):
        questions += _counts(things)
    return questions


def _color(thing: Thing, text: str) -> Question:
    return Question("color", text, f"It is {thing.color}.")


def _what(thing: Thing, text: str) -> Question:
    kind = "digit" if thing.what in DIGITS else "shape"
    return Question(kind, text, f"It is a {thing.what}.")


def _count(things: Sequence[Thing], *, what: str = "", color: str = "") -> int:
    return sum(what in ("", thing.what) and color in ("", thing.color) for thing in things)


def _counts(things: Sequence[Thing]) -> list[Question]:
    all_of_them = _number(len(things))
    texts = ("How many shapes are there?", "How many shapes do you see?")
    questions = [Question("count", text, all_of_them) for text in texts]
    for color in {thing.color: None for thing in things}:
        number = _number(_count(things, color=color))
        questions.append(Question("count", f"How many {color} shapes are there?", number))
    return questions


def _number(count: int) -> str:
    return "There is 1." if count == 1 else f"There are {count}."


def pick(drawn: Random, questions: Sequence[Question]) -> Question:
    """One of them: first a kind, then a question of it."""
    kinds = sorted({question.kind for question in questions})
    kind = drawn.choice(kinds)
    question = drawn.choice([each for each in questions if each.kind == kind])
    spelling = "color" if drawn.random() < 0.5 else "colour"
    return attrs.evolve(question, text=question.text.replace("{color}", spelling))


def ask_about(drawn: Random, scenes: Sequence[Scene], number: int) -> Question:
    """A question that names the image by its number among several."""
    question = pick(drawn, questions_of(scenes[number]))
    ending = f" in the {NTH[number]} {drawn.choice(['image', 'picture'])}?"
    return attrs.evolve(question, text=question.text.removesuffix("?") + ending)


def ask_which(drawn: Random, scenes: Sequence[Scene]) -> Question | None:
    """A question which of the images shows something; None if nothing tells them apart."""
    number = drawn.randrange(len(scenes))
    thing = drawn.choice(scenes[number].things)
    others = [scene for at, scene in enumerate(scenes) if at != number]
    if any(other.color == thing.color for scene in others for other in scene.things):
        return None
    name = f"the {thing.color} {thing.what}"
    forms = (f"Which image shows {name}?", f"In which picture do you see {name}?")
    return Question("which", drawn.choice(forms), f"It is the {NTH[number]}.")


Message = dict[str, Any]
IMAGE: Message = {"type": "image"}
FILLERS = (
    "Look at this.",
    "Please answer in one short sentence.",
    "Here is a picture",
    "I have a question about what you see.",
    "Thanks!",
    "Now the next one:",
    "ok",
    "Screenshot of the page after the click.",
    "Image 1:",
    "The file was read.",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You look at pictures and answer.",
    "You are a coding agent. Use the tools.",
    "Answer briefly.",
)
NO_IMAGE = "I see no image."
SEEDS_OF_TESTS = 1000
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 /.-_:,{}\"'\n"


def _filler(drawn: Random) -> str:
    if drawn.random() < 0.7:
        return drawn.choice(FILLERS)
    return "".join(drawn.choice(LETTERS) for _ in range(drawn.randint(1, 12)))


def text_of(text: str) -> Message:
    return {"type": "text", "text": text}


def _user(drawn: Random, images: int, question: str) -> Message:
    """A message with the images before the question, behind it, or with text between."""
    content = [IMAGE] * images
    if drawn.random() < 0.3:
        content = [part for image in content for part in (text_of(_filler(drawn)), image)]
    where = 0 if content and drawn.random() < 0.25 else len(content)
    return {"role": "user", "content": [*content[:where], text_of(question), *content[where:]]}


def _tool_round(drawn: Random, question: str, images: int) -> list[Message]:
    """A question, a call of a tool, and the images as its result."""
    tool = drawn.choice(["view_image", "Read", "screenshot", "browser"])
    name = "".join(drawn.choice(LETTERS[:36]) for _ in range(drawn.randint(1, 9)))
    call = {"function": {"name": tool, "arguments": {"path": f"/tmp/{name}.png"}}}
    result = [IMAGE] * images
    if drawn.random() < 0.3:
        result = [text_of(_filler(drawn)), *result]
    return [
        _user(drawn, 0, question),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
    ]


def _answered(messages: Sequence[Message], question: Question) -> list[Message]:
    return [*messages, {"role": "assistant", "content": question.answer}]


def _together(drawn: Random, scenes: Sequence[Scene]) -> list[Message]:
    """All images in one message, or as a tool's result, and up to three questions."""
    messages: list[Message] = []
    for turn in range(drawn.randint(1, 2)):
        question = ask_several(drawn, scenes)
        turn_messages = [_user(drawn, len(scenes) if turn == 0 else 0, question.text)]
        if turn == 0 and drawn.random() < 0.3:
            turn_messages = _tool_round(drawn, question.text, len(scenes))
        messages += _answered(turn_messages, question)
    return messages


def ask_several(drawn: Random, scenes: Sequence[Scene]) -> Question:
    if len(scenes) == 1:
        return pick(drawn, questions_of(scenes[0]))
    which = ask_which(drawn, scenes) if drawn.random() < 0.5 else None
    return which or ask_about(drawn, scenes, drawn.randrange(len(scenes)))


def _one_by_one(drawn: Random, scenes: Sequence[Scene]) -> list[Message]:
    """An image a turn; a question without a number is about the newest."""
    messages: list[Message] = []
    for scene in scenes:
        question = pick(drawn, questions_of(scene))
        turn_messages = [_user(drawn, 1, question.text)]
        if drawn.random() < 0.4:
            turn_messages = _tool_round(drawn, question.text, 1)
        messages += _answered(turn_messages, question)
    if len(scenes) > 1 and drawn.random() < 0.5:
        question = ask_several(drawn, scenes)
        messages += _answered([_user(drawn, 0, question.text)], question)
    return messages


def _without(drawn: Random, width: int, height: int) -> list[Message]:
    question = pick(drawn, questions_of(make_scene(drawn, width, height)))
    answered = attrs.evolve(question, answer=NO_IMAGE)
    return _answered([_user(drawn, 0, question.text)], answered)


def conversation(
    drawn: Random, sizes: Sequence[tuple[int, int]]
) -> tuple[list[Message], list[Scene]]:
    """Messages with an image of each size (width, height), in order, and their scenes."""
    counts = ALONE if len(sizes) == 1 else AMONG_OTHERS
    scenes = [make_scene(drawn, width, height, counts) for width, height in sizes]
    if not scenes:
        messages = _without(drawn, 128, 128)
    else:
        forms: list[Callable[..., list[Message]]] = [_together, _one_by_one]
        messages = drawn.choice(forms)(drawn, scenes)
    if drawn.random() < 0.4:
        content = drawn.choice(SYSTEMS) if drawn.random() < 0.6 else _filler(drawn)
        messages = [{"role": "system", "content": content}, *messages]
    return messages, scenes


def fresh(seed: int, images: int) -> tuple[list[Message], list[Scene], str]:
    """Messages up to a random one of the answers, their scenes, and the answer. The tests take the
    seeds below `SEEDS_OF_TESTS`, and nothing is trained or chosen by these."""
    drawn = Random(f"unseen question {seed}")
    sizes = [(drawn.choice(WIDTHS), drawn.choice(WIDTHS)) for _ in range(images)]
    messages, scenes = conversation(drawn, sizes)
    ends = [
        at
        for at, message in enumerate(messages)
        if message["role"] == "assistant" and message["content"]
    ]
    end = drawn.choice(ends)
    earlier = messages[:end]
    shown = sum(
        part["type"] == "image"
        for message in earlier
        if not isinstance(message["content"], str)
        for part in message["content"]
    )
    return earlier, scenes[:shown], messages[end]["content"]


def which_of_two(seed: int) -> tuple[list[Message], list[Scene], str, str]:
    """A question which of two images of one size shows something, their scenes, the answer, and the
    answer when the images change places."""
    drawn = Random(f"unseen pair {seed}")
    width, height = drawn.choice(WIDTHS), drawn.choice(WIDTHS)
    question = None
    while question is None:
        scenes = [make_scene(drawn, width, height, AMONG_OTHERS) for _ in range(2)]
        question = ask_which(drawn, scenes)
    answers = [f"It is the {nth}." for nth in NTH[:2]]
    [swapped] = set(answers) - {question.answer}
    return [_user(drawn, 2, question.text)], scenes, question.answer, swapped
