"""Fresh questions to the model of examples/shapes, answered by mlx-vlm alone.

`python -m tests.vision_model.accuracy --questions 200` prints the wrong answers and their number.
The seeds are none of the tests' unless `--first 0` takes these.
No server and no cache take part: each token is a pass over the whole prompt.
"""

# ruff: noqa: T201
from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.models import qwen3_vl
from tokenizers import Tokenizer

from tests.pictures import Picture
from tests.vision_model.files import DIRECTORY, END_OF_MESSAGE, IMAGE_PAD, Renderer
from tests.vision_model.questions import SEEDS_OF_TESTS, Message, draw, fresh

TOKEN, PATCH = 32, 16


class Model:
    """mlx-vlm's whole model, and greedy answers."""

    def __init__(self, directory: Path = DIRECTORY) -> None:
        config = qwen3_vl.ModelConfig.from_dict(json.loads((directory / "config.json").read_text()))
        self._model = qwen3_vl.Model(config)
        weights: Any = mx.load(str(directory / "model.safetensors"))
        weights = self._model.vision_tower.sanitize(self._model.sanitize(weights))
        self._model.load_weights(list(weights.items()))
        self._model.set_dtype(mx.float32)
        self._renderer = Renderer()
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))

    @property
    def parameters(self) -> int:
        return sum(value.size for _, value in tree_flatten(self._model.parameters()))

    def answer(self, messages: Sequence[Message], pictures: Sequence[Picture]) -> str:
        grids = [(picture.shape[0] // PATCH, picture.shape[1] // PATCH) for picture in pictures]
        counts = iter([rows * columns // 4 for rows, columns in grids])
        ids: list[int] = []
        for token in self._tokenizer.encode(self._renderer.render(messages, ask=True)).ids:
            ids += [token] * (next(counts) if token == IMAGE_PAD else 1)
        inputs: dict[str, Any] = {}
        if pictures:
            pixels = np.concatenate([patches_of(picture) for picture in pictures])
            grid = mx.array([(1, rows, columns) for rows, columns in grids])
            inputs = {"pixel_values": mx.array(pixels), "image_grid_thw": grid}
        answer: list[int] = []
        while len(answer) < 16:
            output = self._model(mx.array([ids + answer]), **inputs)
            token = int(output.logits[0, -1].argmax())
            if token == END_OF_MESSAGE:
                break
            answer.append(token)
        return str(self._tokenizer.decode(answer))


def patches_of(picture: Picture) -> Any:
    """The encoder's input: (patches, channels x 2 frames x patch x patch), four of a token behind
    each other."""
    rows, columns = picture.shape[0] // TOKEN, picture.shape[1] // TOKEN
    values = picture.astype(np.float32) / 127.5 - 1
    split = values.reshape(rows, 2, PATCH, columns, 2, PATCH, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    frames = np.repeat(split[:, :, :, :, :, None], 2, axis=5)
    return frames.reshape(rows * columns * 4, -1)


def main(directory: Path, first: int, questions: int) -> None:
    model, right = Model(directory), 0
    print(f"{model.parameters:,} parameters")
    for seed in range(first, first + questions):
        messages, scenes, expected = fresh(seed, images=seed % 3 + 1)
        answer = model.answer(messages, [draw(scene) for scene in scenes])
        right += answer == expected
        if answer != expected:
            print(f"{seed}: {answer!r}, not {expected!r}, to: {messages[-1]['content']} {scenes}")
    print(f"{right} of {questions} right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=SEEDS_OF_TESTS, help="the first seed")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    options = parser.parse_args()
    main(options.directory, options.first, options.questions)
